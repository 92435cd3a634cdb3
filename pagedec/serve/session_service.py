"""SessionService: branches in clients' hands."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from pagedec.decoders.scoring import ScoreParams
from pagedec.errors import InvalidArgument, Shown, counted
from pagedec.llm import AsyncSessionBranch
from pagedec.llm.front import renamed
from pagedec.messages import as_duration, seconds_of
from pagedec.outputs import Mark, SessionBlocks
from pagedec.params import RequestOutputKind, RequestParams
from pagedec.serve.answers import Events, as_branch, as_nodes, as_score, as_state
from pagedec.serve.calls import RPC, echo
from pagedec.serve.gateway import Gateway
from pagedec.serve.leases import NOTHING, Addition, Lease, Leases, tokens_of
from pagedec.serve.orders import (
    UNSAID,
    Limits,
    Order,
    answers_field,
    check_json,
    read_chat,
    read_ids,
    read_message,
    read_order,
    read_prompt,
)
from pagedec.v1 import prompt_pb2, session_service_pb2_grpc
from pagedec.v1 import session_service_pb2 as pb

PAGE, MOST_PAGE = 100, 1000
"""Sessions of an answer to ListSessions, where nothing is said and at most."""
MOST_DIGITS = 20
"""Of a page's token, which is a session's number."""
MOST_COLUMNS = 1000
"""Of a drawing."""
MOST_SCORED = 1 << 16
"""Continuations of a call."""
MOST_DRAWN = 1 << 20
"""Tokens of a tree that is told of: it is written on a whole, in a thread."""


class SessionService(session_service_pb2_grpc.SessionServiceServicer):
    """Translates between messages and the sessions that `leases` has."""

    def __init__(self, gateway: Gateway, leases: Leases) -> None:
        self._gateway, self._leases = gateway, leases

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        """A new session with one branch."""
        gateway, client, lora = self._gateway, RPC.get().client, self._gateway.chosen(request.model)
        gateway.require_serving()
        ttl = self._leases.ttl(seconds_of(request.ttl) if request.HasField("ttl") else None)
        given = await self._gateway.preparing.read(request.prompt, lambda: _beginning(request.prompt, gateway.limits))
        options: dict[str, Any] = {
            "seed": request.seed if request.HasField("seed") else None,
            "priority": request.priority,
            "cache_salt": client.salted(request.cache_salt),
            "ttl": ttl,
            "lora_request": lora,
        }
        with (
            renamed("messages", "prompt.chat.messages"),
            renamed("tools", "prompt.chat.tools"),
            renamed("chat_template_kwargs", "prompt.chat.template_variables"),
        ):
            opening = await gateway.preparing.in_thread(lambda: gateway.llm.session(**given, **options))
            num_bytes = request.prompt.chat.ByteSize() if request.prompt.WhichOneof("form") == "chat" else 0
            tokens = _tokens("prompt", opening.num_tokens, num_bytes)
            await self._leases.make_room(client, tokens)
            with self._leases.room(client, Addition(1, "prompt"), tokens):
                session = await opening
                [branch] = await _stand(session, [session])
                lease = self._leases.open(session, client, ttl, opening.conversation, num_bytes, lora)
        return pb.OpenSessionResponse(session_id=lease.session_id, branch=branch, ttl=as_duration(ttl))

    async def GenerateOnBranch(
        self, request: pb.GenerateOnBranchRequest, context: Any
    ) -> AsyncIterator[pb.GenerateOnBranchResponse]:
        """The answers of a request that goes on from a branch, as they grow."""
        await echo(request.client_request_id)
        lease, branch = self._branch(request)
        keep = read_keep(request.keep)
        read = await self._gateway.preparing.read(request.parameters, lambda: self._order(request, branch.is_chat))
        order = dataclasses.replace(read, lora=lease.lora)
        params = order.params
        longest = max(0, self._gateway.limits.max_model_len - branch.num_tokens)
        num_tokens = params.num_answers * min(params.max_tokens or longest, longest)
        coming = (
            _answers(params) if keep == "all" else NOTHING,
            # kept or not: while it runs, the engine counts all that it may come to
            Addition(num_tokens, "max_tokens", f"{num_tokens} tokens in all answers"),
        )
        events = Events(params, pb.GenerateOnBranchResponse)
        with order.named(), _of_branch(branch), contextlib.ExitStack() as room:
            await self._leases.make_room(RPC.get().client, coming[1])
            room.enter_context(self._leases.room(RPC.get().client, *coming))
            if keep == "all":
                room.enter_context(self._leases.bringing(lease))
            outputs = self._gateway.followed(
                lambda name: branch.stream(params, keep=keep, request_id=name),
                order, branch.num_tokens, request.client_request_id,
            )  # fmt: skip
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    message = await events.message(output)
                    if output.finished:
                        stands = await _stand(branch, [branch, *output.branches])
                        room.close()  # what was kept is counted from here on: the last message may take long to send
                        self._leases.add(lease, output.branches)  # of a client who is gone before, nobody has them
                        message.branch.CopyFrom(stands[0])
                        message.branches.extend(stands[1:])
                    yield message

    async def Append(self, request: pb.AppendRequest, context: Any) -> pb.AppendResponse:
        """Goes on with a client's own text, tokens or message."""
        lease, branch = self._branch(request)
        form = request.WhichOneof("what")
        if form is None:
            raise InvalidArgument("what", None, "must be text, token_ids or message")
        what: Any = request.text
        num_bytes = request.message.ByteSize() if form == "message" else 0
        if form == "token_ids":
            what = read_ids(request.token_ids.ids, "token_ids.ids", self._gateway.limits)
        elif form == "message":
            check_json({"message.fields": request.message.fields}, self._gateway.config)
            what = await self._gateway.preparing.read(request.message, lambda: read_message(request.message, "message"))
        field = {"token_ids": "token_ids.ids"}.get(form, form)
        with renamed("append", field), renamed("messages[0]", field):
            appending = await self._gateway.preparing.run(lambda: branch.appending(what))
            tokens = _tokens(field, appending.num_tokens, num_bytes)
            await self._leases.make_room(RPC.get().client, tokens)
            keeping = self._leases.keeping(lease, appending.conversation, num_bytes)
            with self._leases.room(RPC.get().client, NOTHING, tokens), keeping:
                await appending
        [stands] = await _stand(branch, [branch])
        return pb.AppendResponse(branch=stands)

    async def Fork(self, request: pb.ForkRequest, context: Any) -> pb.ForkResponse:
        """New branches that are where one is."""
        lease, branch = self._branch(request)
        count = request.count if request.HasField("count") else 1
        more = Addition(count, "count", beside=1)
        with self._leases.room(RPC.get().client, more, NOTHING), self._leases.bringing(lease), renamed("k", "count"):
            made = await branch.fork(count)
            stands = await _stand(branch, made)
            self._leases.add(lease, made)
        return pb.ForkResponse(branches=stands)

    async def Rollback(self, request: pb.RollbackRequest, context: Any) -> pb.RollbackResponse:
        """Takes back what a branch ends with."""
        _, branch = self._branch(request)
        form = request.WhichOneof("to")
        if form is None:
            raise InvalidArgument("to", None, "must be num_tokens or mark")
        is_mark = form == "mark"
        with renamed("rollback", form):
            await branch.rollback(Mark(request.mark.num_tokens, request.mark.digest) if is_mark else request.num_tokens)
        [stands] = await _stand(branch, [branch])
        return pb.RollbackResponse(branch=stands)

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        """How probable the model takes continuations to be."""
        await echo(request.client_request_id)
        lease, branch = self._branch(request)
        most, count = self._gateway.config.max_request_tokens, len(request.continuations)
        if count > MOST_SCORED:
            raise InvalidArgument("continuations", Shown(f"{count} of them"), f"must be at most {MOST_SCORED}")
        rows = await self._gateway.preparing.read(request, lambda: read_continuations(request.continuations))
        size = sum(map(len, rows))
        if size > most:
            limit = f"must come to at most {most} tokens or characters, the server's max_request_tokens"
            raise InvalidArgument("continuations", Shown(f"{len(rows)} of {size} together"), limit)
        params = ScoreParams(continuations=(), max_tokens=max(1, size), logprobs=request.logprobs)
        paths = {"continuations": "continuations", "logprobs": "logprobs", "max_tokens": "continuations"}
        order, begun = Order(params, paths, lora=lease.lora), self._gateway.begun
        with (
            _of_branch(branch),
            begun(order, branch.num_tokens, request.client_request_id) as name,
            order.named(),
        ):
            read = functools.partial(branch.scoring, rows, logprobs=request.logprobs, request_id=name)
            scoring = await self._gateway.preparing.run(read)
            tokens = _tokens("continuations", scoring.num_tokens)
            await self._leases.make_room(RPC.get().client, tokens)
            with self._leases.room(RPC.get().client, NOTHING, tokens):  # nothing is kept: see GenerateOnBranch
                scores = await scoring
        return await self._gateway.preparing.in_thread(lambda: pb.ScoreResponse(scores=map(as_score, scores)))

    async def GetBranch(self, request: pb.GetBranchRequest, context: Any) -> pb.GetBranchResponse:
        """A branch with its text, tokens and reports."""
        _, branch = self._branch(request)
        [stands] = await _stand(branch, [branch])
        return await self._gateway.preparing.in_thread(lambda: as_state(stands, branch.state(), request.logprobs))

    async def GetSession(self, request: pb.GetSessionRequest, context: Any) -> pb.GetSessionResponse:
        """What a session holds, and how long it lives."""
        lease = self._lease(request)
        branches = _chosen(lease, request.branches)
        held = await lease.session.blocks(branches)
        return pb.GetSessionResponse(
            session=self._session(lease),
            branches=_told(branches, held),
            num_blocks=held.num_blocks,
            num_blocks_saved=held.num_blocks_saved,
        )

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsResponse:
        """The client's own sessions."""
        count = min(request.page_size or PAGE, MOST_PAGE)
        token = request.page_token
        if token and not (len(token) <= MOST_DIGITS and token.isascii() and token.isdecimal()):
            raise InvalidArgument("page_token", Shown("no such token"), "must be next_page_token of the answer before")
        self._gateway.require_engine()
        found = self._leases.listed(RPC.get().client, int(token or 0), count + 1)
        more = str(found[count - 1].number) if len(found) > count else ""
        return pb.ListSessionsResponse(sessions=map(self._session, found[:count]), next_page_token=more)

    async def GetTree(self, request: pb.GetTreeRequest, context: Any) -> pb.GetTreeResponse:
        """All branches of a session with what they share, as a tree."""
        lease = self._lease(request)
        if request.columns > MOST_COLUMNS:
            raise InvalidArgument("columns", request.columns, f"must be at most {MOST_COLUMNS}")
        branches = _chosen(lease, request.branches)
        total = sum(branch.num_tokens for branch in branches)
        if total > MOST_DRAWN:
            limit = f"must have branches of together at most {MOST_DRAWN} tokens: a tree is made of all of them"
            raise InvalidArgument("session_id", Shown(f"a session of {total}"), limit)
        held = await lease.session.blocks(branches)
        apart = self._gateway.preparing.in_thread
        tree = await apart(lambda: lease.session.tree(branches))
        return pb.GetTreeResponse(
            branches=_told(branches, held),
            drawing=await apart(lambda: tree.draw(request.columns)) if request.columns else "",
            num_blocks=held.num_blocks,
            num_blocks_saved=held.num_blocks_saved,
            nodes=await apart(lambda: as_nodes(tree)),
            block_size=tree.block_size or 0,
        )

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        """Closes branches of a session, or all of it."""
        lease = self._leases.find(request.session_id, RPC.get().client)
        if not request.branches:
            await lease.session.close()
            self._leases.drop(lease)
            return pb.CloseSessionResponse()
        self._gateway.require_engine()
        names = [name for name in dict.fromkeys(request.branches) if name in lease.branches]
        await lease.session.close_all([lease.branches[name] for name in names])
        self._leases.drop(lease, names)
        if not lease.branches:
            await lease.session.close()  # with what a call has just kept, and nobody was told of
        return pb.CloseSessionResponse(num_branches=len(lease.branches))

    # ---- inside
    def _lease(self, request: Any) -> Lease:
        """The session of a call, which cannot do without the engine."""
        self._gateway.require_engine()
        return self._leases.find(request.session_id, RPC.get().client)

    def _branch(self, request: Any) -> tuple[Lease, AsyncSessionBranch]:
        lease = self._lease(request)
        return lease, lease.find(request.branch)

    def _order(self, request: pb.GenerateOnBranchRequest, is_chat: bool) -> Order:
        given, limits = request.parameters, self._gateway.limits
        if request.final_only:
            return read_order(given, limits, RequestOutputKind.FINAL_ONLY, is_chat=is_chat)
        return read_order(given, limits, RequestOutputKind.DELTA, self._gateway.interval(request), is_chat)

    def _session(self, lease: Lease) -> pb.Session:
        state = lease.session.session_state()
        made = pb.Session(
            session_id=lease.session_id,
            num_branches=len(lease.branches),
            num_tokens=state.num_tokens,
            model=self._gateway.model if lease.lora is None else lease.lora.lora_name,
        )
        made.ttl.CopyFrom(as_duration(lease.ttl))
        made.open_time.FromNanoseconds(round(lease.opened * 1e9))
        made.expire_time.FromNanoseconds(round((time.time() + (state.seconds_left or 0.0)) * 1e9))
        return made


