"""A request's own rules, logits processing, stop strings and reports, on the fake device: every decoder returns what
plain lists return, with the same log-probabilities; alone, in a crowd, in chunks, preempted, found in the prefix
cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pagedec.core.logits_rules import NO_RULES, LogitsRules
from pagedec.core.logprobs import NO_REPORTING, Reporting, TokenLogprobs, answer_reports
from pagedec.core.protocol import Child, Hypothesis, Verdict
from pagedec.core.request import Finished, Progress, Request
from pagedec.core.stop_strings import StopStrings
from pagedec.core.stopping import Stopping
from pagedec.params import SamplingParams
from tests.algorithms.beam import BeamParams, beam
from tests.algorithms.interactive import InteractiveParams
from tests.core.fake import EOS, VOCABULARY, FakeEngine, pick, reference_noise
from tests.core.oracle import Ending, generate, process, report
from tests.core.world import METHODS, Case, World, limits, results

REPORTING = (NO_REPORTING, Reporting(0), Reporting(3), Reporting(2, 1), Reporting(None, 2), Reporting(VOCABULARY, 0))


def random_processing(rng: random.Random) -> LogitsRules:
    """Any rules, of which no step can ban everything."""
    tokens = range(VOCABULARY)
    return LogitsRules(
        tuple(sorted(rng.sample(tokens, 6))) if rng.random() < 0.3 else None,
        tuple(tuple(rng.choices(tokens, k=rng.choice([1, 2, 3]))) for _ in range(2)) if rng.random() < 0.3 else (),
        tuple((token, rng.uniform(-3, 3)) for token in sorted(rng.sample(tokens, 2))) if rng.random() < 0.3 else (),
        rng.choice([0, 0, 3]),
        rng.choice([1.0, 1.5, 0.7]),
        rng.choice([0.0, 0.5]),
        rng.choice([0.0, 1.0, -0.5]),
    )


def random_stopping(rng: random.Random) -> Stopping:
    """Tokens of zero to four bytes of a tiny alphabet, so that strings end in the middle of tokens."""
    pieces = [bytes(rng.choices(b"ab\xc3\xa9", k=rng.choice([0, 1, 1, 2, 4]))) for _ in range(VOCABULARY - 1)]
    strings = ["".join(rng.choices("ab\xe9", k=rng.choice([1, 2, 3, 4]))) for _ in range(rng.randrange(1, 4))]
    silent = frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 1])))
    pieces.append(b"" if rng.random() < 0.5 else b"ab")
    return Stopping(
        (),
        (rng.randrange(VOCABULARY),) if rng.random() < 0.3 else (),
        rng.choice([0, 0, 3]),
        rng.randrange(4, 17),
        False,
        StopStrings(strings),
        pieces,
        silent,
    )


@dataclass
class Ruled(Case):
    """A case whose answers, endings and reports are known."""

    endings: tuple[Ending, ...] = ()


def ruled(world: World, name: str, method: type[SamplingParams], rng: random.Random) -> Ruled:
    """A sampling request with random rules, and its answers from plain lists."""
    prompt, seed, n = world.prompt(), rng.choice([None, world.seed]), rng.choice([1, 1, 3])
    processing = random_processing(rng) if rng.random() < 0.7 else NO_RULES
    stopping = random_stopping(rng) if rng.random() < 0.7 else Stopping((), (3,), max_tokens=rng.randrange(4, 17))
    endings = []
    for stream in range(n):

        def draw(tokens: Sequence[int], stream: int = stream) -> int:
            banned = stopping.ends if len(tokens) - len(prompt) < stopping.min_tokens else ()
            scores = process(world.target(tokens), tokens, len(prompt), processing)
            return pick(scores, seed is None, reference_noise(seed or 0, stream, len(tokens)), banned)

        endings.append(generate(draw, prompt, stopping))
    params: Any = method(n=n, temperature=0.0 if seed is None else 1.0, seed=seed)
    want = [ending.tokens for ending in endings]
    return Ruled(
        f"{name} {method.__name__}",
        params,
        prompt,
        want,
        stopping,
        None,
        (),
        processing,
        rng.choice(REPORTING),
        tuple(endings),
    )


def run(
    world: World, cases: Sequence[Ruled], seed: int | None, made: type[FakeEngine] = FakeEngine, **changes: Any
) -> FakeEngine:
    """All of them in one batch; everything that they report is compared."""
    engine = made(world.models, limits(**changes))
    rng = random.Random(seed)
    requests: dict[str, Request] = {}
    streamed: dict[tuple[str, int], list[TokenLogprobs | None]] = {}
    waiting = list(cases)
    while waiting or engine.scheduler.requests:
        while waiting and (seed is None or rng.random() < 0.6):
            case = waiting.pop()
            requests[case.name] = case.add(engine.scheduler)
        if seed is not None and engine.scheduler.requests and rng.random() < 0.15:
            engine.scheduler.preempt(rng.choice(engine.scheduler.requests).id)
        for event in engine.step():
            if isinstance(event, Progress) and event.logprobs is not None:
                assert [entry and entry.token_id for entry in event.logprobs] == list(event.tokens)
                streamed.setdefault((event.request.id, event.rank), []).extend(event.logprobs)
            elif isinstance(event, Finished) and not event.request.decoder.gang:
                found = answer_reports(event.request, event.hypothesis)
                assert found is None or found == streamed[event.request.id, event.hypothesis.rank]
    for case in cases:
        check(world, case, requests[case.name])
    engine.check_whole()
    return engine


def check(world: World, case: Ruled, request: Request) -> None:
    assert results(request) == case.want, f"{case.name}: tokens differ"
    done = sorted(request.done, key=lambda hypothesis: hypothesis.rank)
    for hypothesis, ending in zip(done, case.endings, strict=bool(case.endings)):
        got = (hypothesis.reason, hypothesis.stop_string, hypothesis.excess_bytes)
        assert got == (ending.reason, ending.stop_string, ending.excess_bytes), case.name
    for hypothesis, tokens in zip(done, case.want, strict=True):
        found = answer_reports(request, hypothesis)
        assert found == reports(world, tokens, len(case.prompt), case.reporting.num_logprobs), f"{case.name}: reports"
    prompt = None if request.reports is None else request.reports.prompt
    if case.reporting.num_prompt_logprobs is not None:
        assert prompt == [None, *(reports(world, case.prompt, 1, case.reporting.num_prompt_logprobs) or ())]
        assert request.num_cached_tokens == 0, "a prompt's rows must run"
    else:
        assert prompt in (None, [None])


def reports(world: World, tokens: Sequence[int], start: int, num_top: int | None) -> list[TokenLogprobs] | None:
    if num_top is None:
        return None
    return [report(world.target(tokens[:i]), tokens[i], num_top) for i in range(start, len(tokens))]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(14))
def test_rules_alone_and_mixed(seed: int) -> None:
    world, rng = World(seed), random.Random(seed)
    cases = [ruled(world, str(i), method, rng) for i, method in enumerate(METHODS)]
    for case in cases:
        run(world, [case], None, num_blocks=24, max_chunk=rng.choice([1, 3, None]), array_settle=seed % 2 == 0)
    run(world, cases, seed, num_blocks=24 + seed % 3, max_chunk=rng.choice([1, 3, None]), array_settle=seed % 3 != 0)


@pytest.mark.long
def test_rules_in_many_worlds() -> None:
    for seed in range(100, 400):
        test_rules_alone_and_mixed(seed)


@pytest.mark.parametrize("seed", range(6))
def test_beams_report_what_the_model_said(seed: int) -> None:
    """Finished beams wait for the others: their last token's report was made when it was evaluated."""
    world, rng = World(seed), random.Random(seed)
    prompt, processing = world.prompt(), random_processing(rng)
    params = BeamParams(rng.choice([2, 3]), rng.random() < 0.5, max_tokens=8)
    want = beam(lambda tokens: process(world.target(tokens), tokens, len(prompt), processing), prompt, params, (EOS,))
    case = Ruled(
        "beam",
        params,
        prompt,
        want,
        limit=len(prompt) + 8,
        eos=(EOS,),
        processing=processing,
        reporting=Reporting(2, 1),
    )
    run(world, [case], None, num_blocks=24, max_chunk=3)
    run(world, [case, ruled(world, "beside", SamplingParams, rng)], seed, num_blocks=24)


