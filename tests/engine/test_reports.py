"""Reported log-probabilities against transformers, and what the engine says of stop strings, clients' tokens and KV
use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pagedec import LLM, SamplingParams
from pagedec.core.logprobs import answer_reports
from pagedec.core.protocol import Child, Hypothesis, Verdict
from pagedec.engine.engine import Engine, EngineEvent
from pagedec.engine.options import Vocabulary
from tests.algorithms.interactive import InteractiveParams
from tests.engine.test_engine import PROMPT, drain
from tests.models.checkpoints import VOCAB
from tests.support import add, progress, step

Tiny = Callable[..., LLM]
LONG_PROMPT = [(7 * i) % VOCAB for i in range(150)]
TOLERANCE = 1e-4  # of another implementation's sums


@pytest.fixture(scope="module")
def foreign(tiny_path: Path) -> Callable[[list[int]], np.ndarray]:
    """transformers' log-probabilities after each token of a text, fp32 [length, vocab]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()

    def logprobs(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            values: np.ndarray = model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()
            return values

    return logprobs


@pytest.mark.parametrize("rows", [512, 11])
def test_reports_are_transformers_log_softmax(
    tiny: Tiny, foreign: Callable[[list[int]], np.ndarray], rows: int
) -> None:
    """Of a prompt longer than what is read out at once, and of an answer sampled under penalties that must not show."""
    engine = tiny(max_num_batched_tokens=rows).engine
    params = SamplingParams(
        temperature=0.7,
        seed=3,
        max_tokens=12,
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=VOCAB,
        repetition_penalty=2.0,
    )
    add(engine, "a", LONG_PROMPT, params)
    finished = drain(engine)["a"]
    [answer] = finished.answers
    assert finished.prompt_logprobs is not None and answer.logprobs is not None
    tokens = [*LONG_PROMPT, *answer.token_ids]
    want = foreign(tokens)
    entries = [*finished.prompt_logprobs, *answer.logprobs]
    assert entries[0] is None and len(entries) == len(tokens)
    for i, entry in enumerate(entries[1:], start=1):
        row = want[i - 1]
        assert entry is not None and entry.token_id == tokens[i]
        assert abs(entry.logprob - row[tokens[i]]) < TOLERANCE
        assert (row > entry.logprob + TOLERANCE).sum() < entry.rank <= 1 + (row > entry.logprob - TOLERANCE).sum()
        assert len(entry.top_ids) == (VOCAB if i < len(LONG_PROMPT) else 5)
        assert np.abs(np.array(entry.top_logprobs) - np.sort(row)[::-1][: len(entry.top_ids)]).max() < TOLERANCE
        assert np.abs(np.array(entry.top_logprobs) - row[list(entry.top_ids)]).max() < TOLERANCE
        if entry.rank <= len(entry.top_ids):
            assert entry.top_logprobs[entry.rank - 1] == entry.logprob
    assert answer.cumulative_logprob == sum(entry.logprob for entry in answer.logprobs if entry is not None)


def test_rows_that_are_read_in_turns(tiny: Tiny) -> None:
    """More rows than are read out at once, some reported, some processed, some neither, in any of the turns."""
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    cases = {
        "reported": (LONG_PROMPT[:90], greedy.clone(prompt_logprobs=2, logprobs=1)),
        "penalised": (PROMPT, greedy.clone(presence_penalty=2.0)),
        "reported too": (LONG_PROMPT[20:120], greedy.clone(prompt_logprobs=0)),
        "plain": (PROMPT[::-1], greedy),
        "penalised, reported": (PROMPT[1:], greedy.clone(repetition_penalty=3.0, logprobs=2)),
    }
    alone = {}
    for name, (prompt, params) in cases.items():
        own = tiny().engine
        add(own, name, prompt, params)
        alone |= drain(own)
    for order in (list(cases), list(cases)[::-1], ["plain", "reported", "reported too", "penalised"]):
        engine = tiny().engine
        for name in order:
            add(engine, name, *cases[name])
        for name, finished in drain(engine).items():
            assert finished.answers == alone[name].answers, name
            assert finished.prompt_logprobs == alone[name].prompt_logprobs, name


def test_nothing_is_reported_that_was_not_asked_for(tiny: Tiny) -> None:
    engine = tiny().engine
    add(engine, "a", PROMPT, SamplingParams(temperature=0, max_tokens=3))
    add(engine, "b", PROMPT, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0))
    ended = drain(engine)
    for name, reported in (("a", False), ("b", True)):
        finished = ended[name]
        assert (finished.prompt_logprobs is not None) == reported
        assert finished.answers[0].logprobs is None and finished.answers[0].cumulative_logprob is None
    add(engine, "c", PROMPT[:1], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2))
    assert drain(engine)["c"].prompt_logprobs == [None]


