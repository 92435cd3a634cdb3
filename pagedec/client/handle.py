"""What a branch of a server's session is to `Client` and to `AsyncClient`: what is known of it here, and what is asked
for it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from pagedec.blame import about_params, of_params
from pagedec.client.asking import as_chat, as_ids, as_keep, as_message, as_order, as_prompt, check_template, with_fields
from pagedec.client.connection import Inquiry
from pagedec.client.telling import Growing, as_blocks, as_score, as_session, as_state, as_tree
from pagedec.client.token_pieces import TokenPieces
from pagedec.errors import BranchClosed, InvalidArgument, RequestError, counted
from pagedec.fields import Integer, Number, check_encodable
from pagedec.inputs import as_continuations, as_continuations_of_each, as_params, read_salt
from pagedec.outputs import (
    BranchOutput,
    BranchState,
    ContinuationScore,
    Mark,
    RequestOutput,
    SessionBlocks,
    SessionState,
)
from pagedec.params import RequestOutputKind, RequestParams, SamplingParams
from pagedec.tree import AnswerTree
from pagedec.v1 import session_service_pb2 as pb

OPENING = {
    "prompt.chat.messages": "messages", "prompt.chat.tools": "tools",
    "prompt.chat.template_variables": "chat_template_kwargs", "prompt.chat": "messages",
    "prompt.text": "prompt", "prompt.token_ids.ids": "prompt",
}  # fmt: skip
APPENDING = dict.fromkeys(("text", "token_ids.ids", "token_ids", "message"), "append")
CLOSED = "was closed"
CUTTING = dict.fromkeys(("num_tokens", "mark"), "rollback")
NAMED = {"client_request_id": "request_id"}


@dataclass(slots=True)
class Held:
    """A session in this program's hands."""

    line: Any
    session_id: str
    pieces: TokenPieces
    is_closed: bool = False

    def drop(self, name: str) -> None:
        """A branch's handle is gone: the client's next call closes it. A collector may say so anywhere."""
        if not self.is_closed:
            self.line.dropped.add(self.session_id, name)


