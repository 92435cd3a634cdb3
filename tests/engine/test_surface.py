"""What scripts for vLLM find at `LLM` and `AsyncLLM`: arguments that change nothing, names of what there is not, and
what is shown."""

from __future__ import annotations

import abc
import asyncio
import copy
import inspect
import pickle
import pydoc
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from tqdm import tqdm

from pagedec import LLM, AsyncLLM, DtypeWarning, PoolWarning, SamplingParams
from pagedec.client import AsyncClient, Client
from pagedec.config import engine_rules
from pagedec.errors import AbsentFeature, FeatureNotAvailable, InvalidArgument
from pagedec.inputs import CALL_ONLY, CallArgs
from pagedec.llm.of_vllm import ABSENT

Tiny = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
PROMPT = [5, 6, 7]
HI = [{"role": "user", "content": "Say yes."}]
SETTINGS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 16}


@pytest.fixture
def asynchronous(tiny_path: Path) -> Iterator[AsyncLLM]:
    with AsyncLLM(str(tiny_path), **SETTINGS) as llm:
        yield llm


# ---------------------------------------------------------------------------------------------------------- of requests
def test_a_request_without_a_lora(text_llm: LLM, asynchronous: AsyncLLM) -> None:
    assert text_llm.generate("Hi", GREEDY, use_tqdm=False, lora_request=None)[0].finished
    assert text_llm.chat(HI, GREEDY, use_tqdm=False, lora_request=None)[0].finished
    assert list(text_llm.stream("Hi", GREEDY, lora_request=None))[-1].finished

    async def last() -> bool:
        return [output async for output in asynchronous.generate(PROMPT, GREEDY, lora_request=None)][-1].finished

    assert asyncio.run(last())


def test_a_lora_stands_where_vllm_has_it() -> None:
    """By position: behind use_tqdm, or behind the request's name."""
    for call in (LLM.chat, Client.chat, AsyncLLM.generate, AsyncClient.generate):
        named = list(inspect.signature(call).parameters.values())[4]  # behind self and three more
        assert named.name == "lora_request" and named.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, call


def test_what_is_no_lora_is_refused(tiny: Tiny, text_llm: LLM, asynchronous: AsyncLLM) -> None:
    llm, lora = tiny(), {"lora_name": "mine"}

    async def first(outputs: Any) -> None:
        await anext(outputs)

    for call in (
        lambda: llm.generate(PROMPT, GREEDY, lora_request=lora), lambda: text_llm.chat(HI, GREEDY, lora_request=lora),
        lambda: llm.generate([PROMPT, PROMPT], GREEDY, lora_request=[None, lora]),
        lambda: llm.stream(PROMPT, GREEDY, lora_request=lora), lambda: llm.session(PROMPT, lora_request=lora),
        lambda: asynchronous.session(PROMPT, lora_request=lora), lambda: llm.add_lora(lora),
        lambda: asyncio.run(asynchronous.add_lora(lora)),
        lambda: asyncio.run(first(asynchronous.generate(PROMPT, GREEDY, lora_request=lora))),
        lambda: asyncio.run(first(asynchronous.chat(HI, GREEDY, lora_request=lora))),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=r"^lora_request(\[1\])? is .*mine.*: must be a LoRARequest"):
            call()
    assert llm._num_requests == 0 and llm.list_loras() == set()


def test_further_arguments_of_vllm_s_calls_may_ask_for_nothing(text_llm: LLM, asynchronous: AsyncLLM) -> None:
    assert set(CallArgs.__annotations__) == set(CALL_ONLY)
    plain: dict[str, Any] = {name: only.values[-1] for name, only in CALL_ONLY.items()}
    auto = {**plain, "chat_template_content_format": "auto"}
    assert text_llm.generate("Hi", GREEDY, use_tqdm=False, **plain)[0].finished
    prompts = [text_llm.chat(HI, GREEDY, False, **given)[0].prompt for given in (auto, {})]
    assert prompts[0] == prompts[1]
    began = text_llm._num_requests

    async def told(outputs: Any) -> bool:
        return [output async for output in outputs][-1].finished

    def calls(**given: Any) -> list[Callable[[], object]]:
        return [
            lambda: text_llm.generate("Hi", GREEDY, **given), lambda: text_llm.chat(HI, GREEDY, **given),
            lambda: asyncio.run(told(asynchronous.generate(PROMPT, GREEDY, **given))),
            lambda: asyncio.run(told(asynchronous.chat(HI, GREEDY, **given))),
        ]  # fmt: skip

    assert calls(**plain)[2]()
    for name, only in CALL_ONLY.items():
        for call in calls(**{name: "openai"}):
            with pytest.raises(FeatureNotAvailable) as caught:
                call()
            assert str(caught.value).startswith(f"{name} is 'openai': {only.missing} not available in this version; ")
    for call in calls(max_new_tokens=3):
        with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'max_new_tokens'$"):
            call()
    assert text_llm._num_requests == began