def test_a_clients_tokens_have_no_report(tiny: Tiny) -> None:
    engine = tiny().engine
    request = add(engine, "s", PROMPT, InteractiveParams(temperature=0, logprobs=1, ignore_eos=True))

    def edit(*children: Child) -> None:
        engine.edit("s", Verdict(children))

    def generate(count: int) -> None:
        state = request.branches[0].state
        edit(Child(request.branches[0], state=type(state)(remaining=count)))
        for _ in range(count):
            step(engine)

    generate(2)
    drawn = request.history.suffix(request.branches[0].tip, 2)
    appended = 1 + max(drawn) % (VOCAB - 1)
    edit(Child(request.branches[0], tokens=(appended,)))
    engine.scheduler.preempt("s")
    generate(2)
    edit(Child(request.branches[0], keep=len(PROMPT) + 4))
    generate(1)
    tip = request.branches[0].tip
    found = answer_reports(request, Hypothesis(tip))
    assert found is not None
    assert [entry is None for entry in found] == [False, False, True, False, False]
    tokens = request.history.suffix(tip, 5)
    assert [entry.token_id for entry in found if entry is not None] == [*tokens[:2], *tokens[3:]]
    engine.abort("s")


def with_vocabulary(engine: Engine) -> Engine:
    """Every token is its number and a semicolon; token 5 is special."""
    engine.vocabulary = Vocabulary([b"%d;" % i for i in range(VOCAB)], frozenset({5}), lambda text: [len(text)])
    return engine


def test_an_answer_says_where_its_stop_string_ended(tiny: Tiny) -> None:
    engine = with_vocabulary(tiny().engine)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    add(engine, "plain", PROMPT, plain)
    tokens = drain(engine)["plain"].answers[0].token_ids
    stop = f"{tokens[3]};{tokens[4]}"[:-1]
    seen: list[EngineEvent] = []
    add(engine, "a", PROMPT, plain.clone(stop=["never", stop], logprobs=0))
    [answer] = drain(engine, seen)["a"].answers
    text = "".join(f"{token};" for token in answer.token_ids)
    assert answer.finish_reason == "stop" and answer.stop_token is None and answer.stop_string == stop
    assert text[: len(text) - answer.excess_bytes].endswith(stop)
    assert text.find(stop) + len(stop) == len(text) - answer.excess_bytes
    assert (
        tokens[: len(answer.token_ids)]
        == answer.token_ids
        == [token for event in progress(seen) for token in event.tokens]
    )
    assert answer.logprobs == [entry for event in progress(seen) for entry in event.logprobs or ()]


def test_kv_use_can_be_read_after_each_step(tiny: Tiny) -> None:
    engine = tiny(num_blocks=32).engine
    add(engine, "a", LONG_PROMPT[:40], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    used = []
    while engine.scheduler.requests:
        step(engine)
        used.append(engine.stats.num_blocks_used)
    assert used == sorted(used) and used[0] == 3 and used[-1] == engine.stats.max_blocks_used == 4
    add(engine, "b", [3], SamplingParams(temperature=0, max_tokens=1))
    step(engine)
    stats = engine.stats
    assert (stats.num_blocks, stats.num_blocks_used, stats.num_blocks_cached) == (32, 1, 3)
    assert stats.max_blocks_used == 4
