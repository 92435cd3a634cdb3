"""Answers that differ: groups of beams that shun each other's tokens, and beams that are drawn at random.

python examples/beam_groups.py
"""

from __future__ import annotations

from pagedec import LLM, BeamSearchParams

PROMPT = "My favourite place in the world is"
PLAIN = BeamSearchParams(beam_width=6, max_tokens=16)
KINDS = {
    "one search": PLAIN,
    "three groups": PLAIN.clone(num_beam_groups=3, diversity_penalty=2.0),
    "drawn": PLAIN.clone(do_sample=True, temperature=1.2, top_k=50, seed=1),
}


def num_beginnings(texts: list[str]) -> int:
    """In how many ways the answers begin: with how many different words."""
    return len({text.split()[0] for text in texts})


def main() -> None:
    with LLM(model="smollm2") as llm:
        outputs = llm.generate([PROMPT] * len(KINDS), list(KINDS.values()), use_tqdm=False)
        for name, output in zip(KINDS, outputs, strict=True):
            print(f"== {name}: {num_beginnings([answer.text for answer in output.outputs])} beginnings")
            print(output.tree())


if __name__ == "__main__":
    main()
