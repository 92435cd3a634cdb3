"""What a decoder or a device says, before anything follows from it. A decoder's mistake is found here, by name, and is
its own request's alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pagedec.core.check_values import (
    check_rank,
    check_sampler,
    check_score,
    check_stream,
    check_streams,
    check_tokens,
    check_whole,
)
from pagedec.core.draft import EMPTY, Draft, Roll
from pagedec.core.history import History
from pagedec.core.protocol import Ask, Best, Child, Decoder, Hypothesis, LogProbs, Query, RowBest, Sample, TopK, Verdict
from pagedec.core.request import Branch, Request
from pagedec.errors import InvalidArgument, OthersCode, Shown
from pagedec.fields import MAX_INT32
from pagedec.speculation import MOST_CANDIDATES

FEW = 4
"""Up to so many branches a list is searched as fast as a set is made."""
REASONS = ("stop", "length")
LANES = ("target",), ("target", "draft")
DECODERS_CODE = OthersCode("it")
"""What a decoder raises is its own."""
MAX_BRANCHES = 16384
"""Most branches of one request: what forks without end must not take everybody's memory."""


# ------------------------------------------------------------------------------------------------------------ decoders
def check_decoder(decoder: Decoder) -> None:
    """Raise `InvalidArgument` unless a new decoder has said all that is read of it between its steps, for others' sake
    too."""
    for name in ("width", "initial_state"):
        if not hasattr(decoder, name):
            raise InvalidArgument(f"{type(decoder).__name__}.{name}", None, "must be set in __init__ or in the class")
    name = type(decoder).__name__
    check_whole(f"{name}.width", decoder.width, 1, MAX_BRANCHES)
    if decoder.lanes not in LANES:
        limit = f"must be one of {', '.join(map(str, LANES))}"
        raise InvalidArgument(f"{name}.lanes", decoder.lanes, limit)
    for field in ("plain_sampler", "resting_sampler"):
        if getattr(decoder, field) is not None:
            check_sampler(f"{name}.{field}", getattr(decoder, field))
    if not isinstance(decoder.grant_sizes, (list, tuple)):
        raise InvalidArgument(f"{name}.grant_sizes", decoder.grant_sizes, "must be a list or a tuple of whole numbers")
    for size in decoder.grant_sizes:
        check_whole(f"{name}.grant_sizes", size, 1, MAX_INT32)
    if has_streams(decoder):
        check_streams(f"{name}.initial_state", decoder.initial_state)


def has_streams(decoder: Decoder) -> bool:
    """Whether its branches may be stepped without it, by what their states say."""
    return decoder.plain_sampler is not None or decoder.resting_sampler is not None


# ------------------------------------------------------------------------------------------------------------- queries
def check_queries(queries: object, branches: Sequence[Branch], decoder: Decoder, vocab_size: int) -> None:
    """Raise `InvalidArgument` unless each query is of a living branch, each branch is asked once, and drafts and asks
    can be run."""
    if not isinstance(queries, (list, tuple)):
        raise InvalidArgument("queries", queries, "must be a list or a tuple of queries")
    alive: Collection[Branch] = branches if len(branches) <= FEW else set(branches)
    asked: set[Branch] = set()
    known: object = None  # asks that were looked at: a gang's are often one and the same
    for i, query in enumerate(queries):
        if not isinstance(query, Query):
            raise InvalidArgument(f"queries[{i}]", query, "must be a Query")
        branch = query.branch
        if not isinstance(branch, Branch) or branch not in alive:
            raise InvalidArgument(f"queries[{i}].branch", branch, "must be one of the request's living branches")
        asked.add(branch)
        if len(asked) == i:
            raise InvalidArgument(f"queries[{i}].branch", branch.tip, "must be asked at most once a step")
        if known is not None and query.asks is known and query.draft is EMPTY:
            continue
        if not isinstance(query.asks, tuple):
            raise InvalidArgument(f"queries[{i}].asks", query.asks, "must be a tuple of asks")
        if query.draft is not EMPTY:
            try:
                _check_draft(query.draft, decoder, vocab_size)
                if isinstance(query.draft, Roll) and query.draft.rejects:
                    _check_rejection(query.draft, query.asks)
            except InvalidArgument as error:
                raise InvalidArgument(f"queries[{i}].{error.field}", error.value, error.limit) from None
        for at, ask in enumerate(query.asks):
            try:
                _check_ask(ask, query.draft, vocab_size)
            except InvalidArgument as error:
                raise InvalidArgument(f"queries[{i}].asks[{at}]{error.field}", error.value, error.limit) from None
        known = query.asks if query.draft is EMPTY else known
    _check_best(queries, decoder)


