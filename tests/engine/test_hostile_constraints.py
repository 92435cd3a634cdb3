"""Constraints that go wrong end their own request, and cost nobody else a step, a bit or the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedec import AsyncLLM, BeamSearchParams, InvalidArgument, SamplingParams, TokenTrie
from pagedec.errors import RequestError, RequestsFailed
from tests.engine.crowd import NUM_PROMPTS, Tiny, Tokens, assert_whole, workload

KINDS: dict[str, Any] = {
    "greedy": SamplingParams(temperature=0, max_tokens=9),
    "beams": BeamSearchParams(beam_width=3, max_tokens=9),
}


class Unspeakable(Exception):
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise ZeroDivisionError("made up")


def after_two(error: BaseException) -> Callable[[list[int]], list[int]]:
    calls = []

    def allowed(tokens: list[int]) -> list[int]:
        calls.append(len(tokens))
        if len(calls) > 2:
            raise error
        return [5, 6, 7, 8]

    return allowed


def fails_alone(tiny: Tiny, expected: Sequence[Tokens], params: Any, message: str) -> None:
    llm = tiny()
    prompts, others = workload()
    others[2] = params
    with pytest.raises(RequestsFailed, match=message) as caught:
        llm.generate(prompts, others, use_tqdm=False)
    got = [[answer.token_ids for answer in output.outputs] for output in caught.value.outputs]
    assert got == [want if i != 2 else [] for i, want in enumerate(expected)] and len(got) == NUM_PROMPTS
    assert llm.engine.stats.num_failed_steps == 0
    assert_whole(llm, list(expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("made up"), r"what is allowed: KeyError\('made up'\)"),
        (Unspeakable(), "what is allowed: a Unspeakable that cannot be shown"),
        (SystemExit(3), r"allowed_tokens_fn has raised SystemExit\(3\)"),
        (asyncio.CancelledError(), r"allowed_tokens_fn has raised CancelledError\(\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_function_raises(
    tiny: Tiny, expected: list[Tokens], kind: str, error: BaseException, message: str
) -> None:
    fails_alone(tiny, expected, KINDS[kind].clone(allowed_tokens_fn=after_two(error)), message)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", [500, -7])
def test_a_damaged_trie_that_names_tokens_which_there_are_not(
    tiny: Tiny, expected: list[Tokens], tmp_path: Path, kind: str, token: int
) -> None:
    path = tmp_path / "damaged.trie"
    TokenTrie([[5, 6, 7], [5, 6, 8], [9, 10]]).save(path)
    trie = TokenTrie.open(path)
    trie.tokens = trie.tokens.copy()
    trie.tokens[trie.tokens == 8] = token
    message = "what is allowed: ValueError.*names tokens that are not from 0 to 130"
    fails_alone(tiny, expected, KINDS[kind].clone(token_trie=trie), message)


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError()], ids=str)
def test_a_server_outlives_what_a_function_raises(tiny_path: Path, error: BaseException) -> None:
    async def one(llm: AsyncLLM, name: str, params: Any) -> list[int]:
        last = None
        async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, params, name):
            last = output
        assert last is not None
        return last.outputs[0].token_ids

    async def main() -> None:
        settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64}
        async with AsyncLLM(str(tiny_path), **settings) as llm:
            want = await one(llm, "alone", KINDS["beams"])
            bad = one(llm, "bad", KINDS["beams"].clone(allowed_tokens_fn=after_two(error)))
            failed, got = await asyncio.gather(bad, one(llm, "good", KINDS["beams"]), return_exceptions=True)
            assert isinstance(failed, RequestError) and "allowed_tokens_fn has raised" in str(failed)
            assert got == want == await one(llm, "later", KINDS["beams"])

    asyncio.run(main())


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-60])
def test_temperatures_that_no_logit_can_be_divided_by(temperature: float) -> None:
    """They would fail steps on the device, the neighbours' too."""
    with pytest.raises(InvalidArgument, match=r"temperature is 1e-\d+: must be 0, or a finite number at least 1e-05"):
        BeamSearchParams(max_tokens=4, do_sample=True, temperature=temperature)