@pytest.mark.parametrize(
    ("key", "value", "missing"),
    [
        ("multi_modal_data", {"image": object()}, "images, audio and video are"),
        ("mm_processor_kwargs", {"num_crops": 4}, "images, audio and video are"),
        ("prompt_embeds", torch.zeros(2, 3), "prompts as embeddings are"),
        ("encoder_prompt", "a", "models with an encoder are"),
    ],
)
def test_prompts_of_more_than_text_are_refused_by_name(tiny: Tiny, key: str, value: Any, missing: str) -> None:
    llm = tiny()
    with pytest.raises(FeatureNotAvailable) as caught:
        llm.generate([PROMPT, {"prompt_token_ids": PROMPT, key: value}], GREEDY, use_tqdm=False)
    assert caught.value.field == f"prompts[1].{key}" and caught.value.value is value
    assert caught.value.limit == f"{missing} not available in this version"
    empty = {"prompt_token_ids": PROMPT, key: None, "multi_modal_data": {}}
    assert llm.generate(empty, GREEDY, use_tqdm=False)[0].prompt_token_ids == PROMPT


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "audio_url", "video", "video_url"])
def test_chats_of_more_than_text_are_refused_by_name(text_llm: LLM, kind: str) -> None:
    part = {"type": kind, kind: {"url": "file:///a"}}
    with pytest.raises(FeatureNotAvailable) as caught:
        text_llm.chat([*HI, {"role": "user", "content": [{"type": "text", "text": "What?"}, part]}], GREEDY)
    assert (caught.value.field, caught.value.value) == ("messages[1].content[1]", part)
    assert "these models read nothing but text" in caught.value.limit


