"""What the engine's thread puts into a stream, as another thread finds it that looks at any time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from pagedec import RequestOutputKind, SamplingParams
from pagedec.errors import RequestError
from pagedec.llm.prompts import Job
from pagedec.llm.streams import Stream
from pagedec.llm.writer import Writer


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