def read_keep(keep: pb.Keep) -> str | int:
    """Which answers a branch goes on from."""
    what = keep.WhichOneof("what")
    if what == "answer":
        return keep.answer
    return what if what is not None and getattr(keep, what) else "first"


@contextlib.contextmanager
def _of_branch(branch: AsyncSessionBranch) -> Iterator[None]:
    """Errors about a branch, or about a prompt, which it is for a request, are about the message's field."""
    with renamed("prompt", "branch"), renamed(f"branch {branch.name}", "branch"):
        yield


def _answers(params: RequestParams) -> Addition:
    """The branches that all answers of a request come to, beside the one that it goes on from."""
    field, count = answers_field(params), params.num_answers
    return Addition(count, field, counted(count, "answer") if field == UNSAID else "", beside=1)


def _tokens(field: str, num_tokens: int, num_bytes: int = 0) -> Addition:
    """What a prompt, or what is appended, adds: `num_bytes` of it a chat keeps."""
    number = max(num_tokens, tokens_of(num_bytes))
    words = counted(num_tokens, "token")
    return Addition(
        number, field, words if number == num_tokens else f"{num_bytes} bytes, which count as {number} tokens"
    )


def read_continuations(given: Sequence[pb.Continuation]) -> list[str | list[int]]:
    """Texts and token ids. Raises `InvalidArgument`."""
    for i, one in enumerate(given):
        if one.WhichOneof("form") is None:
            raise InvalidArgument(f"continuations[{i}]", None, "must have text or token_ids")
    return [one.text if one.WhichOneof("form") == "text" else list(one.token_ids.ids) for one in given]


