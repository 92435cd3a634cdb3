"""Every engine argument of vLLM's is honoured, means another one, changes nothing, or is refused by name; docs/vllm.md
says which."""

from __future__ import annotations

import inspect
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import huggingface_hub
import pytest
import torch

from pagedec import LLM, AsyncLLM, DtypeWarning, SamplingParams
from pagedec.config import EngineConfig, engine_rules
from pagedec.errors import FeatureNotAvailable, InvalidArgument
from pagedec.fields import Flag, Integer, Number, Rule, Text, Texts
from pagedec.llm.compatibility import translated
from pagedec.llm.fetching import fetched
from pagedec.llm.of_vllm import ABSENT, ALIASES, NEUTRAL, ONLY, SPELLINGS, UNSET, Unread
from pagedec.llm.signature import EngineArgs
from tests.engine.vllm_tables import DOCUMENT, NAMES, documented, tables

Tiny = Callable[..., LLM]
KINDS = (engine_rules(), ALIASES, NEUTRAL, ONLY)


def good(rule: Rule) -> list[Any]:
    """Values that a rule takes."""
    if isinstance(rule, Unread):
        values = [None, 3, "x", {"a": object()}]
    elif isinstance(rule, Flag):
        values = [True, False]
    elif isinstance(rule, Integer):
        values = [rule.low, rule.high]
    elif isinstance(rule, Number):
        values = [rule.high if rule.high is not None else 4, 0.5]
    elif isinstance(rule, Text):
        values = list(rule.choices) or ["some"]
    else:
        assert isinstance(rule, Texts)
        values = ["some", ["a", "b"]]
    return [*values, None] if rule.optional else values


# ---------------------------------------------------------------------------------------------------------------- names
def test_every_argument_of_vllm_s_has_one_place() -> None:
    known = [name for kind in KINDS for name in kind]
    assert len(known) == len(set(known)), "no name is of two kinds"
    assert set(NAMES) <= set(known) and len(NAMES) == len(set(NAMES))
    assert set(known) - {"model"} == set(EngineArgs.__annotations__)
    assert set(ALIASES.values()) | set(UNSET) | set(SPELLINGS) <= set(engine_rules())


def test_types_allow_the_values() -> None:
    hints = get_type_hints(EngineArgs)
    of_rule = {Flag: bool, Integer: int, Number: float, Text: str, Texts: str}
    for name, rule in NEUTRAL.items():
        kind = of_rule.get(type(rule), Any)
        assert hints[name] is Any or kind in (hints[name], *getattr(hints[name], "__args__", ())), name
        assert not rule.optional or type(None) in getattr(hints[name], "__args__", ()), name
    for name, only in ONLY.items():
        for value in only.values:
            kinds = getattr(hints[name], "__args__", ()) or (hints[name],)
            origins = [getattr(kind, "__origin__", kind) for kind in (hints[name], *kinds)]
            assert type(value) in origins, (name, value)


@pytest.mark.parametrize("name", tables())
def test_the_document_s_tables(name: str) -> None:
    assert documented(name) == tables()[name], "python -m tests.engine.vllm_tables writes it"


