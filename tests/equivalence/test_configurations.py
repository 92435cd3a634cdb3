"""A differential fuzz: whatever the engine is made of, a request returns the same bits.

Block, chunk and pool sizes, step budgets, threads, executors, priorities, arrivals and hostile neighbours are drawn at
random; prompts, drafts, samples and beams cross every boundary there is (block, tile of 64, chunk of 512, step budget,
piece of the read-out). Tokens, log-probabilities, ranks and reasons are compared."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.core.protocol import DecoderContext, Verdict
from pagedec.decoders import Sampling, decoder
from pagedec.errors import RequestsFailed
from pagedec.kernels.library import EMULATED_ISAS, available_isas, loadable_isas
from pagedec.models.buffers import READ_ROWS
from pagedec.outputs import RequestOutput
from tests.algorithms.beam import BeamParams
from tests.algorithms.random_tree import RandomTreeParams
from tests.equivalence.conftest import GEMMA3, TINY
from tests.kernels.calls import EMULATED_UNITS

VOCABULARY = 397  # of no panel's width
CONTEXT = 800
LLAMA = {**TINY, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
WINDOWS = {
    **GEMMA3, "num_hidden_layers": 3, "sliding_window": 100, "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip
NUMBERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bfloat16": (LLAMA, {"dtype": "bfloat16"}),
    "float32": (LLAMA, {"dtype": "float32"}),
    "int8": (LLAMA, {"dtype": "bfloat16", "quantization": "int8"}),
    "windows": (WINDOWS, {"dtype": "bfloat16"}),
}
LENGTHS = (1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 300, 511, 512, 513, 700)
ASKS: tuple[Any, ...] = (
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=9, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2),
    SamplingParams(temperature=1.1, seed=5, max_tokens=20, top_p=0.9, min_p=0.01, no_repeat_ngram_size=2),
    SamplingParams(temperature=0, max_tokens=12, speculative={"method": "ngram", "num_candidates": 4}),
    SamplingParams(temperature=0.6, seed=7, n=2, max_tokens=30, speculative={"method": "suffix"}),
    SamplingParams(temperature=0.8, seed=2, max_tokens=12, speculative={"method": "lookahead", "window_size": 9}),
    SamplingParams(temperature=0, max_tokens=12, n=2, speculative={"method": "jacobi"}),
    RandomTreeParams(temperature=0.7, seed=4, n=2, max_tokens=10),
    BeamParams(3, max_tokens=7),
    BeamParams(5, False, 0.5, max_tokens=5),
)
MANY = SamplingParams(temperature=1.0, seed=8, n=READ_ROWS + 6, max_tokens=3, ignore_eos=True, logprobs=2)
"""More answers than are read out in one piece."""


@dataclass(frozen=True, slots=True)
class FaultyParams(SamplingParams):
    """Fails after `after` tokens."""

    after: int = 2


@decoder("test-faulty", params=FaultyParams)
class Faulty(Sampling):
    def __init__(self, params: FaultyParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.left = params.after

    def advance(self, queries: Any, answers: Any) -> Verdict:
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError("hostile")
        return super().advance(queries, answers)


Case = tuple[list[int], Any]


def cases(seed: int, count: int) -> list[Case]:
    """Prompts of critical lengths, many of which begin alike, and something to do with each."""
    rng = random.Random(seed)
    text = [rng.randrange(3, VOCABULARY) for _ in range(CONTEXT)]
    out: list[Case] = [([5, 7, 11], MANY)]
    for i in range(count):
        length = rng.choice(LENGTHS)
        shared = rng.choice([0, length // 2, length - 1, length])
        prompt = text[:shared] + [rng.randrange(3, VOCABULARY) for _ in range(length - shared)]
        out.append((prompt, replace(ASKS[i % len(ASKS)], logprobs=rng.choice([0, 3]), ignore_eos=rng.random() < 0.5)))
    return out


def configuration(rng: random.Random, directory: Path) -> dict[str, Any]:
    """An engine of any shape that can hold each request alone, and in which those draft that say nothing of it."""
    size = rng.choice([8, 16, 32, 64, 128, 256])
    one = -(-CONTEXT // size) + 1
    return {
        "block_size": size,
        "num_blocks": rng.choice([one + 80, 2 * one + 80, 8 * one]),
        "max_num_batched_tokens": rng.choice([17, 64, 65, 300, 512, 513, 900]),
        "max_num_seqs": rng.choice([5, READ_ROWS + 6, 256]),
        "num_threads": rng.choice([1, 2]),
        "enable_prefix_caching": rng.random() < 0.7,
        "async_scheduling": rng.random() < 0.5,
        "target_step_time": rng.choice([None, 1e-5, 0.02, 0.2]),
        "speculative_config": rng.choice(
            [
                None,
                {"method": "ngram", "num_speculative_tokens": 9, "num_candidates": 3},
                {"method": "suffix", "suffix_decoding_max_spec_factor": 2.5},
                {"method": "lookahead", "window_size": 6, "ngram_size": 4, "num_guesses": 6},
                {"model": str(directory), "load_format": "dummy", "max_model_len": rng.choice([64, CONTEXT])},
                {"model": str(directory), "load_format": "dummy", "dtype": "bfloat16", "quantization": "int8"},
            ]
        ),
    }


TIGHT = {"block_size": 8, "num_blocks": CONTEXT // 8 + 81, "max_num_seqs": 256}
"""Where a crowd does not fit, whatever else is drawn."""


def load(directory: Path, numbers: str, **arguments: Any) -> LLM:
    config, own = NUMBERS[numbers]
    (directory / "config.json").write_text(json.dumps(config))
    return LLM(str(directory), load_format="dummy", skip_tokenizer_init=True, max_model_len=CONTEXT, **own, **arguments)


def facts(output: RequestOutput) -> Any:
    """All that a request returns, without the times it took."""
    return output.prompt_logprobs, output.outputs


@lru_cache(maxsize=32)
def alone(directory: Path, numbers: str, isa: str | None, seed: int, count: int) -> list[Any]:
    """Each by itself, in an engine with room for everything."""
    llm = load(directory, numbers, num_blocks=600)
    found = []
    for prompt, params in cases(seed, count):
        found.append(facts(llm.generate([prompt], params, use_tqdm=False)[0]))
        assert llm.reset_prefix_cache()
    llm.close()
    return found


def crowd(llm: LLM, work: list[Case], rng: random.Random) -> list[RequestOutput]:
    """All of them at once, in any order, beside those who fail and those who leave in the middle."""
    order = rng.sample(range(len(work)), len(work))
    prompts, params = [work[i][0] for i in order], [work[i][1] for i in order]
    hostile = rng.sample(prompts, 3)
    leaving = [llm.stream(prompt, SamplingParams(seed=i, max_tokens=50)) for i, prompt in enumerate(hostile)]
    for stream in leaving[:2]:
        next(stream)
    for i, prompt in enumerate(hostile):
        at = rng.randrange(len(prompts))
        prompts.insert(at, prompt)
        params.insert(at, FaultyParams(seed=i, n=2, max_tokens=20, after=i))
        order.insert(at, -1)
    outputs = llm.generate(
        prompts, params, use_tqdm=False, priority=[rng.randrange(3) for _ in prompts], on_error="return"
    )
    for stream in leaving:
        stream.close()
    for i, output in zip(order, outputs, strict=True):
        assert (output.error is not None) == (i < 0) or (i < 0 and output.outputs)
    by_case = {i: output for i, output in zip(order, outputs, strict=True) if i >= 0}
    return [by_case[i] for i in range(len(work))]


def compare(
    directory: Path,
    numbers: str,
    isa: str | None,
    seed: int,
    count: int,
    configurations: int,
    executors: tuple[str, ...] = ("inline",),
    last: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Returns how many preemptions there were. `last`: what the last configuration has in any case."""
    work, want = cases(seed, count), alone(directory, numbers, isa, seed, count)
    rng = random.Random(f"{numbers}/{isa}/{seed}")
    num_preemptions = 0
    for left in reversed(range(configurations)):
        executor = rng.choice(executors) if len(executors) > 1 else executors[0]
        arguments = configuration(rng, directory) | {"executor": executor} | (last if left == 0 else {})
        llm = load(directory, numbers, **arguments)
        for again in range(2):
            for i, output in enumerate(crowd(llm, work, rng)):
                length, params = len(work[i][0]), work[i][1]
                name = f"{arguments}, again={again}: {length} tokens, {type(params).__name__}"
                assert facts(output) == want[i], f"{name} is not what it is alone"
                assert output.metrics is not None
                num_preemptions += output.metrics.num_preemptions
            llm.engine.scheduler.check()
            assert not llm.engine.scheduler.requests
        llm.close()
    return num_preemptions


