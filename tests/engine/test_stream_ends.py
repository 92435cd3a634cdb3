"""What the engine's thread puts into a stream, as another thread finds it that looks at any time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from pagedec import RequestOutputKind, SamplingParams
from pagedec.engine.completion import Completion
from pagedec.errors import RequestError
from pagedec.llm.prompts import Job
from pagedec.llm.streams import Stream
from pagedec.llm.writer import Writer
from pagedec.text.byte_table import ByteTable


def made(**fields: Any) -> Stream:
    return Stream(Job("a", None, [5], SamplingParams(**fields)), Writer(None, ()))


class Watched(deque[Any]):
    """Notes what a reader would see that looks right before something is put in."""

    seen: Callable[[], bool]

    def append(self, news: Any) -> None:
        assert not self.seen()
        super().append(news)


@pytest.mark.parametrize("how", ["failed", "aborted"])
def test_who_finds_a_stream_over_finds_its_end(how: str) -> None:
    stream = made(output_kind=RequestOutputKind.FINAL_ONLY)
    stream._news = Watched()
    stream._news.seen = lambda: stream.is_over
    if how == "failed":
        stream.failed(RequestError("a", "is poisonous"))
        with pytest.raises(RequestError, match="poisonous"):
            list(stream.read())
    else:
        stream.aborted()
        [output] = stream.read()
        assert output.outputs[0].finish_reason == "abort"
    assert stream.is_over


def test_what_comes_while_somebody_reads_is_read_the_next_time() -> None:
    """It may be large: whether a thread is to read it was asked before."""
    stream = made(output_kind=RequestOutputKind.DELTA)
    logprobs, late = stream.writer.logprobs, iter([((8, 9), None)])

    def reading(reports: Any) -> Any:
        for news in late:
            stream.settled(*news)
        return logprobs(reports)

    stream.writer.logprobs = reading  # type: ignore[method-assign]
    stream.settled((7,), None)
    assert [output.outputs[0].token_ids for output in stream.read()] == [[7]]
    assert stream.has_news
    assert [output.outputs[0].token_ids for output in stream.read()] == [[8, 9]]


class Table:
    """As much of a tokenizer as texts need."""

    byte_table = ByteTable([b"one ", b"two ", b".", b"<end>"], frozenset({3}))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("end", "fields"), [(2, {"stop_token_ids": [2]}), (3, {"skip_special_tokens": False})])
def test_a_stop_token_is_no_text_for_who_reads_before_the_end_was_put_in(
    end: int, fields: dict[str, Any], include: bool
) -> None:
    """Its token comes first, and then that it was the last one."""
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, include_stop_str_in_output=include, **fields)
    stream = Stream(Job("a", None, [5], params), Writer(Table(), (3,)))  # type: ignore[arg-type]
    texts, token_ids = [], []
    for news in ((0, [0, 1], None), (0, [end], None), (0, Completion([0, 1, end], "stop", end, None))):
        stream._put(news)  # type: ignore[arg-type]
        for output in stream.read():
            texts.append(output.outputs[0].text)
            token_ids += output.outputs[0].token_ids
    last = Table.byte_table.token_bytes(end).decode() if include else ""
    assert "".join(texts) == "one two " + last and token_ids == [0, 1, end]


def test_the_answers_of_a_request_share_its_stop_tokens() -> None:
    """They may be a vocabulary: of 64 answers each had 4 MB of its own."""
    params = SamplingParams(n=3, stop_token_ids=[2], output_kind=RequestOutputKind.DELTA)
    stream = Stream(Job("a", None, [5], params), Writer(Table(), (3,)))  # type: ignore[arg-type]
    for rank in range(3):
        stream.tokens(rank, [0], None)
    assert len(list(stream.read())[0].outputs) == 3
    ends = [growing._text._ends for growing in stream._grown.values() if growing._text is not None]
    assert len(ends) == 3 and ends[0] == {2, 3} and all(own is ends[0] for own in ends)