def test_the_document_names_every_argument_and_method() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in (*NAMES, *engine_rules(), *ABSENT):
        assert f"`{name}" in text, name


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_the_document_names_every_method_that_exists(kind: type[LLM] | type[AsyncLLM]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, _ in inspect.getmembers(kind, inspect.isfunction):
        assert name.startswith(("_", "prepare")) or f"`{name}`" in text, name


# --------------------------------------------------------------------------------------------------------- what is done
@pytest.mark.parametrize("name", NEUTRAL)
def test_what_changes_nothing(name: str) -> None:
    rule = NEUTRAL[name]
    for value in good(rule):
        assert translated({name: value, "max_num_seqs": 3}) == {"max_num_seqs": 3}
    if not isinstance(rule, Unread):
        with pytest.raises(InvalidArgument, match=f"^{name} is .*: must be ") as caught:
            translated({name: object()})
        assert not isinstance(caught.value, FeatureNotAvailable)


@pytest.mark.parametrize("name", ONLY)
def test_what_may_ask_for_nothing(name: str) -> None:
    only = ONLY[name]
    for value in only.values:
        assert translated({name: value}) == {}
    for wrong in ("no such value", 7, [object()], not only.values[0], 1.0):
        if any(type(wrong) is type(value) and wrong == value for value in only.values):
            continue
        with pytest.raises(FeatureNotAvailable) as caught:
            translated({name: wrong})
        assert caught.value.field == name
        available = ", ".join(map(repr, only.values))
        assert caught.value.limit == f"{only.missing} not available in this version; available: {available}"


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(FeatureNotAvailable, match="^hf_token is a secret: .*hf auth login") as caught:
        LLM(hf_token="hf_very_private")
    assert "very_private" not in f"{caught.value} {caught.value.args}"


@pytest.mark.parametrize(("name", "ours"), ALIASES.items())
def test_other_names(name: str, ours: str) -> None:
    value, other = ("ray", "inline") if ours == "executor" else (1 << 20, 1 << 21)
    assert translated({name: value}) == {ours: value} == translated({name: value, ours: None})
    assert translated({name: None}) == {} and translated({name: None, ours: other}) == {ours: other}
    with pytest.raises(InvalidArgument, match=f"^{name} is {value!r}: is vLLM's name of {ours}; give one of them$"):
        translated({name: value, ours: value})
    with pytest.raises(InvalidArgument, match=f"^{name} is 'x': must be "):
        translated({name: "x"})


def test_executors_by_vllm_s_names() -> None:
    for theirs, ours in (("mp", "process"), ("uni", "inline"), ("ray", "ray")):
        assert translated({"distributed_executor_backend": theirs}) == {"executor": ours}


def test_none_is_the_default() -> None:
    assert translated(dict.fromkeys(UNSET)) == {}
    config = EngineConfig.from_kwargs(**translated(dict.fromkeys(UNSET)))
    assert config == EngineConfig()


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("auto", "auto"), ("float", "float32"), ("float32", "float32"), (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"), ("half", "bfloat16"), ("float16", "bfloat16"), (torch.float16, "bfloat16"),
    ],
)  # fmt: skip
def test_numbers(given: Any, taken: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert translated({"dtype": given}) == {"dtype": taken}
    is_half = str(given) in ("half", "float16", "torch.float16")
    assert [one.category for one in caught] == [DtypeWarning] * is_half
    if is_half:
        name = "half" if given == "half" else "float16"
        assert str(caught[0].message) == (
            f"dtype is '{name}': a CPU does not compute in float16; taken is bfloat16, which has its size and 3 bits "
            f"less of precision; dtype='float32' loses nothing of a float16 checkpoint"
        )


def test_float16_is_taken_as_it_is_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDEC_ISA", "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in ("half", "float16", torch.float16):
            assert translated({"dtype": given}) == {"dtype": "float16"}
    with pytest.warns(DtypeWarning):
        assert translated({"dtype": "half", "attention_backend": "reference"})["dtype"] == "bfloat16"


def test_the_device_is_the_one_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDEC_ISA", raising=False)
    assert translated({"device": "cpu"}) == {}
    with pytest.raises(
        FeatureNotAvailable, match="device is 'cuda': any device but the CPU, or 'cuda' where PAGEDEC_ISA"
    ):
        translated({"device": "cuda"})
    monkeypatch.setenv("PAGEDEC_ISA", "cuda")
    assert translated({"device": "cuda"}) == translated({"device": "auto"}) == {}
    with pytest.raises(
        FeatureNotAvailable, match="device is 'cpu': any device but 'cuda', which PAGEDEC_ISA names, is"
    ):
        translated({"device": "cpu"})


@pytest.mark.parametrize("given", [torch.float64, torch.int8, "float64", 16])
def test_numbers_that_there_are_not(tiny: Tiny, given: Any) -> None:
    with pytest.raises(InvalidArgument, match="^dtype is .*: must be one of auto, bfloat16, float16, float32$"):
        tiny(dtype=given)


def test_an_llm_of_vllm_s_arguments(tiny: Tiny) -> None:
    llm = tiny(
        dtype=torch.float32,
        seed=None,
        enable_lora=False,
        model_impl="vllm",
        tokenizer_mode="auto",
        task="generate",
        num_blocks=None,
        num_gpu_blocks_override=20,
        block_size=None,
        max_num_seqs=None,
        hf_overrides={},
        revision=None,
        compilation_config=3,
        served_model_name=["a"],
        distributed_executor_backend="uni",
        quantization=None,
    )
    assert (llm.config.model.dtype, llm.config.model.model_impl, llm.config.model.seed) == ("float32", "native", 0)
    assert (llm.config.cache.num_blocks, llm.config.cache.block_size, llm.config.scheduler.max_num_seqs) == (
        20,
        16,
        256,
    )
    [output] = llm.generate([5, 6, 7], SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.finished


# ---------------------------------------------------------------------------------------- defaults, and where files are
def test_values_over_the_makers(tiny_path: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_path, tmp_path / "model"))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7}))
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 16}
    for source, override, expected in (
        ("auto", {"temperature": 0.5, "max_new_tokens": 9}, SamplingParams(temperature=0.5, top_k=7, max_tokens=9)),
        ("none", {"top_p": 0.5}, SamplingParams(top_p=0.5)),
        ("auto", {"temperature": 0}, SamplingParams(temperature=0, top_k=7)),
        ("auto", {}, SamplingParams(temperature=0.25, top_k=7)),
        ("auto", None, SamplingParams(temperature=0.25, top_k=7)),
    ):
        with LLM(str(path), generation_config=source, override_generation_config=override, **settings) as llm:
            assert llm.get_default_sampling_params() == expected
    for wrong, message in (
        ({"temperature": -1}, "^override_generation_config.temperature is -1: must be "),
        ({"tempreture": 1}, "^tempreture is 1: not a field of override_generation_config; known are temperature"),
        ({"do_sample": False}, "^do_sample is False: not a field of override_generation_config; known are temperature"),
        ("hot", "^override_generation_config is 'hot': must be "),
    ):
        with pytest.raises(InvalidArgument, match=message):
            LLM(str(path), override_generation_config=wrong, **settings)