def libraries(monkeypatch: pytest.MonkeyPatch, isa: str) -> str | None:
    """Choose an instruction set; "own": what this machine chooses by itself."""
    if isa == "own":
        return None
    if isa not in loadable_isas():
        pytest.skip(f"this machine does not load {isa}")
    monkeypatch.setenv("PAGEDEC_ISA", isa)
    return isa


@pytest.mark.sampled(4)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_configurations_give_the_same_bits(numbers: str, tmp_path: Path) -> None:
    compare(tmp_path, numbers, None, seed=1, count=27, configurations=2)


@pytest.mark.parametrize("isa", ["avx2", "avx512", *EMULATED_UNITS])
@pytest.mark.parametrize("numbers", ["bfloat16", "int8"])
def test_other_instruction_sets(isa: str, numbers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa == available_isas()[-1]:
        pytest.skip(f"{isa} is what this machine chooses by itself: test_configurations_give_the_same_bits has run it")
    compare(tmp_path, numbers, libraries(monkeypatch, isa), seed=2, count=27, configurations=2)


def test_a_worker_process_gives_the_same_bits(tmp_path: Path) -> None:
    """What is compared with was made in this process."""
    compare(tmp_path, "bfloat16", None, seed=3, count=18, configurations=2, executors=("process",))


def test_branches_of_sessions_at_every_boundary(tmp_path: Path) -> None:
    """A branch's call says what its prompt says alone, while that of a fork fails and another's is left in the middle;
    so does a fork that goes on in another way where it was taken back across a boundary."""
    one = load(tmp_path, "bfloat16", num_blocks=600)
    many = load(tmp_path, "bfloat16", block_size=16, num_blocks=170, max_num_batched_tokens=65)
    asks = [replace(ask, logprobs=2, ignore_eos=True) for ask in ASKS if ask.prompt_logprobs is None]
    greedy, rng = replace(asks[0], max_tokens=3), random.Random(5)

    def alone(prompt: list[int], params: Any) -> Any:
        return facts(one.generate([prompt], params, use_tqdm=False)[0])

    for i, length in enumerate(LENGTHS):
        prompt, params = [rng.randrange(3, VOCABULARY) for _ in range(length)], asks[i % len(asks)]
        session = many.session(prompt)
        prompt = prompt + session.generate(greedy).outputs[0].token_ids  # forks share what that has evaluated
        failing, leaving = session.fork(2)
        stream = leaving.stream(SamplingParams(seed=i, max_tokens=50, ignore_eos=True))
        next(stream)
        faulty = FaultyParams(seed=i, n=2, max_tokens=20, after=i % 4)
        with pytest.raises(RequestsFailed, match="hostile") as caught:
            session.generate_all([session, failing], [params, faulty], keep="none")
        assert facts(caught.value.outputs[0]) == alone(prompt, params), (length, type(params).__name__)
        for back in (1, 16, 65):
            if back < failing.num_tokens:
                failing.rollback(back)
                failing.append([3 + i, 4 + back])  # where others stood
                prompt = [*prompt[:-back], 3 + i, 4 + back]
                assert facts(failing.generate(greedy, keep="none")) == alone(prompt, greedy), (length, back)
        stream.close()
        session.close()
        many.engine.scheduler.check()
    assert many.reset_prefix_cache() and many.engine.scheduler.pools["target"].num_available == 170
    one.close()
    many.close()


@pytest.mark.long
@pytest.mark.parametrize("isa", ["own", "scalar", "avx2", "avx512", "avx512bf16", "amx", *EMULATED_ISAS])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_many_configurations(isa: str, numbers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = libraries(monkeypatch, isa)
    slow = isa in ("scalar", *EMULATED_ISAS)
    num_preemptions = 0
    for seed in range(10, 12 if slow else 16):
        num_preemptions += compare(
            tmp_path, numbers, chosen, seed, 18 if slow else 36, 2 if slow else 5, ("inline", "process"), TIGHT
        )
    assert num_preemptions > 0
