"""What sessions of `LLM` and of `AsyncLLM` have in common: a branch's properties, and what is to happen to it, as
functions for the engine's loop."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import numpy as np

from pagedec.decoders.scoring import ScoreParams
from pagedec.engine.engine import Engine, FinishedRequest
from pagedec.engine.open_branches import SCORES, OpenBranch, OpenCall, Owner
from pagedec.engine.sessions import closing
from pagedec.errors import InvalidArgument, RequestError, Shown, counted
from pagedec.fields import Integer
from pagedec.llm.branch_tree import branch_tree, path, shared
from pagedec.llm.prompts import Job, read_token_ids
from pagedec.llm.streams import Stream
from pagedec.outputs import BranchOutput, ContinuationScore, Logprob, RequestOutput
from pagedec.params import RequestOutputKind, RequestParams
from pagedec.text.chat_template import Message
from pagedec.text.conversation import Conversation, encode_behind

if TYPE_CHECKING:
    from pagedec.llm.front import Front
    from pagedec.tree import AnswerTree

Turns = tuple[tuple[int, Conversation], ...]
"""Of a chat: after each message of the user's, how many tokens there were, and the conversation up to there."""
B = TypeVar("B", bound="Handle")


@dataclass(frozen=True, slots=True)
class Mark:
    """A place that a branch, or a fork of it, can be taken back to. `num_tokens` is how many tokens it had there."""

    num_tokens: int
    digest: bytes


