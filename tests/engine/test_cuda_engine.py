"""An engine on CUDA's kernels, on the emulated device or a real one: the processor's tokens, and bits that are a row's
own."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagedec import LLM, BeamSearchParams, SamplingParams, TokenTrie
from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument
from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import CUDA, EMULATED_DEVICE, KernelError, load
from pagedec.models.buffers import READ_ROWS
from pagedec.runtime import loading
from pagedec.runtime.links import machine
from tests.engine.crowd import SMALL, Tiny, Tokens, assert_whole, right_answers
from tests.engine.test_offload import tier
from tests.engine.test_rolls import asked, compare
from tests.engine.test_speculation import drafted_by
from tests.kernels import cuda_library
from tests.models.checkpoints import GRANITE, make_checkpoint, variant
from tests.models.draft_heads import Head

PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(params=cuda_library.cases())
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> Tiny:
    """Makes engines on it."""
    isa = request.param
    if isa == CUDA and not cuda_library.has_device():
        pytest.skip("no CUDA device")

    def make(**arguments: Any) -> LLM:
        with monkeypatch.context() as patch:
            patch.setenv("PAGEDEC_ISA", isa)
            llm = tiny(**arguments)
        assert llm.engine.executor.geometry.isa == isa
        return llm

    return make


def test_a_crowd_that_is_preempted(device: Tiny, expected: list[Tokens]) -> None:
    """Greedy, sampled, repeated and beams, in ten blocks: the tokens of the processor's kernels."""
    llm = device(**SMALL)
    assert right_answers(llm) == expected
    assert_whole(llm, expected)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 131) for _ in range(40)]
    return [
        [*shared[:n], *(rng.randrange(3, 131) for _ in range(own))] for n, own in ((40, 3), (33, 1), (0, 70), (40, 9))
    ]


PARAMS = [
    SamplingParams(temperature=0, max_tokens=7, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(seed=3, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.2, max_tokens=7, ignore_eos=True),
    SamplingParams(seed=4, n=2, presence_penalty=0.5, logit_bias={5: 3.0}, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, frequency_penalty=0.3, bad_words=None, max_tokens=7, logprobs=1, ignore_eos=True),
]


def told(llm: LLM, which: list[int]) -> list[Any]:
    own = prompts()
    outputs = llm.generate([own[i] for i in which], [PARAMS[i] for i in which], use_tqdm=False)
    return [[(a.token_ids, a.logprobs) for a in output.outputs] + [output.prompt_logprobs] for output in outputs]


def test_a_row_has_its_bits_whatever_stands_beside_it(device: Tiny) -> None:
    """In bf16: alone, together, in parts of the prompt, in blocks of another size, preempted."""
    want = [told(device(dtype="bfloat16"), [i])[0] for i in range(4)]
    assert told(device(dtype="bfloat16"), [0, 1, 2, 3]) == want
    parts = {"max_num_batched_tokens": 17, "enable_prefix_caching": False}
    assert told(device(dtype="bfloat16", **parts), [3, 1]) == [want[3], want[1]]
    assert told(device(dtype="bfloat16", block_size=32, num_blocks=12), [0, 2, 3]) == [want[0], *want[2:]]


@pytest.mark.long
def test_float16(device: Tiny, tiny: Tiny) -> None:
    """A row's own bits, alone, together, in parts of a prompt, preempted; and nearer to float32 than bfloat16 is."""
    want = told(device(dtype="float16"), [0, 1, 3])
    assert told(device(dtype=torch.half), [3]) == want[2:]
    small = {"max_num_batched_tokens": 17, "block_size": 8, "num_blocks": 16, "enable_prefix_caching": False}
    assert told(device(dtype="half", **small), [3, 0]) == [want[2], want[0]]
    tokens = prompts()[0][1:]
    exact, half, rough = (
        [known[token].logprob for token, known in zip(tokens, answer[-1][1:], strict=True)]
        for answer in (told(tiny(), [0])[0], want[0], told(device(dtype="bfloat16"), [0])[0])
    )
    wrong = [max(abs(a - b) for a, b in zip(exact, other, strict=True)) for other in (half, rough)]
    assert 0 < wrong[0] < 0.5 * wrong[1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "table",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False},
        {"method": "lookahead", "window_size": 4, "ngram_size": 3, "num_guesses": 4, "adaptive": False},
    ],
    ids=lambda table: table["method"],
)
def test_drafts_change_no_token(device: Tiny, table: dict[str, Any]) -> None:
    """Trees of drafts, in bf16."""
    repeated = [[*range(10, 30)] * 3, [7, 8, 9] * 12]
    want = device(dtype="bfloat16").generate(repeated, PLAIN, use_tqdm=False)
    got = device(dtype="bfloat16", speculative_config=table).generate(repeated, PLAIN, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]


