"""Several prompts, each with its own parameters, in one continuous batch: python examples/offline.py"""

from __future__ import annotations

from pagedec import LLM, SamplingParams

PROMPTS = {
    "The capital of France is": SamplingParams(temperature=0, max_tokens=16),
    "Once upon a time": SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=48),
    "My three favourite colours are": SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=16),
}


def main() -> None:
    llm = LLM(model="smollm2")
    for output in llm.generate(list(PROMPTS), list(PROMPTS.values())):
        for answer in output.outputs:
            print(f"{output.prompt!r} -> {answer.text!r} ({answer.finish_reason})")
    llm.close()


if __name__ == "__main__":
    main()
