"""Speculation as it is asked for: on the engine, changed or off in a request, with a draft model of its own numbers and
context. Answers are those of plain decoding; wrong tables are refused by name."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from pagedec import LLM, SamplingParams
from pagedec.build import writes_alike
from pagedec.config import EngineConfig
from pagedec.decoders import Sampling, decoder, registry
from pagedec.errors import FeatureNotAvailable, InvalidArgument
from pagedec.executor.process import ProcessExecutor
from pagedec.models.buffers import READ_ROWS
from pagedec.text.tokenizer import Tokenizer
from tests.algorithms.ngram import NGramParams
from tests.engine.crowd import NUM_PROMPTS, SMALL, Tiny, Tokens, assert_whole, right_answers, workload
from tests.equivalence.conftest import TINY
from tests.models.checkpoints import VOCAB
from tests.support import add, drain, step

TABLES: dict[str, dict[str, Any]] = {  # of fixed widths
    "ngram": {"method": "ngram", "num_candidates": 2, "adaptive": False},
    "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 3.0, "adaptive": False},
    "lookahead": {"method": "lookahead", "window_size": 4, "ngram_size": 3, "num_guesses": 3, "adaptive": False},
    "jacobi": {"method": "jacobi", "num_speculative_tokens": 5, "adaptive": False},
}


def drafted_by(path: Path, **own: Any) -> dict[str, Any]:
    return {"model": str(path), "num_speculative_tokens": 3, "adaptive": False, **own}


@pytest.mark.parametrize("method", TABLES)
@pytest.mark.parametrize("settings", [SMALL, {}, {"block_size": 8, "max_num_batched_tokens": 7}], ids=str)
def test_a_crowd_gets_the_same(tiny: Tiny, expected: list[Tokens], method: str, settings: dict[str, Any]) -> None:
    llm = tiny(**settings, speculative_config=TABLES[method])
    assert right_answers(llm) == expected
    assert llm.engine.stats.drafts[method].num_drafts > 0 or settings is SMALL
    assert_whole(llm, expected)


@pytest.mark.parametrize("own", [
    {}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"max_model_len": 16},
    {"max_model_len": 16, "num_candidates": 3},
    {"num_blocks": 7, "draft_tensor_parallel_size": 1},
    {"kv_cache_memory": "128KiB", "num_speculative_tokens": 9}, {"num_candidates": 4, "dtype": "bfloat16"},
    {"num_candidates": 2, "num_speculative_tokens": 9},
], ids=str)  # fmt: skip
def test_a_draft_model_of_its_own_numbers(
    tiny: Tiny, tiny_path: Path, expected: list[Tokens], own: dict[str, Any]
) -> None:
    executor = "process" if "dtype" in own else "inline"
    llm = tiny(**SMALL, executor=executor, speculative_config=drafted_by(tiny_path, **own))
    assert right_answers(llm) == expected
    drafts = llm.engine.stats.drafts["draft_model"]
    assert 0 < drafts.num_accepted <= drafts.num_drafted
    assert llm.engine.scheduler.limits.longest("draft") == own.get("max_model_len", 256)
    assert_whole(llm, expected)


@pytest.mark.parametrize("method", [*TABLES, "draft_model"])
def test_a_crowd_gets_the_same_however_wide_pays(
    tiny: Tiny, tiny_path: Path, expected: list[Tokens], method: str
) -> None:
    """Whatever the machine's clock says, it says nothing to the tokens."""
    table = {**TABLES.get(method, drafted_by(tiny_path)), "adaptive": True}
    llm = tiny(**SMALL, speculative_config=table)
    assert right_answers(llm) == expected
    costs = llm.engine.stats.costs
    assert costs is not None and list(costs.seconds) == sorted(costs.seconds)
    assert llm.engine.stats.num_granted_rows <= llm.engine.stats.num_wished_rows
    assert_whole(llm, expected)


