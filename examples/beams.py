"""Beam search: the most probable answers with their scores, as a tree, as a picture, as a stream; mixed with others.

python examples/beams.py [tree.svg|tree.html]
"""

from __future__ import annotations

import sys
from pathlib import Path

from pagedec import LLM, BeamSearchParams, RequestOutput, SamplingParams

PROMPT = "The three most important things in life are"


def save(output: RequestOutput, path: Path) -> None:
    """Write the answers as a tree, into one file that needs no other."""
    tree = output.tree()
    path.write_text(tree.html() if path.suffix == ".html" else tree.svg(), encoding="utf-8")


def stream(llm: LLM, prompt: str, params: BeamSearchParams) -> None:
    """Print the best answer as it settles: what all beams have in common can no longer change."""
    shown, pieces = 0, 0
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        pieces += len(text) > shown
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print(f"  (in {pieces} pieces)")


def main(path: str | None = None) -> None:
    with LLM(model="smollm2") as llm:
        # generate: the answers of a beam search like any other request's, the best first
        params = BeamSearchParams(beam_width=4, max_tokens=24, length_penalty=1.0, early_stopping=False)
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
        for answer in output.outputs:
            print(f"{answer.score:8.4f} {answer.text!r}")

        # where they part, which blocks of KV they share, how they score
        print(output.tree())
        if path is not None:
            save(output, Path(path))

        # vLLM's own call; sequences begin with the prompt
        [beams] = llm.beam_search([PROMPT], BeamSearchParams(beam_width=4, max_tokens=24))
        print("best:", beams.sequences[0].text)

        # the best so far, when the time is over
        hurried = params.clone(max_tokens=400, ignore_eos=True, max_time=0.5, num_return_sequences=1)
        [output] = llm.generate(PROMPT, hurried, use_tqdm=False)
        answer = output.outputs[0]
        print(f"after half a second: {len(answer.token_ids)} tokens, limited by {answer.limited_by}")

        # all kinds of requests in one batch
        kinds = [params.clone(logprobs=0), SamplingParams(temperature=0, max_tokens=24, logprobs=0)]
        for name, output in zip(("beams", "greedy"), llm.generate([PROMPT] * 2, kinds, use_tqdm=False), strict=True):
            print(f"log-probability by {name}: {output.outputs[0].cumulative_logprob:.3f}")

        stream(llm, PROMPT, params.clone(beam_width=3, max_tokens=48))


if __name__ == "__main__":
    main(*sys.argv[1:2])