def _check_best(queries: Sequence[Query], decoder: Decoder) -> None:
    """Of a gang all or none ask for the best, once each, and all alike but for stream and group."""
    asks = {id(query.asks): query.asks for query in queries}
    if not any(isinstance(ask, Best) for own in asks.values() for ask in own):
        return
    first: Best | None = None
    known: object = None
    for i, query in enumerate(queries):
        if known is not None and query.asks is known and query.draft is EMPTY:
            continue
        given = [(at, ask) for at, ask in enumerate(query.asks) if isinstance(ask, Best)]
        if len(given) != 1:
            limit = "must have one Best: a gang asks it of all its branches, or of none"
            raise InvalidArgument(f"queries[{i}].asks", query.asks, limit)
        at, ask = given[0]
        place, first = f"queries[{i}].asks[{at}]", first or ask
        if not decoder.gang:
            raise InvalidArgument(place, ask, "must not be a Best: the decoder is no gang")
        for name in ("k", "sampler", "min_tokens_to_keep"):
            value, wanted = getattr(ask, name), getattr(first, name)
            if value != wanted:
                raise InvalidArgument(f"{place}.{name}", value, f"must be as in the gang's first query, {wanted}")
        known = query.asks


def _check_draft(draft: Draft | Roll, decoder: Decoder, vocab_size: int) -> None:
    if isinstance(draft, Draft):
        check_tokens("draft.tokens", draft.tokens, vocab_size)
    elif isinstance(draft, Roll):
        check_whole("draft.count", draft.count, 0, MAX_INT32)
        if draft.widths and len(draft.widths) != draft.count:
            limit = f"must be one for each of {draft.count} places, or none"
            raise InvalidArgument("draft.widths", draft.widths, limit)
        for width in draft.widths:
            check_whole("draft.widths", width, 1, MOST_CANDIDATES)
        check_sampler("draft.sampler", draft.sampler)
        check_stream("draft.stream", draft.stream)
        if "draft" not in decoder.lanes:
            raise InvalidArgument("draft", draft, f"must be a Draft where the decoder's lanes are {decoder.lanes}")
    else:
        raise InvalidArgument("draft", draft, "must be a Draft or a Roll")


def _check_rejection(roll: Roll, asks: Sequence[Ask]) -> None:
    """Its tokens are verified by the draws of one Sample, at all nodes, with other noise."""
    samples = [ask for ask in asks if isinstance(ask, Sample)]
    if len(samples) != 1 or samples[0].nodes is not None or len(samples[0].streams) != 1:
        raise InvalidArgument("draft.rejects", True, "needs one Sample, of every node and of one stream")
    if samples[0].streams[0] == roll.stream and samples[0].sampler.seed == roll.sampler.seed:
        raise InvalidArgument("draft.stream", roll.stream, "must not be the Sample's where the draft is to be rejected")