class RemoteHandle:
    """A branch of a server's session. What it says of itself is what the server last said."""

    def __init__(self, held: Held, branch: pb.Branch) -> None:
        """Sessions and branches make these."""
        self._held, self._branch, self._is_closed = held, branch, False
        self._let_go = weakref.finalize(self, held.drop, branch.name)
        self._let_go.atexit = False

    def __repr__(self) -> str:
        state = CLOSED if self.closed else counted(self.num_tokens, "token")
        return f"<{type(self).__name__} {self.name}: {state}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a branch of a session cannot be copied or pickled: fork it")

    @property
    def session_id(self) -> str:
        """What the server calls the session. Whoever has it and this client's token has the session."""
        return self._held.session_id

    @property
    def name(self) -> str:
        """Which fork of which branch it is; see `SessionBranch.name`."""
        return self._branch.name

    @property
    def closed(self) -> bool:
        """It was closed here, or its client was."""
        return self._is_closed or self._held.is_closed or self._held.line.is_closed

    @property
    def num_tokens(self) -> int:
        """How many tokens it has, the prompt's too."""
        return self._branch.num_tokens

    @property
    def room(self) -> int:
        """How many more tokens it can get: what is left of the context, or of a pool that is smaller."""
        return self._branch.room

    @property
    def num_blocks(self) -> int:
        """KV blocks that it held when the server last said so."""
        return self._branch.num_blocks

    @property
    def num_shared_blocks(self) -> int:
        """Those of them that others held, too."""
        return self._branch.num_shared_blocks

    # ---- what is asked for it
    def _ask(
        self, rpc: str, message: Any, read: Any, names: Mapping[str, str] | None = None, **more: Any
    ) -> Inquiry[Any]:
        if self.closed:
            raise BranchClosed(self.name, CLOSED)
        return Inquiry(rpc, message, read, names or {}, branch=self.name, **more)

    def _again(self, branch: pb.Branch) -> Any:
        """A handle of another branch of the session."""
        return type(self)(self._held, branch)

    def _stand(self, branch: pb.Branch) -> None:
        self._branch = branch

    def _generating(
        self, params: Any, keep: Any, fields: Mapping[str, Any], streams: bool, request_id: str | None = None
    ) -> Inquiry[Any]:
        chosen, message = with_fields(params, fields)
        is_final = not streams or chosen.output_kind is RequestOutputKind.FINAL_ONLY
        request = pb.GenerateOnBranchRequest(
            session_id=self.session_id, branch=self.name, parameters=message, keep=as_keep(keep, chosen.num_answers),
            stream_interval=chosen.stream_interval, final_only=is_final, client_request_id=_named(request_id),
        )  # fmt: skip
        growing = Growing(chosen, None)

        def read(told: pb.GenerateOnBranchResponse) -> BranchOutput[Any] | None:
            output = growing.whole(told, told.finished) if is_final else growing.push(told)
            return None if output is None else self._written(self._spelled(output, chosen), told)

        return self._ask("GenerateOnBranch", request, read, {"keep.answer": "keep", **NAMED}, given={"": chosen})

    def _written(self, output: RequestOutput, told: pb.GenerateOnBranchResponse) -> BranchOutput[Any]:
        if output.finished:
            self._stand(told.branch)
        return BranchOutput.of(output, [self._again(branch) for branch in told.branches])

    def _spelled(self, output: RequestOutput, params: RequestParams) -> RequestOutput:
        """The output, whose tree is to show texts."""
        return output

    def _appending(self, what: Any) -> Inquiry[None]:
        request = pb.AppendRequest(session_id=self.session_id, branch=self.name)
        if isinstance(what, Mapping):
            request.message.CopyFrom(as_message("append", what))
        elif isinstance(what, str):
            check_encodable("append", what)
            request.text = what
        else:
            with _or("text, a chat's next message"):
                request.token_ids.CopyFrom(as_ids("append", what))
        return self._ask("Append", request, lambda told: self._stand(told.branch), APPENDING, given={"append": what})

    def _forking(self, count: int | None) -> Inquiry[list[Any]]:
        checked = Integer("new branches", low=1).check("k", 1 if count is None else count)
        request = pb.ForkRequest(session_id=self.session_id, branch=self.name, count=checked)
        return self._ask("Fork", request, lambda told: list(map(self._again, told.branches)), {"count": "k"})

    def _cutting(self, to: int | Mark) -> Inquiry[None]:
        request = pb.RollbackRequest(session_id=self.session_id, branch=self.name)
        if isinstance(to, Mark):
            request.mark.CopyFrom(pb.Mark(num_tokens=to.num_tokens, digest=to.digest))
        else:
            try:
                request.num_tokens = Integer("tokens to take back").check("rollback", to)
            except InvalidArgument as error:
                raise InvalidArgument("rollback", to, f"{error.limit}, or a mark") from None
        return self._ask("Rollback", request, lambda told: self._stand(told.branch), CUTTING)

    def _scoring(
        self, continuations: Any, logprobs: int, field: str = "continuations", request_id: str | None = None
    ) -> Inquiry[list[ContinuationScore]]:
        many = as_continuations(continuations, field)
        checked = Integer("tokens", low=-1).check("logprobs", logprobs)
        request = pb.ScoreRequest(
            session_id=self.session_id, branch=self.name, logprobs=checked, client_request_id=_named(request_id)
        )
        for i, one in enumerate(many):
            if isinstance(one, str):
                check_encodable(f"{field}[{i}]", one)
                request.continuations.add(text=one)
            else:
                with _or("text"):
                    request.continuations.add(token_ids=as_ids(f"{field}[{i}]", one))
        texts = [one if isinstance(one, str) else None for one in many]

        def read(told: pb.ScoreResponse) -> list[ContinuationScore]:
            return [as_score(score, text) for score, text in zip(told.scores, texts, strict=True)]

        names = {"continuations": field, **NAMED}
        return self._ask("Score", request, read, names, is_safe=True, given={field: many})

    def _looking(self, logprobs: bool) -> Inquiry[BranchState]:
        request = pb.GetBranchRequest(session_id=self.session_id, branch=self.name, logprobs=logprobs)

        def read(told: pb.GetBranchResponse) -> BranchState:
            self._stand(told.branch)
            return as_state(told)

        return self._ask("GetBranch", request, read, is_safe=True)

    def _drawing(self, branches: Sequence[RemoteHandle] | None) -> Inquiry[AnswerTree]:
        request = pb.GetTreeRequest(session_id=self.session_id)
        if branches is not None:
            request.branches.extend(branch.name for branch in self._own(branches or [self]))
        return self._ask("GetTree", request, as_tree, is_safe=True)

    def _counting(self, branches: Sequence[RemoteHandle] | None) -> Inquiry[SessionBlocks]:
        """What `branches` hold, this one where none are given."""
        own = self._own([self] if branches is None else branches)
        request = pb.GetSessionRequest(session_id=self.session_id, branches=[branch.name for branch in own])

        def read(told: pb.GetSessionResponse) -> SessionBlocks:
            if not own:
                return SessionBlocks([], 0)
            for branch, stands in zip(own, told.branches, strict=True):
                branch._stand(stands)
            return as_blocks(told)

        return self._ask("GetSession", request, read, is_safe=True)

    def _holding(self) -> Inquiry[SessionState]:
        request = pb.GetSessionRequest(session_id=self.session_id, branches=[self.name])
        return self._ask("GetSession", request, lambda told: as_session(told.session), is_safe=True)

    def _generating_all(self, branches: Any, params: Any, keep: Any, fields: Mapping[str, Any]) -> list[Inquiry[Any]]:
        many = self._several(branches)
        asks = []
        for branch, own, name in zip(many, *as_params(params, len(many), "branch"), strict=True):
            if not name:
                asks.append(branch._generating(own, keep, fields, False))
                continue
            with of_params(name, own, fields):
                ask = branch._generating(own, keep, fields, False)
            asks.append(replace(ask, blamed=partial(about_params, name=name, params=own, apart=fields)))
        return asks

    def _scoring_all(self, branches: Any, continuations: Any, logprobs: int) -> list[Inquiry[Any]]:
        many = self._several(branches)
        named = zip(many, as_continuations_of_each(continuations, len(many)), strict=True)
        return [branch._scoring(own, logprobs, field) for branch, (own, field) in named]

    def _several(self, branches: Any) -> list[RemoteHandle]:
        """Branches of this server's sessions, each once. Raises `InvalidArgument`."""
        if not isinstance(branches, (list, tuple)):
            raise InvalidArgument("branches", branches, "must be a list of branches")
        for i, branch in enumerate(branches):
            if not isinstance(branch, RemoteHandle) or branch._held.line is not self._held.line:
                raise InvalidArgument(f"branches[{i}]", branch, "must be a branch of a session of the same client")
            if any(branch._held is other._held and branch.name == other.name for other in branches[:i]):
                limit = "must be in the list once: one call at a time runs on it"
                raise InvalidArgument(f"branches[{i}]", branch, limit)
        return list(branches)

    def _own(self, branches: Sequence[RemoteHandle]) -> list[RemoteHandle]:
        """Branches of this session. Raises `InvalidArgument`."""
        for i, branch in enumerate(branches):
            if not isinstance(branch, RemoteHandle) or branch._held is not self._held:
                raise InvalidArgument(f"branches[{i}]", branch, "must be a branch of the same session")
        return list(branches)

    def _closing(self, names: Sequence[str] = ()) -> Inquiry[None]:
        request = pb.CloseSessionRequest(session_id=self.session_id, branches=names)
        return Inquiry("CloseSession", request, lambda told: None, branch=self.name)

    def _shut(self) -> None:
        self._is_closed = True
        self._let_go.detach()