def test_bars(text_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[Any] = []

    def bar(**options: Any) -> Any:
        made.append(tqdm(**options, leave=False))
        return made[-1]

    text_llm.generate(["a", "b"], GREEDY, use_tqdm=bar)
    assert (made[0].total, made[0].n, made[0].desc) == (2, 2, "prompts")
    text_llm.chat(HI, GREEDY, bar)
    assert made[1].total == made[1].n == 1
    capsys.readouterr()
    text_llm.chat(HI, GREEDY, False)
    text_llm.generate(prompts=["a"], sampling_params=GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    text_llm.generate("a", GREEDY)
    assert "prompts: 100%" in capsys.readouterr().err
    for wrong in ("yes", None, 1):
        with pytest.raises(
            InvalidArgument, match="^use_tqdm is .*: must be true, false, or what makes a bar as tqdm does$"
        ):
            text_llm.generate("a", GREEDY, use_tqdm=wrong)


def test_no_prompts_are_no_outputs(tiny: Tiny) -> None:
    for none in ([], (), iter(())):
        assert tiny().generate(none, GREEDY) == []


def test_outputs_have_the_names_of_what_there_is_not(tiny: Tiny) -> None:
    [output] = tiny().generate(PROMPT, GREEDY.clone(logprobs=1), use_tqdm=False)
    for name in ("lora_request", "encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params", "prompt_logprobs"):
        assert getattr(output, name) is None
    [answer] = output.outputs
    assert answer.lora_request is answer.kv_transfer_params is answer.routed_experts is None
    assert answer.logprobs is not None and answer.cumulative_logprob is not None and output.metrics is not None
    assert "kv_transfer" not in repr(output) and output.num_cached_tokens == 0


def test_times_are_of_the_clock_that_is_told(tiny: Tiny) -> None:
    before = time.perf_counter()
    [output] = tiny().generate(PROMPT, GREEDY, use_tqdm=False)
    own = output.metrics
    assert own is not None and own.first_scheduled_time and own.first_token_time and own.finished_time
    times = [before, own.arrival_time, own.first_scheduled_time, own.first_token_time, own.finished_time]
    assert sorted(times) == times and times[-1] <= time.perf_counter()
    assert "`time.perf_counter()`" in (inspect.getdoc(type(own)) or "")


# ---------------------------------------------------------------------------------------------------- what there is not
@pytest.mark.parametrize("name", ABSENT)
def test_absent_methods_are_said_by_name(tiny: Tiny, name: str) -> None:
    llm = tiny()
    assert not hasattr(llm, name) and getattr(llm, name, 3) == 3
    assert (name in dir(llm)) == name.startswith("from_"), "but for those of the class"
    with pytest.raises(AbsentFeature) as caught:
        getattr(llm, name)
    error = caught.value
    assert isinstance(error, FeatureNotAvailable) and isinstance(error, AttributeError)
    assert str(error) == f"{name} is not available in this version: {ABSENT[name]}"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field, again.code) == (str(error), name, "UNIMPLEMENTED")


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_absent_class_methods_are_said_by_name(kind: Any) -> None:
    """`AsyncLLM.from_engine_args(...)` is how scripts for vLLM begin."""
    for name in ABSENT:
        assert not hasattr(kind, name) and (name in dir(kind)) == name.startswith("from_")
    with pytest.raises(AbsentFeature, match="^from_engine_args is not available in this version: .* `AsyncLLM.model, "):
        kind.from_engine_args(None)
    with pytest.raises(AttributeError, match=f"^type object '{kind.__name__}' has no attribute 'generat'$") as caught:
        kind.generat  # noqa: B018
    assert not isinstance(caught.value, InvalidArgument)


def test_a_class_of_one_s_own_may_be_abstract() -> None:
    """What implements somebody's interface with a model."""

    class Writes(abc.ABC):
        @abc.abstractmethod
        def write(self) -> str: ...

    class Reads(Protocol):
        def read(self) -> str: ...

    class OwnType(type): ...

    class Marked(metaclass=OwnType): ...

    class Own(LLM, Writes):
        def write(self) -> str:
            return ""

    class Another(LLM, Reads): ...

    class Third(LLM, Marked): ...

    assert isinstance(Own.__new__(Own), Writes) and isinstance(Third, OwnType)
    for kind in (Own, Another, Third):
        with pytest.raises(AbsentFeature, match="^from_engine_args is not available"):
            kind.from_engine_args  # noqa: B018


def test_other_names_are_said_as_python_says_them(tiny: Tiny, asynchronous: AsyncLLM) -> None:
    with pytest.raises(AttributeError, match="^'LLM' object has no attribute 'generat'$") as caught:
        tiny().generat  # noqa: B018
    assert caught.value.name == "generat" and not isinstance(caught.value, InvalidArgument)
    with pytest.raises(AbsentFeature, match="^sleep is not available in this version: "):
        asynchronous.sleep  # noqa: B018


# -------------------------------------------------------------------------------------------------------- what is shown
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_every_argument_is_shown(kind: type[LLM] | type[AsyncLLM]) -> None:
    parameters = dict(inspect.signature(kind).parameters)
    assert parameters.pop("of_vllm").kind is inspect.Parameter.VAR_KEYWORD
    assert list(parameters) == list(engine_rules())
    described = " ".join(inspect.getdoc(kind).split())
    shown = pydoc.plain(pydoc.render_doc(kind))
    for name, (rule, default) in engine_rules().items():
        assert parameters[name].default == default
        assert f"{name}: {rule.help}" in described and f" {name}: " in shown
        assert len(rule.offered) < 2 or all(repr(choice) in described for choice in rule.offered)
    assert "num_blocks: blocks of KV in the pool (default: None)" in described
    assert "block_size: tokens in a block of KV; one of 8, 16, 32, 64, 128, 256 (default: 16)" in described
    assert (
        "device, process on several; ray: in actors of a cluster; one of 'auto', 'inline', 'process', 'ray' (default: "
        "'auto')" in described
    )
    assert max(map(len, kind.__doc__.splitlines())) <= 140


def test_a_kind_of_llm_has_a_signature_of_its_own() -> None:
    class Mine(LLM):
        def __init__(self, path: str) -> None:
            super().__init__(path)

    assert list(inspect.signature(Mine).parameters) == ["path"]


def test_an_llm_is_one_line(tiny: Tiny, tiny_path: Path, asynchronous: AsyncLLM) -> None:
    llm = tiny(attention_backend="reference", quantization="int8", max_model_len=40)
    pool = "KV pool 64 blocks, 1024 tokens, "
    assert repr(llm).startswith(f"<LLM {tiny_path}: int8 and float32 on reference, context 40, {pool}")
    llm.close()
    assert repr(llm) == f"<LLM {tiny_path}: closed>"
    assert repr(asynchronous).startswith(f"<AsyncLLM {tiny_path}: float32 on ")
    asynchronous.close()
    assert repr(asynchronous) == f"<AsyncLLM {tiny_path}: closed>"


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_llm_says_that_it_stays_where_it_is(text_llm: LLM, use: Callable[[object], object]) -> None:
    with pytest.raises(
        TypeError, match="^an LLM cannot be copied or pickled: it holds a device; make one in each process$"
    ):
        use(text_llm)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("arguments", "category"), [({"dtype": "half"}, DtypeWarning), ({"num_blocks": 3}, PoolWarning)]
)
def test_warnings_are_of_who_made_it(
    tiny_path: Path, kind: type[LLM] | type[AsyncLLM], arguments: dict[str, Any], category: type[Warning]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with kind(str(tiny_path), **{**SETTINGS, **arguments}):
            pass
    [warning] = [one for one in caught if issubclass(one.category, category)]
    assert warning.filename == __file__
