"""Runs requests on the real engine and compares bits. Nothing here takes a tolerance."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from pagedec.core.adapter_places import Adapter
from pagedec.core.forward import DRAW_DTYPE, LaneForward
from pagedec.core.layout import draw_record
from pagedec.core.protocol import Answer, Decoder, DecoderContext, Query, TopK, Verdict
from pagedec.core.request import Branch
from pagedec.core.sampler import Sampler
from pagedec.decoders import decoder, make_decoder
from pagedec.engine.engine import Engine, FinishedRequest
from pagedec.fields import rules
from pagedec.models.model import Model
from pagedec.params import RequestParams
from pagedec.runtime.cache import allocate_cache
from pagedec.runtime.runner import LaneRunner
from tests.equivalence.remote import VOCABULARY
from tests.support import add, step

SPECULATIONS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_candidates": 3, "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0, "num_speculative_tokens": 9},
    "lookahead": {"method": "lookahead", "window_size": 8, "ngram_size": 2, "num_guesses": 8},
    "lookahead, from the prompt": {
        "method": "lookahead", "window_size": 2, "ngram_size": 4, "num_guesses": 3, "pool_from_prompt": True,
    },
    "jacobi": {"method": "jacobi", "num_speculative_tokens": 7},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
}  # fmt: skip
"""Every way to draft."""
TRACED = 8  # log-probabilities recorded at each position: their bits are the row's bits
TEXTS = [json.loads(line)["prompt"] for line in Path(__file__).parent.parent.joinpath("data/prompts.jsonl").open()]


@dataclass(frozen=True)
class Case:
    """A request by name. `params` as a user gives them; `adapter`: which of its engine's `ADAPTERS`."""

    name: str
    prompt: tuple[int, ...]
    params: Any
    adapter: int = 0

    def __hash__(self) -> int:
        return hash((self.prompt, repr(self.params)))


ADAPTERS = WeakKeyDictionary[Engine, Sequence[Adapter]]()
"""Of engines that take some; cases have the first one as 1, and as 0 that they have none."""


def adapter_of(engine: Engine, number: int) -> Adapter | None:
    return ADAPTERS[engine][number - 1] if number else None


@lru_cache(maxsize=1)
def text_ids() -> tuple[int, ...]:
    """All texts in the default model's tokens; one that only it knows is another."""
    from pagedec.formats.resolve import resolve_model
    from pagedec.text.tokenizer import Tokenizer

    path = resolve_model().tokenizer
    assert path is not None
    tokenizer = Tokenizer.from_path(path)
    return tuple(token % VOCABULARY for text in TEXTS for token in tokenizer.encode(text))