def _check_ask(ask: Ask, draft: Draft | Roll, vocab_size: int) -> None:
    """Nodes are those of the draft that was proposed: the scheduler may strip it, and answers what was run."""
    if isinstance(ask, Sample):
        check_sampler(".sampler", ask.sampler)
        if not isinstance(ask.streams, (tuple, list)):
            raise InvalidArgument(".streams", ask.streams, "must be a tuple of whole numbers")
        if not ask.streams:
            raise InvalidArgument(".streams", ask.streams, "must name at least one stream")
        for stream in ask.streams:
            check_stream(".streams", stream)
    elif isinstance(ask, TopK):
        check_whole(".k", ask.k, 1, vocab_size)
    elif isinstance(ask, LogProbs):
        if len(ask.nodes) != len(ask.tokens):
            raise InvalidArgument(".tokens", ask.tokens, f"must be one for each of {len(ask.nodes)} nodes")
        check_tokens(".tokens", ask.tokens, vocab_size)
    elif isinstance(ask, (Best, RowBest)):
        _check_ranked(ask)
    else:
        raise InvalidArgument("", ask, "must be a Sample, a TopK, a LogProbs, a Best or a RowBest")
    if ask.nodes is not None:
        last = draft.num_nodes
        for node in ask.nodes:
            check_whole(".nodes", node, 0, last)


def _check_ranked(ask: Best | RowBest) -> None:
    check_whole(".k", ask.k, 1, MAX_INT32)
    if ask.sampler is not None:
        check_sampler(".sampler", ask.sampler)
    check_whole(".min_tokens_to_keep", ask.min_tokens_to_keep, 1, MAX_INT32)
    if isinstance(ask, Best):
        check_stream(".stream", ask.stream)
        check_whole(".group", ask.group, 0, MAX_INT32)
        return
    if ask.sampler is not None and len(ask.streams) != len(ask.nodes):
        raise InvalidArgument(".streams", ask.streams, f"must be one for each of {len(ask.nodes)} nodes")
    for stream in ask.streams:
        check_stream(".streams", stream)


# ------------------------------------------------------------------------------------------------------------ verdicts
def check_verdict(
    history: History,
    live: Sequence[Branch],
    evaluated: Mapping[Branch, Draft],
    verdict: Verdict,
    vocab_size: int,
    decoder: Decoder | None = None,
    known: int = 0,
    limit: int = MAX_INT32,
) -> None:
    """Find everything that can be wrong with a verdict before anything changes. Raises `InvalidArgument`.

    `evaluated`: the branches queried, with the draft that was run behind each. `decoder`: whose width a gang must keep
    to. `known`: how many tokens were settled before. `limit`: the longest sequence's.
    """
    if not isinstance(verdict, Verdict):
        raise InvalidArgument("verdict", verdict, "must be a Verdict")
    for name in ("live", "done", "drop"):
        if not isinstance(getattr(verdict, name), (tuple, list)):
            raise InvalidArgument(name, getattr(verdict, name), "must be a tuple or a list")
    alive: Collection[Branch] = live if len(live) <= FEW else set(live)
    if verdict.drop:
        strangers = sum(branch not in alive for branch in verdict.drop)
        if strangers:
            raise InvalidArgument("drop", strangers, "of the branches dropped are not alive")
        alive = set(live) - set(verdict.drop)
    of_streams = decoder is not None and has_streams(decoder)
    for i, child in enumerate(verdict.live):
        try:
            _check_child(history, alive, evaluated, child, vocab_size)
            if child.keep is not None and evaluated and decoder is not None:
                _check_revision(history, child, decoder)
            if child.state is not None and of_streams:
                check_streams(".state", child.state)
        except InvalidArgument as error:
            raise InvalidArgument(f"live[{i}]{error.field}", error.value, error.limit) from None
    for i, hypothesis in enumerate(verdict.done):
        try:
            _check_hypothesis(history, hypothesis, vocab_size, limit)
        except InvalidArgument as error:
            raise InvalidArgument(f"done[{i}]{error.field}", error.value, error.limit) from None
    if len({id(hypothesis) for hypothesis in verdict.done}) < len(verdict.done):
        raise InvalidArgument("done", Shown(f"{len(verdict.done)} answers"), "must have each once")
    if verdict.settled is not None:
        heads = [_head(history, evaluated, child) for child in verdict.live]
        check_settled(history, verdict.settled, heads, decoder, known)
    if decoder is not None and (decoder.gang or len(verdict.live) + len(live) > MAX_BRANCHES):
        touched = {child.parent for child in verdict.live} | set(verdict.drop) | set(evaluated)
        width = len(verdict.live) + sum(branch not in touched for branch in live)
        if width > MAX_BRANCHES:
            raise InvalidArgument("live", width, f"branches must be at most {MAX_BRANCHES}")
        if decoder.gang and width > decoder.width:
            raise InvalidArgument("live", width, f"branches must be at most the gang's declared width, {decoder.width}")


