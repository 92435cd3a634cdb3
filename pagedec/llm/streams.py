"""One request's answers while they grow: the engine's thread puts in what comes, the reader takes out what there is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pagedec.core.logprobs import TokenLogprobs
from pagedec.core.request import Finished
from pagedec.core.resuming import Resume, ToldAnswer
from pagedec.engine.completion import Completion, answer_of
from pagedec.engine.engine import FinishedRequest
from pagedec.errors import InvalidArgument, RequestError, Shown, counted
from pagedec.llm.prompts import Job
from pagedec.llm.writer import Writer
from pagedec.outputs import CompletionOutput, Logprob, RequestOutput
from pagedec.params import RequestOutputKind
from pagedec.text.streaming import TextStream

_Tokens = tuple[int | None, Sequence[int], Sequence[TokenLogprobs | None] | None]
"""New tokens of the answer of a rank, or for None of all answers."""
ALL_REPORTED = 1 << 16
"""As many log-probabilities are taken to be reported of a token of which all are."""
_News = _Tokens | tuple[int, Completion] | FinishedRequest | RequestError | None


class Stream:
    """The sink of one request, and its reader. What comes faster than it is read is merged.

    `notify` is called by the engine's thread when there is news. Everything else belongs to the reader's thread: texts
    are made there. Text never ends within a character, nor with what may be the beginning of a stop string.
    """

    def __init__(self, job: Job, writer: Writer, resume: Resume | None = None) -> None:
        """`resume`: what was told of the answers before, and is not given out again."""
        self.job, self.writer = job, writer
        self._told = {} if resume is None else dict(enumerate(resume.answers))
        self.notify: Callable[[], None] | None = None
        self._is_final_only = job.params.output_kind is RequestOutputKind.FINAL_ONLY
        self._interval = job.params.stream_interval
        self._untold: dict[int | None, int] = {}  # tokens of each answer since its reader was last woken for it
        self._is_due = False
        self._widths = [_width(job.params.logprobs), _width(job.params.prompt_logprobs)]
        self.is_over = False
        """Nothing more will come; what has come may still be unread."""
        self.is_aborted = False
        """It is over because its reader's side said so."""
        self._news: deque[_News] = deque()
        self._grown: dict[int, _Growing] = {}
        self._ends: frozenset[int] | None = None
        self._common: _Growing | None = None
        """What all answers have in common, of those that are told of together."""

    # ---- the engine's side
    def tokens(self, rank: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> None:
        self._put((rank, token_ids, logprobs), is_quiet=not self._is_worth(rank, len(token_ids)))

    def settled(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> None:
        self._put((None, token_ids, logprobs), is_quiet=not self._is_worth(None, len(token_ids)))

    def ended(self, event: Finished) -> None:
        self._put((event.hypothesis.rank, answer_of(event.request, event.hypothesis)))

    def finished(self, result: FinishedRequest) -> None:
        self._put(result, is_last=True)

    def failed(self, error: RequestError) -> None:
        self._put(error, is_last=True)

    def _put(self, news: _News, is_quiet: bool = False, is_last: bool = False) -> None:
        self._news.append(news)
        if is_last:
            self.is_over = True  # behind it: who finds a stream over finds its end
        if not is_quiet:
            self._is_due = True
            if self.notify is not None:
                self.notify()

    def _is_worth(self, rank: int | None, num_tokens: int) -> bool:
        """Whether an answer has enough new tokens for an output."""
        if self._is_final_only or self._interval == 1:
            return not self._is_final_only
        count = self._untold.get(rank, self._interval - 1) + num_tokens
        self._untold[rank] = count if count < self._interval else 0
        return count >= self._interval

    # ---- the reader's side
    def aborted(self) -> None:
        """The request was aborted: what there is will be its last output."""
        if not self.is_over:
            self._news.append(None)
            self.is_over = self.is_aborted = True

    @property
    def has_news(self) -> bool:
        return self.is_over or (self._is_due and not self._is_final_only)

    @property
    def num_reported(self) -> int:
        """About how many log-probabilities there are to read: each takes microseconds."""
        return sum(map(self._num_reported, list(self._news))) if any(self._widths) else 0

    def _num_reported(self, news: _News) -> int:
        own, prompts = self._widths
        if isinstance(news, FinishedRequest):
            num_tokens = sum(len(answer.token_ids) for answer in news.answers)
            return num_tokens * own + len(news.prompt_logprobs or ()) * prompts
        if not isinstance(news, tuple):
            return 0
        return len(news[1].token_ids if isinstance(news[1], Completion) else news[1]) * own

    def read(self) -> Iterator[RequestOutput]:
        """The outputs that the news make which are there by now, of the kind that the request asks for: usually one,
        none where only the final one is wanted. Raises `RequestError` behind them if the request has failed."""
        job, is_delta = self.job, self.job.params.output_kind is RequestOutputKind.DELTA
        touched: dict[int, _Growing] = {}
        failure: RequestError | None = None
        self._is_due = False  # before looking: what comes from now on is due again
        for news in self._taken():
            if isinstance(news, FinishedRequest):
                final = self.writer.request(job, news)
                if is_delta:
                    parts = [self._growing(answer.index).rest(answer) for answer in final.outputs]
                    final = self.writer.output(job, parts, True, final.metrics, final.prompt_logprobs)
                yield final
                return
            if isinstance(news, RequestError):
                failure = news
                break
            if news is None:
                yield self._cut()
                return
            if news[0] is None:
                touched |= self._settle(news[1], self.writer.logprobs(news[2]))
                continue
            growing = touched[news[0]] = self._growing(news[0])
            if len(news) == 2:
                growing.end(self.writer.completion(*news, job.params))
            else:
                growing.push(news[1], self.writer.logprobs(news[2]))
        if touched and not self._is_final_only:
            shown = sorted((touched if is_delta else self._grown).items())
            parts = [growing.rest(growing.so_far) if is_delta else growing.so_far for _, growing in shown]
            yield self.writer.output(job, parts, False)
        if failure is not None:
            raise failure

    def _taken(self) -> Iterator[_News]:
        """The news, an answer's tokens in one piece as far as nothing but other answers' tokens lies between."""
        pieces: dict[int, list[_Tokens]] = {}
        for _ in range(len(self._news)):
            news = self._news.popleft()
            if isinstance(news, tuple) and len(news) == 3 and news[0] is not None:
                pieces.setdefault(news[0], []).append(news)
            else:
                yield from map(_joined, pieces.values())
                pieces.clear()
                yield news
        yield from map(_joined, pieces.values())

    def _cut(self) -> RequestOutput:
        """The last output of a request that was aborted, with all of its answers, those that had not begun too."""
        job, is_delta = self.job, self.job.params.output_kind is RequestOutputKind.DELTA
        for rank in range(job.params.num_answers):
            self._growing(rank)
        parts = []
        for _, growing in sorted(self._grown.items()):
            if growing.so_far.finish_reason is None:
                growing.end(replace(growing.so_far, finish_reason="abort"))
            parts.append(growing.rest(growing.so_far) if is_delta else growing.so_far)
        return self.writer.output(job, parts, True)

    def _settle(
        self, token_ids: Sequence[int], logprobs: list[dict[int, Logprob] | None] | None
    ) -> dict[int, _Growing]:
        """All answers go on with these tokens. Their text is made once."""
        if self._common is None:
            self._common = _Growing(0, self._text())
        self._common.push(token_ids, logprobs)
        return {rank: self._growing(rank) for rank in range(self.job.params.num_answers)}

    def _text(self) -> TextStream | None:
        if self._ends is None:
            self._ends = self.writer.ends(self.job.params)
        return self.writer.stream(self.job.params, self._ends)

    def _growing(self, rank: int) -> _Growing:
        growing = self._grown.get(rank)
        if growing is None:
            text = self._text() if self._common is None else None
            growing = self._grown[rank] = _Growing(rank, text, self._told.get(rank))
        if self._common is not None:
            growing.follow(self._common.so_far)
        return growing


def _width(count: int | None) -> int:
    """How many log-probabilities a token's report has."""
    return 0 if count is None else ALL_REPORTED if count < 0 else count + 1


def _joined(pieces: Sequence[_Tokens]) -> _Tokens:
    """Of one answer, in one piece."""
    rank, _, logprobs = pieces[0]
    if len(pieces) == 1:
        return pieces[0]
    reports = None if logprobs is None else [report for piece in pieces for report in piece[2] or ()]
    return rank, [token_id for piece in pieces for token_id in piece[1]], reports


class _Growing:
    """One answer: what it is so far, and how much of it was given out."""

    __slots__ = ("_num_characters", "_num_tokens", "_text", "_told", "so_far")

    def __init__(self, rank: int, text: TextStream | None, told: ToldAnswer | None = None) -> None:
        self._text = text
        self._told = [] if told is None else [*told.token_ids]
        self._num_characters, self._num_tokens = (0, 0) if told is None else (told.num_characters, len(self._told))
        self.so_far = CompletionOutput(rank, "", [])

    def push(self, token_ids: Sequence[int], logprobs: list[dict[int, Logprob] | None] | None) -> None:
        """Add tokens. A stop token, which belongs to no text, counts with the answer's end."""
        last = self.so_far
        if last.finish_reason is not None:
            return
        text = last.text + self._text.push(token_ids) if self._text is not None else ""
        tables, total = last.logprobs, last.cumulative_logprob
        if logprobs is not None:
            tables = [*(tables or ()), *logprobs]
            chosen = zip(token_ids, logprobs, strict=True)
            total = (total or 0.0) + sum(table[token_id].logprob for token_id, table in chosen if table is not None)
        self.so_far = CompletionOutput(last.index, text, [*last.token_ids, *token_ids], total, tables)

    def follow(self, common: CompletionOutput) -> None:
        """Be what all answers have in common, while that is all that is known."""
        if self.so_far.finish_reason is None and len(common.token_ids) > len(self.so_far.token_ids):
            self.so_far = replace(common, index=self.so_far.index)

    def end(self, answer: CompletionOutput) -> None:
        """The answer is complete."""
        self.so_far = answer

    def rest(self, whole: CompletionOutput) -> CompletionOutput:
        """What of the answer was not given out before. Raises `InvalidArgument` where it is another one than was told
        of."""
        first, first_token = self._num_characters, self._num_tokens
        self._num_characters, self._num_tokens = max(first, len(whole.text)), max(first_token, len(whole.token_ids))
        if self._told:
            self._check_told(whole.token_ids)
        logprobs = None if whole.logprobs is None else whole.logprobs[first_token:]
        return replace(whole, text=whole.text[first:], token_ids=whole.token_ids[first_token:], logprobs=logprobs)

    def _check_told(self, token_ids: Sequence[int]) -> None:
        count = min(len(self._told), len(token_ids))
        if self._told[:count] != token_ids[:count]:
            limit = "must be what the request comes to, which it is not: it cannot go on"
            field, given = f"resume.answers[{self.so_far.index}].token_ids", Shown(counted(count, "token"))
            raise InvalidArgument(field, given, limit)
        if count == len(self._told):
            self._told = []