def test_its_pool_is_its_own(tiny: Tiny, tiny_path: Path) -> None:
    """As many blocks as the target has, where nothing is said."""
    llm = tiny(num_blocks=64, speculative_config=drafted_by(tiny_path))
    assert llm.engine.scheduler.limits.num_blocks == {"target": 64, "draft": 64}
    llm = tiny(num_blocks=64, speculative_config=drafted_by(tiny_path, num_blocks=9))
    assert llm.engine.scheduler.limits.num_blocks == {"target": 64, "draft": 9}
    size = llm.kv_cache.num_bytes // 64
    llm = tiny(num_blocks=64, speculative_config=drafted_by(tiny_path, kv_cache_memory=11 * size))
    assert llm.engine.scheduler.limits.num_blocks == {"target": 64, "draft": 11}
    llm = tiny(num_blocks=None, kv_cache_memory="1MiB", speculative_config=drafted_by(tiny_path, dtype="bfloat16"))
    assert len(set(llm.engine.scheduler.limits.num_blocks.values())) == 1


def test_a_context_of_64_positions_under_a_longer_answer(tiny: Tiny, tiny_path: Path) -> None:
    """Drafting stops where the draft model's context does; the target goes on."""
    params = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)
    prompts = [[5, 9, 40], list(range(3, 63)), list(range(3, 70))]
    want = [o.outputs for o in tiny(num_blocks=99).generate(prompts, params, use_tqdm=False)]
    llm = tiny(num_blocks=99, speculative_config=drafted_by(tiny_path, max_model_len=64))
    got = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs for o in got] == want
    counts = [output.metrics.num_accepted_tokens for output in got if output.metrics is not None]
    assert counts[0] > 30 and 0 < counts[1] < 5 and counts[2] == 0


def test_a_worker_that_follows_has_the_same_lanes(tiny: Tiny, tiny_path: Path, expected: list[Tokens]) -> None:
    llm = tiny(**SMALL, executor="process", speculative_config=drafted_by(tiny_path, kv_cache_memory="300KiB"))
    assert right_answers(llm) == expected
    executor = llm.engine.executor
    assert isinstance(executor, ProcessExecutor)
    os.kill(executor.pid, signal.SIGKILL)
    assert right_answers(llm) == expected


def toss(llm: LLM, rng: random.Random, num_steps: int, expected: list[Tokens], tables: list[Any]) -> int:
    """Requests that come at random and are aborted at random, for so many steps; what ends is right. How many were
    aborted."""
    engine, first, num_aborted, number = llm.engine, llm.engine.stats.num_steps, 0, 0
    prompts, params = workload()
    answers: dict[str, Tokens] = {}
    while engine.stats.num_steps - first < num_steps:
        if len(engine.scheduler.requests) < 6 and rng.random() < 0.6:
            own = params[number % NUM_PROMPTS]
            if isinstance(own, SamplingParams):
                own = own.clone(speculative=rng.choice(tables))
            add(engine, str(number), prompts[number % NUM_PROMPTS], own)
            number += 1
        answers |= {f.request.id: [answer.token_ids for answer in f.answers] for f in step(engine)}
        if engine.scheduler.requests and rng.random() < 0.1:
            engine.abort(rng.choice(engine.scheduler.requests).id)
            num_aborted += 1
        engine.scheduler.check()
    answers |= drain(engine)
    assert len(answers) + num_aborted == number
    for name, answer in answers.items():
        assert answer == expected[int(name) % NUM_PROMPTS]
    return num_aborted


@pytest.mark.parametrize("method", [*TABLES, "draft_model"])
def test_aborts_at_any_moment_leave_both_pools_whole(
    tiny: Tiny, other_path: Path, expected: list[Tokens], method: str
) -> None:
    llm = tiny(**SMALL, speculative_config=TABLES.get(method, drafted_by(other_path)))
    assert toss(llm, random.Random(method), 150, expected, [None]) > 5
    assert_whole(llm, expected)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_fifty_thousand_steps(tiny: Tiny, other_path: Path, expected: list[Tokens], seed: int) -> None:
    """Of all methods side by side, with aborts at every point: 10,000 with each seed."""
    llm = tiny(**SMALL, speculative_config=drafted_by(other_path, num_blocks=8))
    assert toss(llm, random.Random(seed), 10_000, expected, [None, False, *TABLES.values()]) > 500
    assert_whole(llm, expected)


