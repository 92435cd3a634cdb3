"""Everything one seed decides: the models, the prompts, the requests and what they must return."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedec.core.costs import StepCosts
from pagedec.core.limits import SchedulerLimits
from pagedec.core.logits_rules import NO_RULES, LogitsRules
from pagedec.core.logprobs import NO_REPORTING, Reporting
from pagedec.core.request import Request
from pagedec.core.scheduler import Scheduler
from pagedec.core.stopping import Stopping
from pagedec.decoders import make_decoder
from pagedec.params import SamplingParams
from tests.algorithms.beam import BeamParams, beam
from tests.algorithms.interactive import Client, InteractiveParams, session
from tests.algorithms.lookahead import LookaheadParams
from tests.algorithms.ngram import NGramParams
from tests.algorithms.oracle_tree import OracleTreeParams
from tests.algorithms.random_tree import RandomTreeParams
from tests.algorithms.reference import Draw, sample
from tests.algorithms.speculative import SpeculativeParams
from tests.core.fake import EOS, VOCABULARY, FakeEngine, LanguageModel, pick, reference_noise

SESSION_LIMIT = 30
BLOCK = 4  # small, so that every boundary is met often
METHODS: tuple[type[SamplingParams], ...] = (
    SamplingParams, NGramParams, RandomTreeParams, LookaheadParams, SpeculativeParams,
)  # fmt: skip


def limits(num_blocks: int = 24, draft_blocks: int | None = None, **changes: Any) -> SchedulerLimits:
    """A small device; the draft lane has half as many blocks unless told."""
    values: dict[str, Any] = {
        "num_blocks": {"target": num_blocks, "draft": draft_blocks or max(1, num_blocks // 2)},
        "vocab_size": VOCABULARY, "block_size": BLOCK, "max_num_batched_tokens": 24, "max_blocks_per_table": 16,
    }  # fmt: skip
    return SchedulerLimits(**(values | changes))


@dataclass(slots=True)
class Case:
    """One request, and the sequences it must return (for a session: texts by name)."""

    name: str
    params: Any
    prompt: list[int]
    want: Any
    stopping: Stopping = field(default_factory=Stopping)
    limit: int | None = None
    eos: tuple[int, ...] = ()
    processing: LogitsRules = NO_RULES
    reporting: Reporting = NO_REPORTING
    adapter: int = field(default=0, kw_only=True)

    @property
    def is_session(self) -> bool:
        return isinstance(self.params, InteractiveParams)

    def add(self, scheduler: Scheduler, priority: int = 0, salt: str = "") -> Request:
        request = scheduler.admit(
            self.name,
            lambda context: make_decoder(self.params, context),
            self.prompt,
            self.stopping,
            self.limit,
            priority=priority,
            salt=f"{self.adapter}/{salt}" if self.adapter else salt,
            eos_token_ids=self.eos,
            rules=self.processing,
            reporting=self.reporting,
        )
        request.adapter = self.adapter
        scheduler.add(request)
        return request


def results(request: Request) -> list[list[int]]:
    """All finished sequences in the order of their ranks, prompts included."""
    done = sorted(request.done, key=lambda hypothesis: hypothesis.rank)
    return [[*request.history.tokens(hypothesis.tip), *hypothesis.tokens] for hypothesis in done]


class World:
    """One seed's models and requests. `adapter`: the same requests through it, which makes the target another model."""

    def __init__(self, seed: int, adapter: int = 0) -> None:
        rng = random.Random(seed)
        order = rng.choice([2, 3, 99])
        self.seed, self.rng = seed, rng
        self.target = LanguageModel(seed + 1000 * adapter, order)
        self.models: dict[str, Callable[[Sequence[int]], Sequence[float]]] = {
            "target": self.target, "draft": LanguageModel(seed, order, noisy=0.25),
        }  # fmt: skip
        self.common = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 13))]
        self.stops = (rng.randrange(VOCABULARY),) if rng.random() < 0.7 else ()
        self.max_tokens = rng.randrange(4, 17)
        self.min_tokens = rng.choice([0, 0, 3])
        self.stopping = Stopping((), self.stops, self.min_tokens, self.max_tokens)
        self.costs: Callable[[], StepCosts | None] | None = None
        self.cases = [*self._sampling(), *self._beams(), self._session()]

    def prompt(self) -> list[int]:
        """Prompts share a beginning."""
        return self.common + [self.rng.randrange(VOCABULARY) for _ in range(self.rng.choice([0, 0, 1, 5]))]

    def draw(self, seed: int | None, prompt_length: int = 1 << 30) -> Draw:
        """What a stream draws after a text, stop tokens banned at first."""

        def draw(tokens: Sequence[int], stream: int) -> int:
            banned = self.stops if len(tokens) - prompt_length < self.min_tokens else ()
            noise = reference_noise(seed or 0, stream, len(tokens))
            return pick(self.target(tokens), seed is None, noise, banned if len(tokens) >= prompt_length else ())

        return draw

    def want(self, seed: int | None, streams: Sequence[int], prompt: list[int]) -> list[list[int]]:
        draw = self.draw(seed, len(prompt))
        return [sample(draw, prompt, stream, self.max_tokens, self.stops, self.min_tokens) for stream in streams]

    def sampling_case(self, method: type[SamplingParams], seed: int | None, n: int, **more: Any) -> Case:
        text = self.prompt()
        params = method(n=n, temperature=0.0 if seed is None else 1.0, seed=seed, **more)
        name = f"{method.__name__.removesuffix('Params').lower()}, {'greedy' if seed is None else 'seeded'}"
        return Case(name, params, text, self.want(seed, range(n), text), self.stopping)

    def _sampling(self) -> list[Case]:
        cases = []
        for method in METHODS:
            cases.append(self.sampling_case(method, None, 1))
            cases.append(self.sampling_case(method, self.seed, self.rng.choice([1, 4])))
        text = self.prompt()
        params = OracleTreeParams(n=3, seed=self.seed, oracle=self.draw(self.seed, len(text)), wrong=EOS)
        cases.append(Case("oracletree, seeded", params, text, self.want(self.seed, range(3), text), self.stopping))
        return cases

    def _beams(self) -> list[Case]:
        cases = []
        for early_stopping in (True, False):
            width, count, text = self.rng.choice([2, 3, 4]), self.rng.randrange(1, 13), self.prompt()
            params = BeamParams(width, early_stopping, self.rng.choice([0.5, 1.0, 2.0]), max_tokens=count)
            want = beam(self.target, text, params, (EOS,))
            cases.append(Case(f"beam, {early_stopping=}", params, text, want, limit=len(text) + count, eos=(EOS,)))
        return cases

    def _session(self) -> Case:
        text = self.prompt()
        want = session(self.draw(self.seed), text, self.seed, SESSION_LIMIT, VOCABULARY)
        return Case("session", InteractiveParams(seed=self.seed), text, want, limit=SESSION_LIMIT)

    # ---- runs
    def engine(self, limits: SchedulerLimits) -> FakeEngine:
        """One over this world's models."""
        return FakeEngine(self.models, limits, self.costs)

    def run(
        self, cases: Sequence[Case], limits: SchedulerLimits, disturb: random.Random | None = None
    ) -> tuple[dict[str, Any], FakeEngine]:
        """Run cases as one batch; `disturb` adds late, preempts and aborts at random."""
        engine = self.engine(limits)
        scheduler = engine.scheduler
        requests: dict[str, Request] = {}
        clients: dict[str, Client] = {}
        waiting, victim = list(cases), None
        if disturb and len(cases) > 2 and disturb.random() < 0.3:
            victim = disturb.choice(cases).name
        for _ in range(5000):
            while waiting and (disturb is None or disturb.random() < 0.7):
                case = waiting.pop(0)
                request = requests[case.name] = case.add(scheduler, disturb.choice([0, 0, 1]) if disturb else 0)
                if case.is_session:
                    clients[case.name] = self._client(scheduler, request)
            for name, client in clients.items():
                if name in requests and not requests[name].closed:
                    client.act()
            if disturb and scheduler.requests and disturb.random() < 0.15:
                scheduler.preempt(disturb.choice(scheduler.requests).id)
            if victim in requests and disturb and disturb.random() < 0.2:
                if not requests[victim].closed:
                    scheduler.abort(victim)
                    del requests[victim]
                victim = None
            if not scheduler.requests and not waiting:
                break
            engine.step()
        else:
            raise AssertionError("a request was lost")
        engine.check_whole()
        found: dict[str, Any] = {name: results(request) for name, request in requests.items() if name not in clients}
        found |= {name: clients[name].texts for name in clients if name in requests}
        return found, engine

    def _client(self, scheduler: Scheduler, request: Request) -> Client:
        return Client(
            lambda: request.branches,
            lambda verdict: scheduler.edit(request.id, verdict),
            request.history.tokens,
            self.seed,
            SESSION_LIMIT,
            VOCABULARY,
        )

    def compare(
        self, cases: Sequence[Case], limits: SchedulerLimits, disturb: random.Random | None = None
    ) -> FakeEngine:
        """What was not aborted must return what the lists return."""
        found, engine = self.run(cases, limits, disturb)
        for case in cases:
            assert found.get(case.name, case.want) == case.want, f"{case.name} differs"
        return engine
