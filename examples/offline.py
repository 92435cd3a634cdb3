"""Several prompts, each with its own parameters, in one continuous batch; then a stream and a conversation.

python examples/offline.py
"""

from __future__ import annotations

from pagedec import LLM, SamplingParams

PROMPTS = {
    "The capital of France is": SamplingParams(temperature=0, max_tokens=16, stop="."),
    "Once upon a time": SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=48),
    "My three favourite colours are": SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=16),
}


def stream(llm: LLM, prompt: str) -> None:
    """Print an answer as it grows."""
    shown = 0
    for output in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=24)):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print()


def talk(llm: LLM, questions: list[str]) -> None:
    """Ask one question after the other; each prompt's tokens begin with all that was said, which is still cached."""
    conversation = llm.conversation()
    for question in questions:
        token_ids = conversation.ask(question)
        [output] = llm.generate([token_ids], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
        text = conversation.answer(output.outputs[0].token_ids)
        print(f"{question!r} -> {text!r} ({output.num_cached_tokens} of {len(token_ids)} prompt tokens were cached)")


def main() -> None:
    with LLM(model="smollm2") as llm:
        for output in llm.generate(list(PROMPTS), list(PROMPTS.values())):
            for answer in output.outputs:
                print(f"{output.prompt!r} -> {answer.text!r} ({answer.finish_reason})")
        stream(llm, "The sun is")
        talk(llm, ["What is the capital of France?", "And of Spain?"])


if __name__ == "__main__":
    main()