def opening(
    prompt: Any, messages: Any, seed: Any, priority: Any, cache_salt: Any, ttl: Any, model: str, template: Any
) -> Inquiry[pb.OpenSessionResponse]:
    """What opens a session. Raises `InvalidArgument`."""
    if (prompt is None) == (messages is None):
        raise InvalidArgument("prompt", prompt, "must be given, or messages, and not both")
    check_template(template["chat_template"])
    request = pb.OpenSessionRequest(priority=as_order(priority), model=model)
    own = ""
    if messages is not None:
        request.prompt.chat.CopyFrom(as_chat(messages, **template))
    else:
        made, _, own = as_prompt("prompt", prompt)
        request.prompt.CopyFrom(made)
    request.cache_salt = own or read_salt("cache_salt", cache_salt)
    given = SamplingParams(seed=seed).seed
    if given is not None:
        request.seed = given
    seconds = Number("seconds", above=0, optional=True).check("ttl", ttl)
    if seconds is not None:
        request.ttl.FromNanoseconds(round(seconds * 1e9))
    table = {
        "model": model, "prompt": prompt, "messages": messages, "tools": template["tools"],
        "chat_template_kwargs": template["template_kwargs"],
    }  # fmt: skip
    return Inquiry("OpenSession", request, lambda told: told, OPENING, given=table)


def _named(request_id: str | None) -> str:
    """A call's name as a message has it. Raises `InvalidArgument`."""
    return "" if request_id is None else read_salt("request_id", request_id)


@contextlib.contextmanager
def _or(what: str) -> Iterator[None]:
    """What is no token ids might have been something else, too."""
    try:
        yield
    except InvalidArgument as error:
        limit = error.limit.replace("must be token ids", f"must be {what}, or token ids", 1)
        raise InvalidArgument(error.field, error.value, limit) from None


def output_of(found: BranchOutput[Any] | RequestError) -> BranchOutput[Any]:
    """The output of one of several calls, which may have failed."""
    return BranchOutput(found.request_id, None, [], [], True, error=found) if isinstance(found, RequestError) else found