def test_more_rows_than_are_read_out_at_once(tiny: Tiny, tiny_path: Path) -> None:
    """32 requests of 8 rows and more in one step, of all methods."""
    methods = [*TABLES.values(), None, False]
    prompts = [[(i * 7 + j * j) % VOCAB for j in range(5 + i)] * 2 for i in range(32)]

    def asked(i: int, speculative: Any) -> SamplingParams:
        kind = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
        return SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1, speculative=speculative, **kind)

    want = tiny(num_blocks=400, max_num_batched_tokens=2048).generate(
        prompts, [asked(i, None) for i in range(32)], use_tqdm=False
    )
    own = drafted_by(tiny_path, num_speculative_tokens=7)
    llm = tiny(num_blocks=400, max_num_batched_tokens=2048, speculative_config=own)
    most = []
    execute = llm.engine.executor.execute

    def counting(forwards: Any, *rest: Any) -> Any:
        most.append(len(forwards["target"].read_rows))
        return execute(forwards, *rest)

    llm.engine.executor.execute = counting  # type: ignore[method-assign]
    got = llm.generate(prompts, [asked(i, methods[i % len(methods)]) for i in range(32)], use_tqdm=False)
    assert [output.outputs for output in got] == [output.outputs for output in want]
    assert max(most) > READ_ROWS
    most.clear()
    got = llm.generate(prompts, [asked(i, None) for i in range(32)], use_tqdm=False)
    assert [output.outputs for output in got] == [output.outputs for output in want]
    assert max(most) == 32 * 8


@pytest.mark.sampled(10)
@pytest.mark.parametrize("method", [*TABLES, "draft_model"])
def test_ends_inside_an_accepted_path(tiny: Tiny, tiny_path: Path, method: str) -> None:
    """max_tokens is never overshot; min_tokens and stop tokens count token by token, whatever a step accepts."""
    plain = tiny()
    llm = tiny(speculative_config=TABLES.get(method, drafted_by(tiny_path, num_speculative_tokens=8)))
    prompt = [5, 9, 40, 5, 9, 40, 5]
    text = plain.generate([prompt], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0]
    for max_tokens in range(1, 14):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
        got, want = (one.generate([prompt], params, use_tqdm=False)[0].outputs for one in (llm, plain))
        assert got == want and len(got[0].token_ids) == max_tokens and got[0].finish_reason == "length"
    for place in range(1, 14):
        for min_tokens in (0, place, place + 1, place + 3):
            stop = [text.token_ids[place]]
            params = SamplingParams(
                temperature=0, max_tokens=30, min_tokens=min_tokens, stop_token_ids=stop, logprobs=2
            )
            got, want = (one.generate([prompt], params, use_tqdm=False)[0].outputs for one in (llm, plain))
            assert got == want
    assert llm.engine.stats.drafts[method].num_accepted > 0


# ------------------------------------------------------------------------------------------------------------- choosing
def test_a_request_chooses_over_the_engine(tiny: Tiny, tiny_path: Path) -> None:
    llm = tiny(speculative_config=drafted_by(tiny_path))
    stats = llm.engine.stats

    def drafting(speculative: Any) -> str:
        before = {name: counts.num_drafts for name, counts in stats.drafts.items()}
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, speculative=speculative)
        [output] = llm.generate([[5, 9, 40, 5, 9]], params, use_tqdm=False)
        used = [name for name, counts in stats.drafts.items() if counts.num_drafts > before.get(name, 0)]
        assert output.metrics is not None and bool(used) == (output.metrics.num_draft_tokens > 0)
        return "+".join(used)

    assert drafting(None) == "draft_model"
    assert drafting(False) == ""
    assert drafting({"method": "draft_model", "num_speculative_tokens": 5, "adaptive": False}) == "draft_model"
    assert len(stats.drafts["draft_model"].drafted) == 5, "the longest drafts so far"
    for method, table in TABLES.items():
        assert drafting(table) == method


