"""Requests through low-rank adapters, several in one batch: transformers' tokens with the updates in its weights, and
bits that nobody beside them changes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedec import LLM, SamplingParams
from pagedec.core.adapter_places import Adapter
from pagedec.errors import InvalidArgument, ModelFileError, RequestError
from pagedec.models.adapters import check_adapter, read_adapter
from pagedec.models.families.gemma3 import TEXT_IN_IMAGE_MODEL
from pagedec.runtime.memory import Memory
from tests.engine.deaths import executor_of
from tests.engine.lora_cases import PLAIN, adapter, answered, arch_of, ask, merged, prompts, read, tokens_of
from tests.formats.lora_files import write_lora
from tests.kernels import cuda_library
from tests.models.checkpoints import GEMMA3_ROPE, GRANITE, Variant, make_checkpoint, variant

NUMBERS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
MODELS = (
    variant("llama", num_hidden_layers=3),
    variant("biases-odd", attention_bias=True, mlp_bias=True, hidden_size=44, intermediate_size=70),
    variant("odd-width", intermediate_size=37, hidden_size=50),
    variant("qwen3", "qwen3"),
    variant("gemma2", "gemma2"),
    variant("gemma3", "gemma3", rope_parameters=GEMMA3_ROPE, sliding_window=16,
            layer_types=["sliding_attention", "full_attention"]),
    variant("phi3", "phi3"),
    variant("granite", "granite", **GRANITE),
    variant("olmo2", "olmo2"),
    variant("qwen3-moe", "qwen3_moe"),
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A checkpoint, its adapters, and the tokens that belong to each; 0: to none."""

    path: Path
    adapters: list[str]
    want: list[list[list[int]]]

    def choices(self, llm: LLM) -> list[Adapter | None]:
        """None, and the adapters, read for an engine."""
        return [None, *(read(llm, path) for path in self.adapters)]

    def all_answers(self, llm: LLM) -> list[list[list[int]]]:
        """Of all prompts through all adapters, in one batch."""
        given, choices = prompts(), self.choices(llm)
        found = answered(llm.engine, [(own, prompt, PLAIN) for prompt in given for own in choices])
        return [found[i :: len(choices)] for i in range(len(choices))]


def made(chosen: Variant, path: Path) -> Model:
    make_checkpoint(chosen, path / "model")
    with LLM(str(path / "model"), **NUMBERS) as llm:
        arch = arch_of(llm)
    own = [adapter(path, arch, number) for number in range(3)]
    models = [merged(path / "model", {}), *(merged(path / "model", pairs) for _, pairs in own)]
    return Model(path / "model", [place for place, _ in own], [tokens_of(model, prompts()) for model in models])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return made(MODELS[0], tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engines(llama: Model) -> Iterator[Callable[..., LLM]]:
    """Makes engines over it."""
    opened: list[LLM] = []

    def make(**arguments: Any) -> LLM:
        opened.append(LLM(str(llama.path), **{**NUMBERS, **LORA, **arguments}))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chosen", MODELS, ids=lambda chosen: chosen.name)
def test_the_tokens_of_merged_weights(chosen: Variant, tmp_path: Path) -> None:
    """Three adapters and none in one batch, with places for two."""
    model = made(chosen, tmp_path)
    with LLM(str(model.path), **NUMBERS, **LORA) as llm:
        assert model.all_answers(llm) == model.want
        assert len({str(tokens) for tokens in model.want}) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_loras": 1, "num_blocks": 12},
        {"max_loras": 3, "max_num_batched_tokens": 24, "block_size": 8},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 7},
        {"async_scheduling": True, "num_blocks": 12},
        {"attention_backend": "reference"},
        {"executor": "process", "max_loras": 1},
        {"executor": "process", "tensor_parallel_size": 2},
        {"kv_offload_memory": "1MiB", "num_blocks": 10},
    ],
    ids=lambda arguments: "-".join(map(str, arguments.values())),
)
def test_wherever_and_however_it_runs(llama: Model, engines: Callable[..., LLM], arguments: dict[str, Any]) -> None:
    assert llama.all_answers(engines(**arguments)) == llama.want


