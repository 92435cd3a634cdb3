"""What sessions of `LLM` and of `AsyncLLM` have in common: a branch's properties, and what is to happen to it, as
functions for the engine's loop."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from pagedec.core.history import History
from pagedec.engine.engine import Engine
from pagedec.engine.open_branches import OpenBranch, Owner, closing
from pagedec.errors import BranchBusy, InvalidArgument, Shown, counted
from pagedec.fields import Integer
from pagedec.inputs import as_continuations, read_token_ids
from pagedec.llm.branch_tree import branch_tree, path, shared
from pagedec.llm.going import Going, Scored
from pagedec.outputs import BranchState, Logprob, Mark, SessionBlocks, SessionState
from pagedec.params import RequestOutputKind, RequestParams
from pagedec.text.chat_template import Message
from pagedec.text.conversation import Conversation, encode_behind

if TYPE_CHECKING:
    from pagedec.llm.front import Front
    from pagedec.tree import AnswerTree

Turns = tuple[tuple[int, Conversation], ...]
"""Of a chat: after each message of the user's, how many tokens there were, and the conversation up to there."""


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
    def is_chat(self) -> bool:
        """It goes on with a conversation."""
        return bool(self._turns)

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
        return self._tables(*self._branch.place)

    def state(self) -> BranchState:
        """Its text, its tokens and their reports, all of one moment."""
        history, tip = self._branch.place
        tokens, tokenizer = history.tokens(tip), self._front.tokenizer
        text = "" if tokenizer is None else tokenizer.decode(tokens)
        return BranchState(text, tokens, self._tables(history, tip), Mark(len(tokens), _digest(tokens)))

    def session_state(self) -> SessionState:
        """How large its session is, and how long it lives if nobody uses it."""
        owner = self._owner
        spare = None if owner.ttl is None else owner.ttl
        if spare is not None and not owner.num_calls:
            spare = max(0.0, owner.last_used + spare - self._front.engine.clock())
        return SessionState(len(owner.branches), owner.counted, spare)

    def _tables(self, history: History, tip: int) -> list[dict[int, Logprob] | None]:
        found = [history.notes.get(node) for node in path(history, tip, 0)]
        tables = self._front.writer.logprobs(found)
        assert tables is not None
        return tables

    def mark(self) -> Mark:
        """Name this place, for `rollback`. A mark holds nothing."""
        tokens = self._branch.tokens()
        return Mark(len(tokens), _digest(tokens))

    def tree(self, branches: Sequence[Handle] | None = None) -> AnswerTree:
        """All open branches of the session as a tree, or those that are given: what they share, where they part. `str`
        draws it for a terminal, its `svg()` and `html()` make one file. Each is shown with its name, in the order in
        which they were made, or were given."""
        gone = {id(dropped) for dropped in self._front.engine.sessions.dropped.copy()}
        owner = self._owner
        if branches is None:
            own = [branch for branch in list(owner.branches.values()) if id(branch) not in gone]
        else:
            own = [handle._branch for handle in branches_of(self._front, branches)]
        return branch_tree(self._front, own or [self._branch], owner.prompt_length)

    # ---- what is to happen to it, for the loop
    def _again(self, branch: OpenBranch) -> Self:
        """A handle of a new branch that goes on from this one."""
        return type(self)(self._front, branch, self._turns, self._owner)

    def _forking(self, count: int | None) -> Callable[[Engine], list[Self]]:
        checked = Integer("new branches", low=1).check("k", 1 if count is None else count)

        def fork(engine: Engine) -> list[Self]:  # handles are made here: if nobody waits for them, they go again
            return [self._again(made) for made in engine.sessions.fork(engine, self._branch, checked)]

        return fork

    def _appending(
        self, what: str | Sequence[int] | Message
    ) -> tuple[Callable[[Engine], None], int, Conversation | None]:
        """And how many tokens it appends, and what a chat has behind it."""
        if isinstance(what, Mapping):
            return self._chatting(what)
        tokens = self._tokens("append", what)
        return lambda engine: engine.sessions.append(engine, self._branch, tokens), len(tokens), None

    def _chatting(self, message: Message) -> tuple[Callable[[Engine], None], int, Conversation]:
        """A chat's next message: what stands behind the last one is its answer. A template that writes what was said
        before in another way has the branch taken back to where they part."""
        if not self._turns:
            limit = (
                "must be text or tokens: the session did not begin with messages, was taken back behind them, or into "
                "what its template has written in another way since"
            )
            raise InvalidArgument("append", dict(message), limit)
        turns = self._turns
        length, before = turns[-1]
        conversation, now = before.fork(), self._branch.tokens()
        conversation.answer(now[length:])
        check_turn("append", message)
        try:
            wanted = conversation.ask(message)
        except InvalidArgument as error:  # about the message, wherever it stands
            raise type(error)("append" + error.field.partition("]")[2], error.value, error.limit) from error.__cause__
        same = len(shared([now, wanted]))
        if not same:  # a branch keeps its first token
            limit = (
                "cannot go on: the chat template begins all of the conversation in another way now; open a new session"
            )
            raise InvalidArgument("append", dict(message), limit)

        def chat(engine: Engine) -> None:
            # somebody else was faster: what is wanted follows from what is no more
            if self._turns is not turns or self._branch.tokens() != now:
                raise BranchBusy(self.name, "append")
            engine.sessions.append(engine, self._branch, wanted[same:], same)
            self._turns = (*turns, (len(wanted), conversation))

        return chat, len(wanted) - same, conversation

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
            if self._turns and self._turns[-1][0] > keep:
                self._turns = _begun(self._turns, self._branch.tokens())

        return cut

    def _marked(self, mark: Mark) -> int:
        """How many tokens the branch keeps that is taken back to a mark. Raises `InvalidArgument` for one of others."""
        keep = mark.num_tokens
        if keep > self._branch.length or _digest(self._branch.tokens()[:keep]) != mark.digest:
            limit = f"must be one of what branch {self.name} holds: it was taken back behind it, and went on"
            raise InvalidArgument("rollback", Shown(f"a mark at {keep} tokens"), limit)
        return keep

    def _counting(self, branches: Sequence[Handle]) -> Callable[[Engine], SessionBlocks]:
        """What `branches` hold. They count as used."""
        own = [handle._branch for handle in branches_of(self._front, branches)]
        return lambda engine: engine.sessions.blocks(own)

    def _closing_all(self) -> Callable[[Engine], Any]:
        owner = self._owner
        return lambda engine: closing(list(owner.branches.values()))(engine)

    def _closing(self) -> Callable[[Engine], Any]:
        return closing([self._branch])

    def _generating(
        self,
        sampling_params: Any,
        keep: str | int,
        fields: Mapping[str, Any],
        streams: bool,
        name: str | None = None,
        waits: bool = False,
    ) -> Going[Self]:
        params = self._front.get_default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, RequestParams):
            limit = "must be a SamplingParams, a BeamSearchParams, or of another decoder that is registered"
            raise InvalidArgument("sampling_params", params, limit)
        if not streams:
            fields = {**fields, "output_kind": RequestOutputKind.FINAL_ONLY}
        own = params.clone(**fields) if fields else copy.copy(params)
        engine = self._front.engine
        options = engine.options(own)  # all that may take long, before the engine's thread has it
        if own.structured_outputs is not None:
            engine.compile_grammar(own, options)
        return Going(self, own, keep, streams or waits, name, options)

    def _scoring(
        self, continuations: Any, logprobs: int, field: str = "continuations", request_id: str | None = None
    ) -> Scored:
        logprobs = Integer("most probable tokens that are reported", low=-1).check("logprobs", logprobs)
        many = as_continuations(continuations, field)
        rows = [self._tokens(f"{field}[{i}]", one) for i, one in enumerate(many)]
        texts = [one if isinstance(one, str) else None for one in many]
        return Scored(self, texts, rows, logprobs, field, request_id)

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