def test_reports_come_from_drafts_and_stops_cut_them() -> None:
    """The mixtures above are worth something only if they meet what is rare."""
    accepted = strings = inside = cut = 0
    for seed in range(14):
        world, rng = World(seed), random.Random(seed)
        cases = [ruled(world, str(i), method, rng) for i, method in enumerate(METHODS)]
        engine = FakeEngine(world.models, limits(40))
        requests = [case.add(engine.scheduler) for case in cases]
        engine.run()
        accepted += sum(request.acceptance.num_accepted for request in requests if request.reports is not None)
        for request in requests:
            for hypothesis in request.done:
                strings += hypothesis.stop_string is not None
                inside += hypothesis.excess_bytes > 0
                cut += hypothesis.stop_string is not None and len(hypothesis.tokens) > 1
    assert accepted > 5 and strings > 5 and inside > 2 and cut > 0


def test_a_prompt_is_reported_once_and_then_found() -> None:
    """While its prompt is not reported, a request neither waits for nor reads the prefix cache; afterwards it does
    both."""
    world = World(1)
    prompt = [i % VOCABULARY for i in range(21)]
    greedy = SamplingParams(temperature=0.0)
    engine = FakeEngine(world.models, limits(24, max_chunk=3))
    Case("warm", greedy, prompt, None, Stopping(max_tokens=1)).add(engine.scheduler)
    engine.run()
    case = Case("r", greedy, prompt, None, Stopping(max_tokens=5), reporting=Reporting(None, 0))
    twins = [case.add(engine.scheduler), Case(**{**_fields(case), "name": "twin"}).add(engine.scheduler)]
    preempted, num_given = False, 0
    while engine.scheduler.requests:
        if not preempted and all(request.reports and len(request.reports.prompt) == len(prompt) for request in twins):
            preempted = True
            engine.scheduler.preempt("r")
        plan = engine.scheduler.plan()
        marked = plan.forwards["target"].report
        num_given += 0 if marked is None else len(marked.given_rows)
        if preempted:
            assert marked is None
        engine.scheduler.settle(plan, engine.runner.execute(plan))
        engine.check()
    assert preempted and num_given == 2 * (len(prompt) - 1)
    for request in twins:
        assert request.num_cached_tokens == 0 and request.reports is not None
        assert request.reports.prompt == [None, *(reports(world, prompt, 1, 0) or ())]