class Handle:
    """A branch of a session in a client's hands.

    A branch is closed by `close`, as a context manager, or by dropping it, in any thread.
    """

    def __init__(self, front: Front, branch: OpenBranch, turns: Turns = (), owner: Owner | None = None) -> None:
        """Sessions and branches make these. `owner`: of a branch that may have been closed already."""
        self._front, self._branch, self._turns = front, branch, turns
        known = owner or branch.owner
        assert known is not None
        self._owner = known
        let_go = weakref.finalize(self, front.engine.sessions.dropped.append, branch)
        let_go.atexit = False

    def __repr__(self) -> str:
        state = counted(self.num_tokens, "token")
        if self.closed:
            state = "its LLM was closed" if self._branch.owner is not None else self._branch.why_closed
        return f"<{type(self).__name__} {self.name}: {state}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a branch of a session cannot be copied or pickled: fork it")

    # ---- what it is; while a call runs, what it was before
    @property
    def name(self) -> str:
        """Which fork of which branch it is: a session begins with branch "0", whose forks are "0.0", "0.1" and so on.
        With the session's seed it names the branch's randomness."""
        return self._branch.name

    @property
    def closed(self) -> bool:
        """It was closed, or its session was given up, or its engine."""
        return self._branch.owner is None or self._front.loop.closed

    @property
    def num_tokens(self) -> int:
        """How many tokens it has, the prompt's too."""
        return self._branch.length

    @property
    def room(self) -> int:
        """How many more tokens it can get: what is left of the context, or of a pool that is smaller."""
        return self._front.engine.room(self._branch.length)

    @property
    def token_ids(self) -> list[int]:
        """All of its tokens, the prompt's too."""
        return self._branch.tokens()

    @property
    def text(self) -> str:
        """The text of all its tokens, special ones left out; "" without a tokenizer."""
        tokenizer = self._front.tokenizer
        return "" if tokenizer is None else tokenizer.decode(self._branch.tokens())

    @property
    def logprobs(self) -> list[dict[int, Logprob] | None]:
        """A table for each token: the model's log-probabilities, as calls have reported them (`logprobs=0` reports the
        token's own). None for what was given, or not reported."""
        history, tip = self._branch.place
        found = [history.notes.get(node) for node in path(history, tip, 0)]
        tables = self._front.writer.logprobs(found)
        assert tables is not None
        return tables

    def mark(self) -> Mark:
        """Name this place, for `rollback`. A mark holds nothing."""
        tokens = self._branch.tokens()
        return Mark(len(tokens), _digest(tokens))

    def tree(self) -> AnswerTree:
        """All open branches of the session as a tree: what they share, where they part. `str` draws it for a terminal,
        its `svg()` and `html()` make one file. Each is shown with its name, in the order in which they were made."""
        gone = {id(dropped) for dropped in self._front.engine.sessions.dropped.copy()}
        owner = self._owner
        branches = [branch for branch in list(owner.branches.values()) if id(branch) not in gone] or [self._branch]
        return branch_tree(self._front, branches, owner.prompt_length)

    # ---- what is to happen to it, for the loop
    def _again(self, branch: OpenBranch) -> Self:
        """A handle of a new branch that goes on from this one."""
        return type(self)(self._front, branch, self._turns, self._owner)

    def _forking(self, count: int | None) -> Callable[[Engine], list[Self]]:
        checked = Integer("new branches", low=1).check("k", 1 if count is None else count)

        def fork(engine: Engine) -> list[Self]:  # handles are made here: if nobody waits for them, they go again
            return [self._again(made) for made in engine.sessions.fork(engine, self._branch, checked)]

        return fork

    def _appending(self, what: str | Sequence[int] | Message) -> Callable[[Engine], None]:
        if isinstance(what, Mapping):
            return self._chatting(what)
        tokens = self._tokens("append", what)
        return lambda engine: engine.sessions.append(engine, self._branch, tokens)

    def _chatting(self, message: Message) -> Callable[[Engine], None]:
        """A chat's next message: what stands behind the last one is its answer. A template that writes what was said
        before in another way has the branch taken back to where they part."""
        if not self._turns:
            limit = "must be text or tokens: the session did not begin with messages, or was taken back behind them"
            raise InvalidArgument("append", dict(message), limit)
        length, before = self._turns[-1]
        conversation, now = before.fork(), self._branch.tokens()
        conversation.answer(now[length:])
        check_turn("append", message)
        try:
            wanted = conversation.ask(message)
        except InvalidArgument as error:  # about the message, wherever it stands
            raise type(error)("append" + error.field.partition("]")[2], error.value, error.limit) from error.__cause__
        turns = (*self._turns, (len(wanted), conversation))
        same = len(shared([now, wanted]))

        def chat(engine: Engine) -> None:
            if self._branch.tokens() != now:
                raise InvalidArgument("append", dict(message), f"must wait: another thread changed branch {self.name}")
            engine.sessions.append(engine, self._branch, wanted[same:], same)
            self._turns = turns

        return chat

    def _cutting(self, to: int | Mark) -> Callable[[Engine], None]:
        if isinstance(to, Mark):
            what: int | Mark = to
        else:
            try:
                what = Integer("tokens to take back").check("rollback", to)
            except InvalidArgument as error:
                raise InvalidArgument("rollback", to, f"{error.limit}, or a mark") from None

        def cut(engine: Engine) -> None:  # counted here: another thread may have changed the branch meanwhile
            keep = self._marked(what) if isinstance(what, Mark) else self._branch.length - what
            engine.sessions.cut(engine, self._branch, keep)
            self._turns = tuple(turn for turn in self._turns if turn[0] <= keep)

        return cut

    def _marked(self, mark: Mark) -> int:
        """How many tokens the branch keeps that is taken back to a mark. Raises `InvalidArgument` for one of others."""
        keep = mark.num_tokens
        if keep > self._branch.length or _digest(self._branch.tokens()[:keep]) != mark.digest:
            limit = f"must be one of what branch {self.name} holds: it was taken back behind it, and went on"
            raise InvalidArgument("rollback", Shown(f"a mark at {keep} tokens"), limit)
        return keep

    def _closing_all(self) -> Callable[[Engine], Any]:
        owner = self._owner
        return lambda engine: closing(list(owner.branches.values()))(engine)

    def _closing(self) -> Callable[[Engine], Any]:
        return closing([self._branch])

    def _generating(self, sampling_params: Any, keep: str | int, fields: Mapping[str, Any], streams: bool) -> Going:
        params = self._front.get_default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, RequestParams):
            limit = "must be a SamplingParams, a BeamSearchParams, or of another decoder that is registered"
            raise InvalidArgument("sampling_params", params, limit)
        if params.structured_outputs is not None or fields.get("structured_outputs") is not None:
            self._front.prepare_grammar(params.clone(**fields))
        if not streams:
            fields = {**fields, "output_kind": RequestOutputKind.FINAL_ONLY}
        return Going(self, params.clone(**fields) if fields else copy.copy(params), keep, streams)

    def _scoring(self, continuations: Any, logprobs: int, field: str = "continuations") -> Scored:
        logprobs = Integer("most probable tokens that are reported", low=-1).check("logprobs", logprobs)
        many = _listed(field, continuations)
        rows = [self._tokens(f"{field}[{i}]", one) for i, one in enumerate(many)]
        texts = [one if isinstance(one, str) else None for one in many]
        return Scored(self, texts, rows, logprobs, field)

    def _tokens(self, field: str, what: Any) -> list[int]:
        """A text as it goes on behind the branch, or token ids."""
        if not isinstance(what, str):
            try:
                return read_token_ids(field, what)
            except InvalidArgument as error:
                text = "text, a chat's next message" if field == "append" else "text"
                limit = error.limit.replace("must be", f"must be {text}, or", 1)
                raise InvalidArgument(field, error.value, limit) from None
        tokenizer, front = self._front.tokenizer, self._front
        if tokenizer is None:
            raise InvalidArgument(field, what, "must be token ids: the engine runs with skip_tokenizer_init")
        tokenizer.check_length(what, front.engine.limits.max_model_len, field)
        history, tip = self._branch.place
        found = encode_behind(tokenizer, [history.token[tip]], what)
        return tokenizer.encode(what, add_special_tokens=False) if found is None else found