def check_turn(field: str, message: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument` for a chat's message behind which no answer can stand."""
    if message.get("role") == "assistant":
        limit = "must be another's: the answer is generated; `append` a text to begin it"
        raise InvalidArgument(f"{field}.role", "assistant", limit)


def _begun(turns: Turns, tokens: Sequence[int]) -> Turns:
    """A chat's turns up to the last one whose prompt `tokens` begin with: a template may have written it in another way
    since, and then what stands behind its length is not its answer. Those before it stay, however long: its
    conversation has their messages."""
    while turns and turns[-1][1].prompt_ids != tokens[: turns[-1][0]]:
        turns = turns[:-1]
    return turns


def _digest(tokens: Sequence[int]) -> bytes:
    return blake2b(np.array(tokens, np.int32).tobytes(), digest_size=16).digest()


def branches_of(front: Front, branches: Any) -> list[Any]:
    """Handles that a caller has listed, of sessions of one LLM."""
    if not isinstance(branches, (list, tuple)):
        raise InvalidArgument("branches", branches, "must be a list of branches")
    for i, branch in enumerate(branches):
        if not isinstance(branch, Handle) or branch._front is not front:
            raise InvalidArgument(f"branches[{i}]", branch, "must be a branch of a session of the same LLM")
    return list(branches)
