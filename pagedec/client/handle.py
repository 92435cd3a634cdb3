"""What a branch of a server's session is to `Client` and to `AsyncClient`: what is known of it here, and what is asked
for it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedec.client.asking import as_chat, as_ids, as_keep, as_message, as_prompt, with_fields
from pagedec.client.connection import Inquiry
from pagedec.client.telling import Growing, as_score, as_state, as_tree
from pagedec.errors import InvalidArgument
from pagedec.fields import Integer, Number, check_encodable
from pagedec.inputs import as_continuations, as_priorities, read_salt
from pagedec.outputs import BranchOutput, BranchState, ContinuationScore, Mark, RequestOutput
from pagedec.params import RequestOutputKind, SamplingParams
from pagedec.tree import AnswerTree
from pagedec.v1 import session_service_pb2 as pb

OPENING = {
    "prompt.chat.messages": "messages", "prompt.chat.tools": "tools",
    "prompt.chat.template_variables": "chat_template_kwargs", "prompt.chat": "messages",
    "prompt.text": "prompt", "prompt.token_ids.ids": "prompt",
}  # fmt: skip
APPENDING = dict.fromkeys(("text", "token_ids.ids", "token_ids", "message"), "append")
CUTTING = dict.fromkeys(("num_tokens", "mark"), "rollback")


@dataclass(slots=True)
class Held:
    """A session in this program's hands. `dropped`: branches whose handles are gone, which the next call closes; a
    collector may put them here anywhere."""

    line: Any
    session_id: str
    dropped: deque[str] = field(default_factory=deque)
    is_closed: bool = False


class RemoteHandle:
    """A branch of a server's session. What it says of itself is what the server last said."""

    def __init__(self, held: Held, branch: pb.Branch) -> None:
        """Sessions and branches make these."""
        self._held, self._branch, self._is_closed = held, branch, False
        self._let_go = weakref.finalize(self, held.dropped.append, branch.name)
        self._let_go.atexit = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {'closed' if self.closed else f'{self.num_tokens} tokens'}>"

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
        """It was closed here."""
        return self._is_closed or self._held.is_closed

    @property
    def num_tokens(self) -> int:
        """How many tokens it has, the prompt's too."""
        return self._branch.num_tokens

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
        return Inquiry(rpc, message, read, names or {}, branch=self.name, **more)

    def _again(self, branch: pb.Branch) -> Any:
        """A handle of another branch of the session."""
        return type(self)(self._held, branch)

    def _stand(self, branch: pb.Branch) -> None:
        self._branch = branch

    def _generating(self, params: Any, keep: Any, fields: Mapping[str, Any], streams: bool) -> Inquiry[Any]:
        chosen, message = with_fields(params, fields)
        is_final = not streams or chosen.output_kind is RequestOutputKind.FINAL_ONLY
        request = pb.GenerateOnBranchRequest(
            session_id=self.session_id, branch=self.name, parameters=message, keep=as_keep(keep),
            stream_interval=chosen.stream_interval, final_only=is_final,
        )  # fmt: skip
        growing = Growing(chosen, None)

        def read(told: pb.GenerateOnBranchResponse) -> BranchOutput[Any] | None:
            output = growing.whole(told, told.finished) if is_final else growing.push(told)
            return None if output is None else self._written(output, told)

        return self._ask("GenerateOnBranch", request, read, {"keep.answer": "keep"})

    def _written(self, output: RequestOutput, told: pb.GenerateOnBranchResponse) -> BranchOutput[Any]:
        if output.finished:
            self._stand(told.branch)
        return BranchOutput.of(output, [self._again(branch) for branch in told.branches])

    def _appending(self, what: Any) -> Inquiry[None]:
        request = pb.AppendRequest(session_id=self.session_id, branch=self.name)
        if isinstance(what, Mapping):
            request.message.CopyFrom(as_message("append", what))
        elif isinstance(what, str):
            check_encodable("append", what)
            request.text = what
        else:
            request.token_ids.CopyFrom(as_ids("append", what))
        return self._ask("Append", request, lambda told: self._stand(told.branch), APPENDING)

    def _forking(self, count: int | None) -> Inquiry[list[Any]]:
        checked = Integer("new branches", low=1).check("k", 1 if count is None else count)
        request = pb.ForkRequest(session_id=self.session_id, branch=self.name, count=checked)
        return self._ask("Fork", request, lambda told: list(map(self._again, told.branches)), {"count": "k"})

    def _cutting(self, to: int | Mark) -> Inquiry[None]:
        request = pb.RollbackRequest(session_id=self.session_id, branch=self.name)
        if isinstance(to, Mark):
            request.mark.CopyFrom(pb.Mark(num_tokens=to.num_tokens, digest=to.digest))
        else:
            request.num_tokens = Integer("tokens to take back", low=0).check("rollback", to)
        return self._ask("Rollback", request, lambda told: self._stand(told.branch), CUTTING)

    def _scoring(self, continuations: Any, logprobs: int) -> Inquiry[list[ContinuationScore]]:
        many = as_continuations(continuations)
        checked = Integer("tokens", low=-1).check("logprobs", logprobs)
        request = pb.ScoreRequest(session_id=self.session_id, branch=self.name, logprobs=checked)
        for i, one in enumerate(many):
            if isinstance(one, str):
                check_encodable(f"continuations[{i}]", one)
                request.continuations.add(text=one)
            else:
                request.continuations.add(token_ids=as_ids(f"continuations[{i}]", one))
        texts = [one if isinstance(one, str) else None for one in many]

        def read(told: pb.ScoreResponse) -> list[ContinuationScore]:
            return [as_score(score, text) for score, text in zip(told.scores, texts, strict=True)]

        return self._ask("Score", request, read, is_safe=True)

    def _looking(self, logprobs: bool) -> Inquiry[BranchState]:
        request = pb.GetBranchRequest(session_id=self.session_id, branch=self.name, logprobs=logprobs)

        def read(told: pb.GetBranchResponse) -> BranchState:
            self._stand(told.branch)
            return as_state(told)

        return self._ask("GetBranch", request, read, is_safe=True)

    def _drawing(self) -> Inquiry[AnswerTree]:
        return self._ask("GetTree", pb.GetTreeRequest(session_id=self.session_id), as_tree, is_safe=True)

    def _closing(self, names: Sequence[str] = ()) -> Inquiry[None]:
        request = pb.CloseSessionRequest(session_id=self.session_id, branches=names)
        return self._ask("CloseSession", request, lambda told: None)

    def _shut(self) -> None:
        self._is_closed = True
        self._let_go.detach()

    def _forgotten(self) -> list[str]:
        """Branches that nobody holds any more, to be closed now."""
        names = []
        while self._held.dropped:
            names.append(self._held.dropped.popleft())
        return names


def opening(
    prompt: Any, messages: Any, seed: Any, priority: Any, cache_salt: Any, ttl: Any, model: str, template: Any
) -> Inquiry[pb.OpenSessionResponse]:
    """What opens a session. Raises `InvalidArgument`."""
    if (prompt is None) == (messages is None):
        raise InvalidArgument("prompt", prompt, "must be given, or messages, and not both")
    [order] = as_priorities([priority], 1)
    request = pb.OpenSessionRequest(priority=order, model=model)
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
    return Inquiry("OpenSession", request, lambda told: told, OPENING)