def test_counts_by_method_and_place(tiny: Tiny, tiny_path: Path) -> None:
    """A draft model that is the target: all is accepted, and counted where it stands."""
    llm = tiny(speculative_config=drafted_by(tiny_path))
    [output] = llm.generate([[5, 9, 40]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    counts = llm.engine.stats.drafts["draft_model"]
    assert (counts.num_drafts, counts.drafted, counts.accepted) == (2, [2, 2, 2], [2, 2, 2])  # 3 + 1, 3 + 1, and one
    assert (counts.num_drafted, counts.num_accepted) == (6, 6)
    assert output.metrics is not None
    assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (6, 6)
    llm.generate([[7, 7]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, n=1), use_tqdm=False)
    assert counts.drafted == [3, 3, 2], "no more is drafted than the answer has room for"


@dataclass(frozen=True, slots=True)
class LoudParams(SamplingParams):
    """A decoder of somebody's own."""


@pytest.fixture
def _loud(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_by_params", dict(registry._by_params))
    decoder("loud", params=LoudParams)(type("Loud", (Sampling,), {}))
    yield


@pytest.mark.usefixtures("_loud")
def test_decoders_of_one_s_own_are_left_alone(tiny: Tiny) -> None:
    """They draft as they do, and refuse by name what they cannot."""
    llm = tiny(speculative_config=TABLES["jacobi"])
    llm.generate([[5, 6]], [LoudParams(max_tokens=4)], use_tqdm=False)
    llm.generate([[5, 6]], [NGramParams(max_tokens=4)], use_tqdm=False)
    assert llm.engine.stats.drafts.get("jacobi") is None
    with pytest.raises(InvalidArgument, match="speculative is .*: must be None or False: the decoder loud does not"):
        llm.generate([[5, 6]], [LoudParams(speculative=TABLES["ngram"])], use_tqdm=False)


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(("table", "message"), [
    ({}, "method is None: must be one of ngram, suffix, lookahead, jacobi, draft_model"),
    ({"method": "nrgam"}, "method is 'nrgam': must be one of ngram, suffix, lookahead, jacobi, draft_model"),
    ({"method": ["ngram"]}, r"method is \['ngram'\]: must be one of ngram"),
    ({"method": "ngram", "gamma": 3}, "gamma is 3: not a field of the method ngram; known are method, num_specu"),
    ({"method": "ngram", "window_size": 3}, "window_size is 3: not a field of the method ngram"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0: must be a whole number from 1"),
    ({"method": "ngram", "num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5: must be a whole number"),
    ({"method": "ngram", "num_speculative_tokens": 256},
     "num_speculative_tokens is 256: must be less than 256, the context: it drafts 256 tokens ahead"),
    ({"method": "ngram", "adaptive": 1}, "adaptive is 1: must be true or false"),
    ({"method": "ngram", "num_candidates": 0}, "num_candidates is 0: must be a whole number from 1"),
    ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min is 0: must be a whole number from 1"),
    ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3},
     "prompt_lookup_min is 4: must be at most prompt_lookup_max, which is 3"),
    ({"method": "jacobi", "num_speculative_tokens": 0}, "num_speculative_tokens is 0: must be a whole number from 1"),
    ({"method": "jacobi", "num_speculative_tokens": 300}, "num_speculative_tokens is 300: must be less than 256"),
    ({"method": "lookahead", "ngram_size": 1}, "ngram_size is 1: must be a whole number from 2"),
    ({"method": "lookahead", "window_size": -1}, "window_size is -1: must be a whole number from 0"),
    ({"method": "lookahead", "num_guesses": -1}, "num_guesses is -1: must be a whole number from 0"),
    ({"method": "lookahead", "ngram_size": 300}, "ngram_size is 300: must be less than 256, the context"),
    ({"method": "lookahead", "pool_from_prompt": 1}, "pool_from_prompt is 1: must be true or false"),
    ({"method": "draft_model", "num_speculative_tokens": 0}, "num_speculative_tokens is 0: must be a whole number"),
    ({"method": "eagle"}, "method is 'eagle': not available in this version; available: ngram, suffix, lookahead"),
])  # fmt: skip
def test_wrong_tables_are_refused_by_name(tiny: Tiny, tiny_path: Path, table: dict[str, Any], message: str) -> None:
    plain = tiny(max_model_len=256)
    with pytest.raises(InvalidArgument, match=f"^speculative.{message}") as caught:
        plain.generate([[5]], SamplingParams(speculative=table), use_tqdm=False)
    assert isinstance(caught.value, FeatureNotAvailable) == ("eagle" in message)
    assert not plain.engine.scheduler.requests
    own = {**table, "model": str(tiny_path)} if table.get("method") == "draft_model" else table
    with pytest.raises(InvalidArgument, match=f"^speculative_config.{message}"):
        tiny(max_model_len=256, speculative_config=own)


def test_what_must_be_the_engine_s(tiny: Tiny, tiny_path: Path) -> None:
    llm = tiny(speculative_config=TABLES["ngram"])
    with pytest.raises(InvalidArgument, match="^speculative.model is .*: must be in the engine's speculative_config"):
        SamplingParams(speculative=drafted_by(tiny_path))
    with pytest.raises(
        InvalidArgument, match="^speculative.method is 'draft_model': needs a draft model: the engine's"
    ):
        llm.generate([[5]], SamplingParams(speculative={"method": "draft_model"}), use_tqdm=False)
    with pytest.raises(InvalidArgument, match="^speculative is True: must be False, or a table"):
        SamplingParams(speculative=True)


@pytest.mark.parametrize(("own", "message"), [
    ({"model": "/no/such/place.gguf"}, "place.gguf"),
    ({"model": None, "method": "draft_model"}, "speculative_config.model is None: must name the model that drafts"),
    ({"max_model_len": 300}, "speculative_config.max_model_len is 300: must be at most 256, the model's context"),
    ({"num_blocks": 1}, "speculative_config.num_blocks is 1: must be at least 2 blocks"),
    ({"num_blocks": 4, "kv_cache_memory": "1MiB"}, "speculative_config.kv_cache_memory is .*; give one of them"),
    ({"dtype": "float8"}, "speculative_config.dtype is 'float8': must be one of"),
    ({"quantization": "fp4"}, "speculative_config.quantization is 'fp4': must be one of int8, int8_weight_only, "),
    ({"revision": "main"}, "speculative_config.revision is 'main': must be None: .* is no hub id"),
])  # fmt: skip
def test_wrong_draft_models(tiny: Tiny, tiny_path: Path, own: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(speculative_config=drafted_by(tiny_path, **own))


def model_of(place: Path, vocab_size: int, words: list[str] | None) -> Path:
    """A model of random weights; with words, also a tokenizer of these."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**TINY, "vocab_size": vocab_size, "num_hidden_layers": 1}))
    if words is not None:
        made = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, []))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.save(str(place / "tokenizer.json"))
    return place


LETTERS = [chr(ord("a") + i) for i in range(26)]


@pytest.mark.parametrize(("vocab_size", "words", "message"), [
    (96, LETTERS, None),  # the same size
    (128, LETTERS, None),  # padded further
    (64, LETTERS, None),  # or less
    (96, None, None),  # nothing is known but the size
    (128, None, "speculative_config.model is .*: must know the target's tokens: it has 128 token ids, the target 96"),
    (96, [*LETTERS[:5], "E", *LETTERS[6:]], "config.model is .*: must have the target's tokenizer: token 5 "),
    (96, LETTERS[:-1], "must have the target's tokenizer: token 25 is another one in it"),
    (128, [*LETTERS, "A"], "must have the target's tokenizer: token 26 is another one in it"),
])  # fmt: skip
def test_vocabularies(tmp_path: Path, vocab_size: int, words: list[str] | None, message: str | None) -> None:
    target, draft = model_of(tmp_path / "target", 96, LETTERS), model_of(tmp_path / "draft", vocab_size, words)
    own = {"model": str(draft), "load_format": "dummy"}

    def load() -> LLM:
        return LLM(str(target), load_format="dummy", dtype="float32", num_blocks=64, speculative_config=own)

    if message is not None:
        with pytest.raises(InvalidArgument, match=message):
            load()
        return
    llm = load()
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    with_draft = llm.generate(["abcabd"], params, use_tqdm=False)[0].outputs
    assert with_draft == llm.generate(["abcabd"], params.clone(speculative=False), use_tqdm=False)[0].outputs
    assert llm.engine.stats.drafts["draft_model"].num_drafts > 0
    llm.close()


def test_a_target_without_its_tokenizer(tmp_path: Path) -> None:
    """Token ids alone tell nothing: sizes must be equal then."""
    target, draft = model_of(tmp_path / "target", 96, LETTERS), model_of(tmp_path / "draft", 128, LETTERS)
    own = {"model": str(draft), "load_format": "dummy"}
    with pytest.raises(InvalidArgument, match="without both tokenizers it cannot be told"):
        LLM(str(target), load_format="dummy", num_blocks=64, skip_tokenizer_init=True, speculative_config=own)
    config = EngineConfig.from_kwargs(model=str(draft), load_format="dummy").model
    assert writes_alike(Tokenizer.from_path(target), config)


def test_old_arguments_say_where_speculation_is(tiny: Tiny) -> None:
    with pytest.raises(FeatureNotAvailable, match="speculation outside speculative_config is not available"):
        tiny(num_speculative_tokens=3)