def _beginning(prompt: prompt_pb2.Prompt, limits: Limits) -> dict[str, Any]:
    """What `AsyncLLM.session` is given for a prompt. Raises `InvalidArgument`."""
    given = read_prompt(prompt, limits)
    if not isinstance(given, prompt_pb2.Chat):
        return {"prompt": given}
    messages, options = read_chat(given)
    if options.pop("continue_final_message") or not options.pop("add_generation_prompt"):
        limit = "must be left out: a session's messages end with the user's, and its branches go on with answers"
        raise InvalidArgument("prompt.chat.continue_final_message", True, limit)
    return {"messages": messages, "tools": options["tools"], "chat_template_kwargs": options["template_kwargs"]}


def _chosen(lease: Lease, names: Sequence[str]) -> list[AsyncSessionBranch]:
    """Branches of a session, each once; all where none is named. Raises `NotFound`."""
    return [lease.find(name) for name in dict.fromkeys(names)] if names else list(lease.branches.values())


async def _stand(branch: AsyncSessionBranch, branches: Sequence[AsyncSessionBranch]) -> list[pb.Branch]:
    """Where branches stand now. They count as used."""
    return _told(branches, await branch.blocks(branches))


def _told(branches: Sequence[AsyncSessionBranch], held: SessionBlocks) -> list[pb.Branch]:
    pairs = zip(branches, held.branches, strict=True)
    return [as_branch(one.name, blocks, max(0, one.room)) for one, blocks in pairs]