def check_settled(
    history: History,
    settled: int,
    heads: Sequence[tuple[int, int, tuple[int, ...]]],
    decoder: Decoder | None,
    known: int = 0,
) -> None:
    """Raise unless all that lives has the settled tokens in common; the first `known` are known to be. `heads`: of each
    child, a tip, the length up to where the child goes along with it, and its tokens behind."""
    if decoder is not None and not decoder.gang:
        raise InvalidArgument("settled", settled, "must be None: the decoder is no gang")
    least = min((length + len(tokens) for _, length, tokens in heads), default=MAX_INT32)
    check_whole("settled", settled, 0, least)
    if settled <= known:
        return
    if settled <= min((length for _, length, _ in heads), default=settled):
        if not history.agree({history.ancestor(tip, length) for tip, length, _ in heads}, settled):
            raise InvalidArgument("settled", settled, "must be tokens that all that lives has in common")
        return
    ends = {
        (history.ancestor(tip, min(settled, length)), tuple(tokens[: max(0, settled - length)]))
        for tip, length, tokens in heads
    }
    if len({_way(history, tip, tokens) for tip, tokens in ends}) > 1:
        raise InvalidArgument("settled", settled, "must be tokens that all that lives has in common")


def _head(history: History, evaluated: Mapping[Branch, Draft], child: Child) -> tuple[int, int, tuple[int, ...]]:
    """Up to where a child goes along with its parent's tip, and its tokens behind."""
    tip, tokens = child.parent.tip, child.tokens
    if child.path:
        tokens = (*evaluated[child.parent].along(child.path), *tokens)
    return tip, history.depth[tip] if child.keep is None else child.keep, tokens


