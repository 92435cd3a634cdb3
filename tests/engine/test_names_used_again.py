"""A request's name is another's as soon as nobody waits for it: what is still to be told of the first one is not told
to the second."""

from __future__ import annotations

from typing import Any

from pagedec import SamplingParams
from pagedec.core.request import Request
from pagedec.engine.loop import EngineLoop
from pagedec.errors import RequestError
from tests.engine.crowd import Tiny

PROMPT = [5, 17, 40, 99, 3]


class Told:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.errors: list[RequestError] = []
        self.results: list[Any] = []

    def tokens(self, rank: int, token_ids: Any, logprobs: Any) -> None:
        self.token_ids += token_ids

    def settled(self, token_ids: Any, logprobs: Any) -> None: ...

    def ended(self, event: Any) -> None: ...

    def finished(self, result: Any) -> None:
        self.results.append(result)

    def failed(self, error: RequestError) -> None:
        self.errors.append(error)

    @property
    def is_over(self) -> bool:
        return bool(self.errors or self.results)


def submitted(loop: EngineLoop, seed: int, max_tokens: int) -> tuple[Request, Told]:
    params, told = SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True), Told()
    request = loop.engine.admit("x", PROMPT, params)
    loop.submit(request, told)
    return request, told


def answer(loop: EngineLoop, seed: int, max_tokens: int) -> list[int]:
    _, told = submitted(loop, seed, max_tokens)
    loop.drive(lambda: told.is_over)
    return told.token_ids


def test_one_that_was_aborted_while_its_last_tokens_were_on_their_way(tiny: Tiny) -> None:
    """A step is out; the cache is emptied, which waits for it, the request is aborted, and its name used again."""
    loop = tiny(async_scheduling=True).loop
    expected, max_tokens = answer(loop, 2, 9), 3
    for num_tokens in range(1, max_tokens + 1):
        _, first = submitted(loop, 1, max_tokens)
        loop.drive(lambda first=first, num=num_tokens: len(first.token_ids) >= min(num, max_tokens - 1))
        loop.call(lambda engine: engine.reset_prefix_cache())
        loop.abort("x")
        _, second = submitted(loop, 2, 9)
        loop.drive(lambda second=second: second.is_over)
        assert second.token_ids == expected and len(second.results) == 1 and not first.results
        assert second.results[0].answers[0].token_ids == expected


def test_one_that_has_failed_is_told_before_its_name_is_free(tiny: Tiny) -> None:
    loop = tiny().loop
    _, first = submitted(loop, 1, 9)
    loop.drive(lambda: bool(first.token_ids))
    loop.call(lambda engine: engine.fail("x", RequestError("x", "made up")))
    _, second = submitted(loop, 2, 9)
    loop.drive(lambda: second.is_over)
    assert [str(error) for error in first.errors] == ["request 'x': made up"]
    assert "must not be the id of a request that still runs" in str(second.errors[0])
    assert answer(loop, 2, 9) == answer(loop, 2, 9)