@pytest.fixture
def hub_cache(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the hub's client has kept revision v2 of the tiny model, and no way to the hub."""
    kept = tmp_path / "models--owner--tiny"
    shutil.copytree(tiny_path, kept / "snapshots" / ("b" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "v2").write_text("b" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_revision_in_a_folder_of_one_s_own(hub_cache: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 16}
    with LLM("owner/tiny", revision="v2", download_dir=str(hub_cache), **settings) as llm:
        assert (llm.config.model.model, llm.config.model.revision) == ("owner/tiny", "v2")
        assert repr(llm).startswith("<LLM owner/tiny: float32 on ")
        assert llm.generate([5, 6, 7], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
        local = fetched(llm.config)
    snapshot = hub_cache / "models--owner--tiny" / "snapshots" / ("b" * 40)
    assert (local.model.model, local.model.revision, local.model.download_dir) == (str(snapshot), None, None)
    with pytest.raises(InvalidArgument, match="^model is 'owner/tiny': .* from the hub at revision v3: "):
        LLM("owner/tiny", revision="v3", download_dir=str(hub_cache), **settings)


def test_a_revision_of_what_is_no_hub_id(tiny_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="^revision is 'v2': must be None: .* is no hub id"):
        LLM(str(tiny_path), revision="v2", skip_tokenizer_init=True)