def _way(history: History, tip: int, tokens: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """A sequence by its last known node and what follows: what is in the history already is named by it."""
    for i, token in enumerate(tokens):
        node = history.find(tip, token)
        if node is None:
            return tip, tokens[i:]
        tip = node
    return tip, ()


def _check_child(
    history: History, alive: Collection[Branch], evaluated: Mapping[Branch, Draft], child: Child, vocab_size: int
) -> None:
    if not isinstance(child, Child):
        raise InvalidArgument("", child, "must be a Child")
    parent = child.parent
    if not isinstance(parent, Branch) or parent not in alive:
        tip = parent.tip if isinstance(parent, Branch) else parent
        raise InvalidArgument(".parent", tip, "must be the tip of a branch that is alive")
    if child.tokens:
        check_tokens(".tokens", child.tokens, vocab_size)
    if child.keep is not None:
        length = history.depth[parent.tip]
        if child.path:
            raise InvalidArgument(".path", child.path, "must be empty where keep is given")
        if not isinstance(child.keep, int) or not 1 <= child.keep <= length:
            raise InvalidArgument(".keep", child.keep, f"must be from 1 to the branch's length, {length}")
    if child.path:
        draft = evaluated.get(parent)
        size = len(draft.tokens) if draft is not None else 0
        inside = all(isinstance(node, int) and 1 <= node <= size for node in child.path)
        if draft is None or not inside or draft.path(child.path[-1]) != tuple(child.path):
            raise InvalidArgument(".path", child.path, "must be a way down the draft of this step's query")
    if child.score is not None:
        check_score(child.score)


def _check_revision(history: History, child: Child, decoder: Decoder) -> None:
    length = history.depth[child.parent.tip]
    if child.keep != length and not (decoder.revises or decoder.gang):
        limit = f"must be the branch's length, {length}: a decoder that takes tokens back says so with `revises = True`"
        raise InvalidArgument(".keep", child.keep, limit)


def check_told(
    request: Request, asked: Collection[Branch], verdict: Verdict, ranks: Sequence[int], ended: Sequence[Hypothesis]
) -> None:
    """Raise where tokens that were told at once are of no answer any more, or of another one than they were: a reader
    knows answers by their ranks. `ranks`: the children's; `ended`: the answers that end with a child's tokens."""
    if len(verdict.live) == len(asked) and not verdict.drop:
        for child, branch in zip(verdict.live, asked, strict=True):
            if child.parent is not branch or (child.state is not None and child.state != branch.state):
                break
        else:  # as nearly always: everybody goes on as himself
            return
    rank_of, depth, first = request.decoder.rank, request.history.depth, request.prompt_length
    parents = {child.parent for child in verdict.live}
    gone = [branch for branch in dict.fromkeys((*asked, *verdict.drop)) if branch not in parents]
    moved = [
        (child, rank)
        for child, rank in zip(verdict.live, ranks, strict=True)
        if child.state is not None and child.state != child.parent.state
    ]
    if not (gone or moved):
        return
    told = {rank_of(branch.state) for branch in request.branches if depth[branch.tip] > first}
    before = {hypothesis.rank for hypothesis in request.done}
    kept = before | {hypothesis.rank for hypothesis in (*verdict.done, *ended)}
    if not (verdict.live or kept) and len(gone) == len(request.branches):
        return  # it ends, and has no answer
    kept |= {rank for child, rank in zip(verdict.live, ranks, strict=True) if rank_of(child.parent.state) == rank}
    behind = "what was told stands. Who lets answers go, or has one become another, says so with `revises = True`"
    for branch in (*gone, *(child.parent for child, _ in moved)):
        if depth[branch.tip] > first and (rank := rank_of(branch.state)) not in kept:
            limit = f"must have one, of a branch of that rank, or be done: {behind}"
            raise InvalidArgument("live", Shown(f"without a child of rank {rank}"), limit)
    for child, rank in moved:
        if rank in told | before and rank_of(child.parent.state) != rank:
            limit = f"must go on from a branch of that rank: {behind}"
            raise InvalidArgument("live", Shown(f"with a child of rank {rank}"), limit)


def _check_hypothesis(history: History, hypothesis: Hypothesis, vocab_size: int, limit: int) -> None:
    if not isinstance(hypothesis, Hypothesis):
        raise InvalidArgument("", hypothesis, "must be a Hypothesis")
    check_whole(".tip", hypothesis.tip, 1, len(history.token) - 1)
    check_tokens(".tokens", hypothesis.tokens, vocab_size)
    if (length := history.depth[hypothesis.tip] + len(hypothesis.tokens)) > limit:
        raise InvalidArgument("", Shown(f"{length} tokens long"), f"must be at most {limit}, with the prompt")
    if not isinstance(hypothesis.ancestry, (tuple, list)):
        raise InvalidArgument(".ancestry", hypothesis.ancestry, "must be a tuple of whole numbers")
    for rank in hypothesis.ancestry:
        check_whole(".ancestry", rank, 0, MAX_INT32)
    if hypothesis.prompt_length is not None:
        check_whole(".prompt_length", hypothesis.prompt_length, 0, limit)
    check_rank(".rank", hypothesis.rank)
    check_score(hypothesis.score)
    if hypothesis.reason not in REASONS:
        raise InvalidArgument(".reason", hypothesis.reason, f"must be one of {', '.join(REASONS)}")
    if hypothesis.stop_token is not None:
        check_tokens(".stop_token", (hypothesis.stop_token,), vocab_size)
    if hypothesis.stop_string is not None and not isinstance(hypothesis.stop_string, str):
        raise InvalidArgument(".stop_string", hypothesis.stop_string, "must be text")
    check_whole(".excess_bytes", hypothesis.excess_bytes, 0, MAX_INT32)