@pytest.mark.parametrize("chunk", [2, None])
def test_a_session_that_forks_before_its_prompt_has_run(chunk: int | None) -> None:
    """One branch goes back and is given the prompt's tokens by its client: it may read the cache, the other must not
    gain by it."""
    world = World(2)
    prompt = [(3 * i) % VOCABULARY for i in range(13)]
    engine = FakeEngine(world.models, limits(40, max_chunk=chunk))
    Case("warm", SamplingParams(temperature=0.0), prompt, None, Stopping(max_tokens=1)).add(engine.scheduler)
    engine.run()
    session = Case("s", InteractiveParams(temperature=0.0), prompt, None, limit=30, reporting=Reporting(1, 1))
    request = session.add(engine.scheduler)
    [root] = request.branches
    again = Child(root, tuple(prompt[1:]), keep=1, state=replace(root.state, name="t", remaining=2))
    engine.scheduler.edit("s", Verdict((again, Child(root, state=replace(root.state, remaining=2)))))
    while any(branch.state.remaining for branch in request.branches):
        engine.step()
    assert request.reports is not None
    assert request.reports.prompt == [None, *(reports(world, prompt, 1, 1) or ())]
    for branch in request.branches:
        tokens = request.history.tokens(branch.tip)
        found = answer_reports(request, Hypothesis(branch.tip))
        assert len(tokens) == 15 and found == reports(world, tokens, len(prompt), 1)
    engine.scheduler.abort("s")
    engine.check_whole()


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


# ------------------------------------------------------------------------------------ whether token 0 was really drawn
class Read(list[int]):
    """Counts the tokens that are copied out of a text."""

    num_copied = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.num_copied += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("seed", range(3))
def test_what_rules_ban_behind_a_text(seed: int) -> None:
    """Also of tokens whose bytes meet those of others between two tokens."""
    rng = random.Random(seed)
    tokens = [0, 1, 256, 1 << 16]
    for _ in range(300):
        text, token = rng.choices(tokens, k=rng.randrange(1, 9)), rng.choice(tokens)
        size, word = rng.randrange(1, 5), tuple(rng.choices(tokens, k=rng.randrange(1, 4)))
        whole = [*text, token]
        grams = [text[i : i + size] for i in range(len(text) - size + 1)]
        assert LogitsRules(no_repeat_ngram_size=size).bans(text, token) == (whole[-size:] in grams)
        assert LogitsRules(bad_words=(word,)).bans(text, token) == (tuple(whole[-len(word) :]) == word)


def test_long_ngrams_are_not_copied_for_each_place_of_a_text() -> None:
    """All requests would wait: n-grams of 1,024 tokens in a context of 8,192 took 60 ms for each token 0."""
    text = Read(random.Random(1).choices(range(5, 90), k=2000))
    assert not LogitsRules(no_repeat_ngram_size=1000).bans(text, 0)
    assert text.num_copied < 2 * len(text)