def prompts(count: int, low: int, high: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Pieces of real text of mixed lengths; every second one begins as its predecessor does."""
    rng, ids = random.Random(seed), text_ids()
    out: list[tuple[int, ...]] = []
    for i in range(count):
        length, start = rng.randrange(low, high + 1), rng.randrange(len(ids) - high)
        shared = out[-1][: rng.randrange(length)] if i % 2 else ()
        out.append((*shared, *ids[start : start + length - len(shared)]))
    return out


# ------------------------------------------------------------------------------------------------------------ tracing
@dataclass(frozen=True)
class TracedParams(RequestParams):
    """Any decoder's parameters; its rows' log-probabilities go to `trace` as bytes, by stream and position."""

    inner: Any = None
    trace: dict[tuple[int, int], bytes] = field(default_factory=dict, repr=False)


def traced(inner: Any) -> TracedParams:
    """What `inner` asks for, traced."""
    return TracedParams(inner=inner, **{name: getattr(inner, name) for name in rules(RequestParams)})


@decoder("test-traced", params=TracedParams)
class Traced(Decoder):
    """Asks for the best log-probabilities as well, and otherwise does what the inner decoder does."""

    def __init__(self, params: TracedParams, context: DecoderContext) -> None:
        self.inner, self.trace, self.depth = make_decoder(params.inner, context), params.trace, context.history.depth
        self.lanes, self.gang, self.width = self.inner.lanes, self.inner.gang, self.inner.width
        self.initial_state = self.inner.initial_state

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        queries = self.inner.propose(branches, room)
        return [Query(query.branch, (*query.asks, TopK(TRACED)), query.draft) for query in queries]

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        plain = [Query(query.branch, query.asks[:-1], query.draft) for query in queries]
        verdict = self.inner.advance(plain, [Answer(a.draft, a.values[:-1]) for a in answers])
        topk = {query.branch: answer.values[-1] for query, answer in zip(queries, answers, strict=True)}
        for child in verdict.live:
            tokens, logprobs = topk[child.parent]
            for i, node in enumerate((0, *child.path)):
                key = (child.state[0], self.depth[child.parent.tip] + i)
                bits = np.asarray(tokens[node], np.int32).tobytes() + np.asarray(logprobs[node], np.float32).tobytes()
                assert self.trace.setdefault(key, bits) == bits, f"{key} was evaluated twice, with different bits"
        return verdict

    def rank(self, state: Any) -> int:
        return self.inner.rank(state)


@dataclass
class Outcome:
    """Answers by name, and what happened on the way."""

    tokens: dict[str, list[list[int]]]
    finished: dict[str, FinishedRequest] = field(default_factory=dict)
    num_preemptions: int = 0
    num_cached: int = 0
    num_accepted: int = 0


def run(
    engine: Engine, cases: Iterable[Case], disturb: random.Random | None = None, waiting_for: Sequence[str] = ()
) -> Outcome:
    """All cases as one batch, beside the requests `waiting_for` that the engine already has; `disturb` preempts at
    random and lets requests arrive late."""
    waiting, outcome = list(cases), Outcome({})
    count = len(waiting) + len(waiting_for)
    while len(outcome.tokens) < count:
        while waiting and (disturb is None or disturb.random() < 0.7):
            case = waiting.pop(0)
            add(engine, case.name, case.prompt, case.params, adapter=adapter_of(engine, case.adapter))
        if disturb and engine.scheduler.requests and disturb.random() < 0.3:
            engine.drain()
            engine.scheduler.preempt(disturb.choice(engine.scheduler.requests).id)
        for finished in step(engine):
            outcome.finished[finished.request.id] = finished
            outcome.tokens[finished.request.id] = [answer.token_ids for answer in finished.answers]
            outcome.num_preemptions += finished.metrics.num_preemptions
            outcome.num_cached += finished.metrics.num_cached_tokens
            outcome.num_accepted += finished.metrics.num_accepted_tokens
    engine.scheduler.check()
    return outcome


# ---------------------------------------------------------------------------------------------------- without any cache
class Scratch:
    """The model on whole texts: every call evaluates everything from the first token on, in blocks of its own."""

    block_size, num_blocks = 16, 32

    def __init__(self, model: Model) -> None:
        cache = allocate_cache(model.arch, self.num_blocks, self.block_size, model.backend)
        self.model, self.runner = model, LaneRunner(model, cache, self.num_blocks * self.block_size)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """fp32 [1, vocab] after the last token."""
        n = len(tokens)
        at = np.arange(n, dtype=np.int32)
        forward = LaneForward(
            "target",
            np.array(tokens, np.int32),
            at,
            at,
            np.array([0, n], np.int32),
            np.array([n], np.int32),
            np.arange(self.num_blocks, dtype=np.int32)[None].copy(),
            read_rows=np.array([n - 1], np.int32),
        )
        self.runner.execute(forward)
        return self.runner.buffers.logits[:1].clone()

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        logits = self.logits(tokens)
        lse = self.model.backend.topk(logits, np.zeros(1, np.int32), 0)[2]
        values: list[float] = (logits[0].numpy() - lse).tolist()
        return values

    def draw(self, tokens: Sequence[int], stream: int, sampler: Sampler) -> int:
        draw = np.frombuffer(bytearray(draw_record(sampler, stream)), DRAW_DTYPE)
        draw["position"] = len(tokens)
        return int(self.model.backend.sample(self.logits(tokens), draw)[0])