class Going(Generic[B]):
    """A call on its way, and its stream."""

    def __init__(self, handle: B, params: RequestParams, keep: str | int, streams: bool) -> None:
        """`streams`: what it ends with is kept when it was read to its end (`read`)."""
        front = handle._front
        job = Job(f"session-{next(front.call_numbers)}", None, [], params)
        self.handle, self.keep, self.streams, self.stream = handle, keep, streams, Stream(job, front.writer)
        self._calls: list[OpenCall] = []
        unclaimed = weakref.finalize(self, _let_go, self._calls, front.engine.sessions.dropped)
        unclaimed.atexit = False  # nobody waits for it any more, or for what it has kept

    def begin(self, engine: Engine) -> None:
        """Send it out. Called in the loop."""
        branch, job = self.handle._branch, self.stream.job
        request = engine.sessions.begin(engine, branch, job.request_id, job.params, self.keep, self.streams)
        assert isinstance(request.home, OpenCall)
        self._calls.append(request.home)
        job.token_ids[:] = branch.tokens()
        self.handle._front.loop.join(request, self.stream)

    def leave(self) -> None:
        """If it was not read to its end, nobody will."""
        if self.streams or not self.stream.is_over:
            self.handle._front.loop.abort(self.stream.job.request_id)

    def read(self, engine: Engine) -> None:
        """It was read to its end. Called in the loop."""
        engine.sessions.read(self.stream.job.request_id)

    def withdraw(self) -> None:
        """It was begun in this turn, and shall not have been."""
        self.stream.is_over = True
        self.handle._front.loop.withdraw(self.stream.job.request_id)

    def written(self, output: RequestOutput) -> BranchOutput[B]:
        """An output with the branches that were kept, if it is the last one."""
        kept: list[OpenBranch] = []
        if output.finished and self._calls:
            kept, self._calls[0].kept = self._calls[0].kept, []
        return BranchOutput.of(output, [self.handle._again(branch) for branch in kept])


class Scored:
    """Continuations that are scored. `stream` brings nothing but the end."""

    def __init__(
        self, handle: Handle, texts: Sequence[str | None], rows: Sequence[Sequence[int]], logprobs: int, field: str
    ) -> None:
        self._field, self._texts, self._rows, self._handle = field, texts, [tuple(row) for row in rows], handle
        longest = max(map(len, self._rows), default=0)
        self.is_empty = longest == 0
        params = ScoreParams(
            continuations=tuple(self._rows), max_tokens=max(1, longest), logprobs=logprobs, ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        job = Job(f"session-{next(handle._front.call_numbers)}", None, [], params)
        self.stream = Ending(job, handle._front.writer)
        self._root = 0

    def begin(self, engine: Engine) -> None:
        """Send it out. Called in the loop."""
        branch, job = self._handle._branch, self.stream.job
        assert isinstance(job.params, ScoreParams)
        for i, row in enumerate(self._rows):
            engine.check_room(f"{self._field}[{i}]", len(row), 0, branch.length)
            engine.sessions.check_tokens(engine, f"{self._field}[{i}]", row)
        self._root = branch.place[1]
        request = engine.sessions.begin(engine, branch, job.request_id, job.params, SCORES)
        self._handle._front.loop.join(request, self.stream)

    def leave(self) -> None:
        """If it still runs, nobody waits for it any more."""
        if not self.stream.is_over:
            self._handle._front.loop.abort(self.stream.job.request_id)

    def withdraw(self) -> None:
        """It was begun in this turn, and shall not have been."""
        self.stream.is_over = True
        self._handle._front.loop.withdraw(self.stream.job.request_id)

    def results(self) -> list[ContinuationScore]:
        """The scores, when it is over. Raises `RequestError` if it has failed."""
        if self.is_empty:
            return [ContinuationScore(text, [], 0.0, []) for text in self._texts]
        request = self.stream.result().request
        history, reports = request.history, request.reports
        assert reports is not None
        scores = []
        for text, row in zip(self._texts, self._rows, strict=True):
            tip, found = self._root, []
            for token in row:
                found.append(reports.edges[tip << 32 | token])
                tip = history.find(tip, token) or 0  # nothing stands behind the last one
            tables = self._handle._front.writer.logprobs(found) or []
            total = float(sum(entry.logprob for entry in found))
            scores.append(ContinuationScore(text, list(row), total, [table for table in tables if table is not None]))
        return scores


class Ending(Stream):
    """The sink of a request of which nothing but its end is wanted."""

    def result(self) -> FinishedRequest:
        """What it has ended with. Raises the error that it has failed with."""
        last = self._news[-1]
        if isinstance(last, RequestError):
            raise last
        assert isinstance(last, FinishedRequest)
        return last


def _let_go(calls: Sequence[OpenCall], dropped: deque[OpenBranch | OpenCall]) -> None:
    dropped.extend(calls)


def check_turn(field: str, message: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` for a chat's message behind which no answer can stand."""
    if message.get("role") == "assistant":
        limit = "must be another's: the answer is generated; `append` a text to begin it"
        raise InvalidArgument(f"{field}.role", "assistant", limit)


def _listed(field: str, continuations: Any) -> list[Any]:
    if isinstance(continuations, (str, bytes, Mapping)) or not isinstance(continuations, Iterable):
        raise InvalidArgument(field, continuations, "must be a list of texts, or of lists of token ids")
    return list(continuations)


def _digest(tokens: Sequence[int]) -> bytes:
    return blake2b(np.array(tokens, np.int32).tobytes(), digest_size=16).digest()