@pytest.mark.parametrize("isa", cuda_library.cases())
def test_on_a_device(llama: Model, engines: Callable[..., LLM], isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are recorded and planned ahead."""
    if isa == cuda_library.CUDA and not cuda_library.has_device():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("PAGEDEC_ISA", isa)
    assert llama.all_answers(engines(max_loras=1)) == llama.want


@pytest.mark.parametrize("quantization", [None, "int8", "int8_weight_only", "int4"])
def test_company_changes_no_bit(llama: Model, engines: Callable[..., LLM], quantization: str | None) -> None:
    """Of bf16 and small weights: log-probabilities alone, and beside other adapters; without one they are those of an
    engine that takes none."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    numbers: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}

    def told(llm: LLM, which: list[int], through: list[Adapter | None]) -> list[Any]:
        given = prompts((70, 33, 130))
        events = ask(llm.engine, [(own, given[i], params) for i, own in zip(which, through, strict=True)])
        return [(event.answers[0].token_ids, event.answers[0].logprobs) for event in events]

    crowd = engines(**numbers)
    none, first, second, third = llama.choices(crowd)
    together = told(crowd, [0, 1, 2, 0, 1, 2], [none, first, second, third, none, first])
    without = engines(**numbers, enable_lora=False)
    assert told(without, [0], [None]) == [together[0]] and told(without, [1], [None]) == [together[4]]
    alone = engines(**numbers, max_loras=1, block_size=8)
    _, first, second, third = llama.choices(alone)
    for place, prompt, own in ((1, 1, first), (2, 2, second), (3, 0, third), (5, 2, first)):
        assert told(alone, [prompt], [own]) == [together[place]]
    assert len({str(logprobs) for _, logprobs in together}) == 6


def test_the_prefix_cache_knows_whose_blocks_they_are(llama: Model, engines: Callable[..., LLM]) -> None:
    llm, given = engines(), prompts()[2]
    _, first, second, _ = llama.choices(llm)
    cached = []
    for own in (first, second, None, first, second, None):
        [event] = ask(llm.engine, [(own, given, PLAIN)])
        cached.append(event.metrics.num_cached_tokens)
    assert cached == [0, 0, 0, 64, 64, 64]


def test_an_adapter_of_some_layers_alone(llama: Model, engines: Callable[..., LLM], tmp_path: Path) -> None:
    llm = engines()
    place, pairs = adapter(tmp_path, arch_of(llm), 7, modules=["v_proj", "down_proj"])
    own = read(llm, place)
    want = tokens_of(merged(llama.path, pairs), prompts())
    assert answered(llm.engine, [(own, prompt, PLAIN) for prompt in prompts()]) == want


def test_a_worker_that_died_is_given_its_adapters_again(llama: Model, engines: Callable[..., LLM]) -> None:
    llm = engines(executor="process")
    assert llama.all_answers(llm) == llama.want
    os.kill(executor_of(llm).pid, signal.SIGKILL)
    assert llama.all_answers(llm) == llama.want


def test_weights_that_are_no_numbers_are_their_own_requests_fault(
    llama: Model, engines: Callable[..., LLM], tmp_path: Path
) -> None:
    """Beside it others have their bits, and the adapter that comes into its place afterwards, too."""
    llm = engines()
    _, pairs = adapter(tmp_path, arch_of(llm), 8)
    broken = {name: (a * torch.nan, b) for name, (a, b) in pairs.items()}
    bad = read(llm, str(write_lora(tmp_path / "bad", broken)))
    _, first, second, _ = llama.choices(llm)
    given = prompts()[1]
    asked = [(first, given, PLAIN), (bad, given, PLAIN), (None, given, PLAIN), (second, given, PLAIN)]
    events = ask(llm.engine, asked)
    got = [list(event.answers[0].token_ids) for event in events if not isinstance(event, Exception)]
    assert got[0] == llama.want[1][1] and got[-1] == llama.want[2][1] and got[-2] == llama.want[0][1]


@pytest.mark.parametrize("changes", [True, False])
def test_a_file_that_has_changed_fails_who_needs_it(
    llama: Model, engines: Callable[..., LLM], tmp_path: Path, changes: bool
) -> None:
    llm, given = engines(max_loras=1), prompts()[1]
    place, _ = adapter(tmp_path, arch_of(llm), 9)
    changing = read(llm, place)
    _, first, *_ = llama.choices(llm)
    weights = Path(place) / "adapter_model.safetensors"
    weights.unlink()
    if changes:
        other = adapter(tmp_path / "other", arch_of(llm), 10, modules=["q_proj"])[0]
        weights.write_bytes((Path(other) / "adapter_model.safetensors").read_bytes())
        (Path(place) / "adapter_config.json").write_bytes((Path(other) / "adapter_config.json").read_bytes())
    asked = [(changing, given, PLAIN), (first, given, PLAIN), (changing, given, PLAIN), (None, given, PLAIN)]
    events = ask(llm.engine, asked)
    problem = "it was when it was added" if changes else "has no adapter_model.safetensors"
    for failed in (events[0], events[2]):
        assert isinstance(failed, RequestError) and isinstance(failed.__cause__, ModelFileError)
        assert problem in str(failed) and "remove the adapter and add it again" in str(failed)
    assert list(events[1].answers[0].token_ids) == llama.want[1][1]
    assert list(events[3].answers[0].token_ids) == llama.want[0][1]
    assert llm.engine.stats.num_failed_steps == 0
    [event] = ask(llm.engine, [(first, given, PLAIN)])
    assert list(event.answers[0].token_ids) == llama.want[1][1]


def test_files_that_only_look_changed_are_read_again(llama: Model, engines: Callable[..., LLM], tmp_path: Path) -> None:
    llm, given = engines(max_loras=1), prompts()[0]
    place, pairs = adapter(tmp_path, arch_of(llm), 9)
    touched = read(llm, place)
    want = tokens_of(merged(llama.path, pairs), [given])
    for name in os.listdir(place):
        os.utime(Path(place) / name, ns=(1, 1))
    assert answered(llm.engine, [(touched, given, PLAIN)]) == want and llm.engine.stats.num_failed_steps == 0


def test_files_are_known_while_somebody_goes_through_them(llama: Model, engines: Callable[..., LLM]) -> None:
    llm = engines()
    engine, given = llm.engine, prompts()[0]
    _, first, *_ = llama.choices(llm)
    assert first is not None and engine.adapters.files == {}
    waiting = engine.admit("late", given, PLAIN, adapter=first)
    engine.add(engine.admit("runs", given, PLAIN, adapter=first))
    assert engine.adapters.files == {first.number: first.file}
    engine.add(waiting)
    found: dict[str, Any] = {}
    while len(found) < 2:
        found |= {event.request.id: event for event in engine.step() if hasattr(event, "answers")}
    assert {name: list(event.answers[0].token_ids) for name, event in found.items()} == dict.fromkeys(
        ("runs", "late"), llama.want[1][0]
    )
    assert engine.adapters.files == {} and answered(engine, [(first, given, PLAIN)]) == [llama.want[1][0]]
    assert engine.adapters.files == {}


def test_what_does_not_fit_is_refused(llama: Model, engines: Callable[..., LLM], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="enable_lora"):
        read(engines(enable_lora=False), llama.adapters[0])
    llm = engines(max_lora_rank=8)
    read(llm, llama.adapters[0])
    with pytest.raises(
        InvalidArgument, match=r"max_lora_rank is 8: must be at least 16, the rank of the adapter at .*"
    ):
        read(llm, llama.adapters[1])
    with pytest.raises(ModelFileError, match="does not exist"):
        read(llm, str(tmp_path / "nowhere"))
    wrong = {
        "lm_head": "is of no layer; the model has layers 0 to 2",
        "model.layers.3.self_attn.q_proj": "is of no layer",
        "model.layers.00.self_attn.q_proj": "is of no layer",
        "model.layers.01.self_attn.q_proj": "is of no layer",
        "model.layers.\u0661.self_attn.q_proj": "is of no layer",
        "model.layers.9999999999.self_attn.q_proj": "is of no layer",
        "model.layers.0.self_attn.rotary": "cannot be changed; in layer 0 these can: self_attn.q_proj, ",
        "model.layers.0.mlp.up_proj": r"is of shape \[20, 10\], the model's of \[96, 64\]",
    }
    for i, (name, problem) in enumerate(wrong.items()):
        pair = (torch.zeros(4, 10), torch.zeros(20, 4))
        place = write_lora(tmp_path / str(i), {name: pair})
        with pytest.raises(ModelFileError, match=f"the adapter does not fit the model: {name}.*{problem}"):
            read(llm, str(place))


def test_two_names_of_one_module_are_refused(engines: Callable[..., LLM], tmp_path: Path) -> None:
    """Where files of a family call it differently."""
    names = [f"{beginning}.layers.2.mlp.down_proj" for beginning in ("model.language_model", "language_model.model")]
    arch = replace(arch_of(engines()), renamed=TEXT_IN_IMAGE_MODEL)
    pair = (torch.zeros(4, 96), torch.zeros(64, 4))
    for i, name in enumerate(names):
        path = str(write_lora(tmp_path / str(i), {name: pair}))
        check_adapter(arch, read_adapter(arch, path), 4, path)
    path = str(write_lora(tmp_path / "both", {name: (pair[0].clone(), pair[1].clone()) for name in names}))
    both = "|".join(re.escape(" and ".join(order)) for order in (names, names[::-1]))
    with pytest.raises(ModelFileError, match=f"({both}) are both of mlp.down_proj in layer 2"):
        check_adapter(arch, read_adapter(arch, path), 4, path)


def test_places_that_no_memory_holds(engines: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedec.runtime.sizes.available_memory", lambda: Memory(1 << 30, "of this test"))
    with pytest.raises(InvalidArgument, match="max_loras is 1024: must be less, or max_lora_rank: places .* take 1"):
        engines(max_loras=1024, max_lora_rank=1024)


def test_models_whose_layers_take_none(tmp_path: Path) -> None:
    make_checkpoint(variant("gpt2", "gpt2"), tmp_path)
    with pytest.raises(InvalidArgument, match="enable_lora is True: must be false for gpt2, whose layers take none"):
        LLM(str(tmp_path), **NUMBERS, **LORA)