def test_beams_and_sessions(device: Tiny, tiny: Tiny) -> None:
    """As on the processor's kernels, in fp32."""
    found = []
    for llm in (tiny(), device()):
        beams = llm.beam_search([[5, 9, 33, 70]], BeamSearchParams(beam_width=4, max_tokens=8))
        with llm.session([5, 9, 33, 70, 12]) as session:
            first = session.generate(PLAIN)
            fork = session.fork()
            session.rollback(4)
            scores = fork.score([[3, 4], [5]])
            again = session.generate(PLAIN)
        tokens = [sequence.tokens for sequence in beams[0].sequences]
        tokens += [output.outputs[0].token_ids for output in (first, again)]
        found.append((tokens, [score.logprob for score in scores]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num", [5, pytest.param(READ_ROWS + 9, marks=pytest.mark.long)])
def test_chains_of_drafts(device: Tiny, tiny_path: Path, monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """Of a draft model, in one call: the tokens, the KV and the kept logits of a call for each token. More of them than
    are read out at once, too, with rules, verified by coupling and by rejection."""
    rows = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    llm = device(num_blocks=5 * num, speculative_config=drafted_by(tiny_path), **rows)
    seen = compare(llm, monkeypatch)
    prompts = [[5 + i % 100, 9, i % 131] for i in range(num)]
    llm.generate(prompts, [replace(asked(i), max_tokens=3 + i % 4) for i in range(num)], use_tqdm=False)
    assert max(seen) == num and llm.engine.stats.num_failed_steps == 0


def test_chains_of_a_head(device: Tiny, tiny_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same of a head that reads the target's stream, over blocks that go to the host and come back."""
    monkeypatch.setenv("PAGEDEC_DEBUG", "1")
    head = Head(AutoConfig.from_pretrained(tiny_path), (1, 0, 1), torch.arange(0, 131, 2)).write(tmp_path)
    table = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, "adaptive": False}
    llm = device(num_blocks=16, max_num_batched_tokens=40, kv_offload_memory="1MiB", speculative_config=table)
    seen, params = compare(llm, monkeypatch), []
    for i in range(6):
        way = {"method": "eagle3", "num_speculative_tokens": 1 + i % 4, "verify": ("coupling", "rejection")[i % 2]}
        way |= {"num_candidates": 1 + i % 3}
        rules = {"repetition_penalty": 1.3} if i % 3 == 0 else {}
        params.append(SamplingParams(temperature=i % 2, seed=i, max_tokens=9, speculative=way, **rules))
    given = [*prompts(), [7], [7, 8]]
    got = [out.outputs[0].token_ids for out in llm.generate(given, params, use_tqdm=False)]
    plain = [replace(own, speculative=False) for own in params]
    want = [out.outputs[0].token_ids for out in llm.generate(given, plain, use_tqdm=False)]
    assert got[::2] == want[::2] and max(seen) > 1 and llm.engine.stats.num_failed_steps == 0


def test_what_drafts_were_drawn_from_is_there(device: Tiny, tiny: Tiny, tiny_path: Path) -> None:
    """When the target's kernels look at it: of chains of one token, behind which the host waits for nothing more of the
    draft's."""
    way = {"method": "draft_model", "num_speculative_tokens": 1, "verify": "rejection"}
    params = [SamplingParams(seed=i, max_tokens=12, ignore_eos=True, speculative=way) for i in range(5)]
    said = []
    for make in (tiny, device):
        llm = make(speculative_config=drafted_by(tiny_path))
        outputs = llm.generate([[5 + i, 9, 40] for i in range(5)], params, use_tqdm=False)
        said.append([output.outputs[0].token_ids for output in outputs])
        assert llm.engine.stats.drafts["draft_model"].num_accepted > 10
    assert said[0] == said[1]


@pytest.mark.long
def test_masks_and_a_prompt_that_is_read_in_pieces(device: Tiny, tiny: Tiny) -> None:
    """As on the processor's kernels, in fp32: sampling, beams and drafts among token sequences that are allowed, and
    the log-probabilities of more prompt tokens than logits are held at once."""
    rng = random.Random(8)
    trie = TokenTrie([[rng.randrange(3, 131) for _ in range(6)] for _ in range(50)])
    long = [rng.randrange(3, 131) for _ in range(READ_ROWS + 100)]
    params: list[Any] = [
        SamplingParams(seed=1, max_tokens=6, token_trie=trie, logprobs=2),
        BeamSearchParams(beam_width=3, max_tokens=6, token_trie=trie),
        SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, min_tokens=20, repetition_penalty=1.3),
    ]
    found = []
    for llm in (tiny(num_blocks=100), device(num_blocks=100)):
        outputs = llm.generate([[5, 9], [5, 9], long, [8, 8, 8]], params, use_tqdm=False)
        tokens = [[answer.token_ids for answer in output.outputs] for output in outputs]
        logprobs = [entry[token].logprob for entry, token in zip(outputs[2].prompt_logprobs[1:], long[1:], strict=True)]
        found.append((tokens, logprobs))
    assert found[0][0] == found[1][0] and len(found[0][1]) == len(long) - 1
    assert found[0][1] == pytest.approx(found[1][1], abs=2e-3)


FAMILIES = {
    "olmo2": variant("olmo2", "olmo2", length=8, hidden_size=48, num_attention_heads=3, num_key_value_heads=1,
                     head_dim=16),
    "granite": variant("granite", "granite", length=8, **GRANITE),
    "gpt2": variant("gpt2", "gpt2", length=8, n_embd=48, n_head=3, n_layer=2),
    "gemma3": variant("gemma3", "gemma3", length=8, sliding_window=8, num_hidden_layers=3, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"], final_logit_softcapping=20.0),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("isa", cuda_library.cases())
def test_other_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, family: str) -> None:
    """Layer norms, positions that are learned, windows, soft caps, norms behind blocks: the processor's tokens."""
    make_checkpoint(FAMILIES[family], tmp_path)
    said = []
    for chosen in (None, isa):
        with monkeypatch.context() as patch:
            if chosen is not None:
                patch.setenv("PAGEDEC_ISA", chosen)
            llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, num_blocks=40)
        outputs = llm.generate(prompts()[:2], PLAIN, use_tqdm=False)
        said.append([output.outputs[0].token_ids for output in outputs])
        llm.close()
    assert said[0] == said[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_weights(device: Tiny, tiny: Tiny, dtype: str) -> None:
    """The processor's tokens where layers between are in fp32 too; in bf16 a row's own, whatever stands beside it."""
    if dtype == "float32":
        assert right_answers(device(quantization="int8", **SMALL)) == right_answers(tiny(quantization="int8"))
        return
    whole = told(device(dtype=dtype, quantization="int8"), [0, 1, 2, 3])
    assert told(device(dtype=dtype, quantization="int8"), [3]) == whole[3:]
    assert told(device(dtype=dtype), [3]) != whole[3:]


@pytest.mark.long
def test_kv_in_bytes(device: Tiny, tiny: Tiny) -> None:
    """In int8, in bf16: a row's own bits together, in parts of a prompt, preempted, in blocks of another size, with
    blocks that the host has kept in the meantime; in fp8, in fp16, alone. In fp32 the processor's tokens."""
    numbers = {"dtype": "bfloat16", "kv_cache_dtype": "int8"}
    want = told(device(**numbers), [0, 1, 2, 3])
    small = device(**numbers, block_size=8, max_num_batched_tokens=17, num_blocks=20, kv_offload_memory="2MiB")
    for _ in range(2):
        assert told(small, [3, 2, 1, 0]) == want[::-1]
    assert tier(small).num_loaded > 0
    cache = small.engine.executor.worker.lanes["target"].cache  # type: ignore[attr-defined]
    assert cache.k.dtype == torch.int8
    assert cache.k.nbytes + cache.v.nbytes + cache.tokens.nbytes == small.kv_cache.num_bytes
    numbers = {"dtype": "float16", "kv_cache_dtype": "fp8"}
    both = told(device(**numbers), [0, 1])
    assert told(device(**numbers, max_num_batched_tokens=17, block_size=32), [1]) == both[1:]
    numbers = {"dtype": "float32", "kv_cache_dtype": "fp8"}
    assert right_answers(device(**numbers, **SMALL)) == right_answers(tiny(**numbers))


def test_ranks_in_memory_that_devices_have_mapped(device: Tiny, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes share the model: their parts lie in the host's memory."""
    monkeypatch.setenv("PAGEDEC_LINK", "memory")
    params = [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=5),
    ]
    said = []
    for llm in (tiny(), device(tensor_parallel_size=2)):
        outputs = llm.generate(prompts()[:2], params, use_tqdm=False)
        said.append([[answer.token_ids for answer in output.outputs] for output in outputs])
        assert llm.engine.stats.num_failed_steps == 0  # after which ranks begin anew, on whatever is chosen now
    assert said[0] == said[1]


@pytest.mark.parametrize("isa", cuda_library.cases())
def test_the_checkpoints_float16(isa: str, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what auto means on a device, and a CPU refuses it; bfloat16 and float32 are bfloat16."""
    if isa == CUDA and not cuda_library.has_device():
        pytest.skip("no CUDA device")
    model = AutoModelForCausalLM.from_pretrained(tiny_path)
    for dtype, taken in ((torch.float16, "float16"), (torch.float32, "bfloat16")):
        model.to(dtype).save_pretrained(tmp_path / taken)
        config = EngineConfig.from_kwargs(model=str(tmp_path / taken), skip_tokenizer_init=True, num_blocks=40)
        half = replace(config, model=replace(config.model, dtype="float16"))
        with monkeypatch.context() as patch:
            patch.setenv("PAGEDEC_ISA", isa)
            assert str(loading.own_backend(config).dtype) == f"torch.{taken}"
            assert loading.own_backend(half).dtype == torch.float16
        assert loading.own_backend(config).dtype == torch.bfloat16
        with pytest.raises(InvalidArgument, match="^dtype is 'float16': must be bfloat16, float32 or auto on a CPU$"):
            loading.own_backend(half)


def test_each_rank_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of its memory; the third of a machine with two shares the first one's. The host's threads are nobody's
    here: a device has its own."""
    monkeypatch.setenv("PAGEDEC_ISA", EMULATED_DEVICE)
    config = EngineConfig.from_kwargs(num_threads=1, memory_utilization=0.6)
    for world, shares in ((2, [0.6, 0.6]), (3, [0.3, 0.3, 0.3])):
        exchange = [{"machine": machine()}] * world
        found = [
            loading._share_of(config, loading.Ranks(rank, world, lambda _, e=exchange: e)) for rank in range(world)
        ]
        assert [own.cache.memory_utilization for own, _ in found] == shares
        backends = [loading.choose_backend(own.parallel, "float32", None, place) for own, place in found]
        assert [backend.device for backend in backends] == [0, 1, 0][:world]
        assert all(backend.context.num_threads == 3 for backend in backends)
    config = EngineConfig.from_kwargs(num_threads=1)  # where nothing is said, one would take all
    for world, share in ((2, None), (3, 0.5)):
        exchange = [{"machine": machine()}] * world
        own, _ = loading._share_of(config, loading.Ranks(1, world, lambda _, e=exchange: e))
        assert own.cache.memory_utilization == share
    with pytest.raises(KernelError, match="device is 2; it must be 0 to 1"):
        load(EMULATED_DEVICE).context(0, 2)


def test_generations_of_devices_have_bits_of_their_own(device: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor cores of an H100 round otherwise than an A100's: what was begun on one does not go on, bit for bit, on the
    other."""
    digests = {device().engine.executor.geometry.numerics for _ in range(2)}
    assert len(digests) == 1
    monkeypatch.setattr(DeviceBackend, "generation", "8.0")
    digests.add(device().engine.executor.geometry.numerics)
    assert len(digests) == 2


def test_what_there_is_not(device: Tiny, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="model is .*: must have a family of our own on a CUDA device"):
        device(model_impl="transformers")
    monkeypatch.setenv("PAGEDEC_LINK", "sockets")
    with pytest.raises(InvalidArgument, match="tensor_parallel_size is 2: must be 1 on CUDA devices whose machines"):
        device(tensor_parallel_size=2)
