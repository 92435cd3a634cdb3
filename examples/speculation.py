"""Several tokens a step, with the same answers: ways to draft, for an engine and for single requests.

python examples/speculation.py [model]
"""

from __future__ import annotations

import sys
import time

from pagedec import LLM, BeamSearchParams, SamplingParams

TEXT = (
    "The committee met on Monday in the old town hall. It agreed to repair the bridge before the winter, and to ask "
    "the county for half of the money."
)
PROMPT = f"{TEXT}\n\nThe same text once more:\n\n{TEXT[:30]}"
WAYS = {
    "plain": False,
    "n-grams": {"method": "ngram"},
    "n-grams, always 8 wide": {"method": "ngram", "num_speculative_tokens": 8, "adaptive": False},
    "suffixes, of past answers too": {"method": "suffix"},
    "lookahead": {"method": "lookahead"},
    "the engine's": None,
}


def main(model: str = "smollm2") -> None:
    # a draft model: any smaller one with the same tokens; here the model itself, in 8 bits
    llm = LLM(model=model, max_model_len=512, speculative_config={"model": model, "quantization": "int8"})
    greedy = SamplingParams(temperature=0, max_tokens=40)
    texts = set()
    for name, speculative in WAYS.items():
        began, steps = time.perf_counter(), llm.engine.stats.num_steps
        [output] = llm.generate(PROMPT, greedy.clone(speculative=speculative), use_tqdm=False)
        seconds, steps = time.perf_counter() - began, llm.engine.stats.num_steps - steps
        metrics, texts = output.metrics, texts | {output.outputs[0].text}
        assert metrics is not None
        drafts = f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted tokens accepted"
        print(f"{name:30} {metrics.num_output_tokens} tokens in {steps} steps and {seconds:.2f} s; {drafts}")
    print(f"{len(texts)} text: {texts.pop()!r}")

    beams = BeamSearchParams(beam_width=3, max_tokens=20)  # plain, unless they say so
    plain, drafted = llm.generate([PROMPT] * 2, [beams, beams.clone(speculative={"method": "ngram"})], use_tqdm=False)
    same = [(beam.token_ids, beam.score) for beam in plain.outputs] == [(b.token_ids, b.score) for b in drafted.outputs]
    print(f"beams: {'the same' if same else 'others'} with drafts")

    with llm.session(PROMPT, seed=7) as session:  # each call of a session as it likes
        session.generate(greedy, speculative={"method": "ngram"})
        session.append("\n\nIn other words:")
        session.generate(temperature=0.8, max_tokens=20, speculative={"method": "draft_model", "verify": "rejection"})
        print(repr(session.text[len(PROMPT) :]))

    for method, counts in llm.engine.stats.drafts.items():
        places = ", ".join(f"{taken}/{drafted}" for taken, drafted in zip(counts.accepted, counts.drafted, strict=True))
        if counts.num_drafts:
            print(f"{method}: accepted by place {places}")
    llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
