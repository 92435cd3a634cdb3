"""Several answers at once from coroutines: a stream of pieces, a chat, and one that is given up after a while.

python examples/async_llm.py
"""

from __future__ import annotations

import asyncio

from pagedec import AsyncLLM, RequestOutputKind, SamplingParams


async def tell(llm: AsyncLLM, prompt: str) -> str:
    """The answer, put together from what is new in each output."""
    params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.DELTA)
    pieces = []
    async for output in llm.generate(prompt, params):
        pieces.append(output.outputs[0].text)  # a server would send each of them on
    return f"{prompt!r} -> {''.join(pieces)!r} in {len(pieces)} pieces"


async def ask(llm: AsyncLLM, question: str) -> str:
    """A chat's answer, once it is whole."""
    params = SamplingParams(temperature=0, max_tokens=32, output_kind=RequestOutputKind.FINAL_ONLY)
    async for output in llm.chat([{"role": "user", "content": question}], params):
        return f"{question!r} -> {output.outputs[0].text!r}"
    raise AssertionError("there is always a last output")


async def give_up(llm: AsyncLLM, prompt: str, seconds: float) -> str:
    """What there is after some time. Leaving a task, here by `asyncio.timeout`, aborts its request; so does
    `llm.abort(request_id)`."""
    text = ""
    try:
        async with asyncio.timeout(seconds):
            async for output in llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True)):
                text = output.outputs[0].text  # by default all of the text so far
    except TimeoutError:
        return f"{prompt!r} was given up after {seconds} s and {len(text)} characters"
    return f"{prompt!r} -> {text!r}"


async def main() -> None:
    async with AsyncLLM("smollm2") as llm:
        answers = (
            tell(llm, "The sun is"),
            tell(llm, "The capital of France is"),
            ask(llm, "What is the capital of Japan?"),
            give_up(llm, "Once upon a time", 0.5),
        )
        for answer in asyncio.as_completed(answers):
            print(await answer)


if __name__ == "__main__":
    asyncio.run(main())
