"""Beside adapters that are NaN or gone, and requests that fail, flood the pool or leave, every other request keeps its
bits, with an adapter or without."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedec import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from pagedec.errors import InvalidArgument, PagedecError, RequestError
from pagedec.kernels.library import EMULATED_DEVICE
from tests.engine.deaths import executor_of
from tests.engine.lora_models import GREEDY, PROMPTS, Adapted, bits_of, prompts_of, tokens_of
from tests.engine.test_hostile import MoodyParams, Tearing
from tests.formats.lora_files import write_lora
from tests.models.checkpoints import make_checkpoint, variant

Make = Callable[..., LLM]
PARAMS = SamplingParams(n=2, seed=9, max_tokens=9, logprobs=2)
LONG = SamplingParams(n=2, seed=2, max_tokens=60, ignore_eos=True)
NAN = float("nan")


class Crowd:
    """Prompts of all adapters and of none, with what they answer alone."""

    def __init__(self, adapted: Adapted) -> None:
        self.prompts = PROMPTS * 2
        self.loras = [adapted.choices[i % 4] for i in range(len(self.prompts))]
        llm = adapted.load()
        self.alone = [
            llm.generate(prompt, PARAMS, use_tqdm=False, lora_request=lora)[0]
            for prompt, lora in zip(self.prompts, self.loras, strict=True)
        ]
        llm.close()

    def check(self, llm: LLM) -> None:
        outputs = llm.generate(self.prompts, PARAMS, use_tqdm=False, lora_request=self.loras)
        assert bits_of(outputs) == bits_of(self.alone)


@pytest.fixture(scope="module")
def crowd(adapted: Adapted) -> Crowd:
    return Crowd(adapted)


SETTINGS: list[dict[str, Any]] = [{"max_loras": 1}, {"max_loras": 3, "max_num_batched_tokens": 32}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("what", ["tokens", "ended", "finished"])
def test_a_callback_that_fails(
    with_loras: Make, adapted: Adapted, crowd: Crowd, what: str, settings: dict[str, Any]
) -> None:
    llm, sink = with_loras(**settings), Tearing(what)
    [(_, request)] = llm.prepare([PROMPTS[1]], GREEDY, lora=adapted.loras[0])
    llm.loop.submit(request, sink)  # type: ignore[arg-type]
    crowd.check(llm)
    llm.loop.drive(lambda: sink.error is not None)
    assert "a user's callback" in str(sink.error)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_decoder_that_fails(with_loras: Make, adapted: Adapted, crowd: Crowd, settings: dict[str, Any]) -> None:
    llm = with_loras(**settings)
    stream = llm.stream(PROMPTS[2], MoodyParams(seed=1, max_tokens=9, ignore_eos=True), lora_request=adapted.loras[1])
    crowd.check(llm)
    with pytest.raises(RequestError, match="a user's mistake"):
        list(stream)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_flood(with_loras: Make, adapted: Adapted, settings: dict[str, Any]) -> None:
    """There is not room for all: who gives way is computed again, under its adapter."""
    prompts = prompts_of([1 + i * 7 % 40 for i in range(40)])
    params = [SamplingParams(seed=i, max_tokens=3 + i * 11 % 30, n=1 + i % 2, logprobs=0) for i in range(40)]
    loras = [adapted.choices[i * 5 % 4] for i in range(40)]
    small = with_loras(num_blocks=9, max_num_seqs=4, **{"max_num_batched_tokens": 24} | settings)
    outputs = small.generate(prompts, params, use_tqdm=False, lora_request=loras)
    roomy = with_loras(max_loras=4).generate(prompts, params, use_tqdm=False, lora_request=loras)
    assert bits_of(outputs) == bits_of(roomy)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_that_leaves(with_loras: Make, adapted: Adapted, crowd: Crowd, settings: dict[str, Any]) -> None:
    llm = with_loras(**settings)
    streams = [llm.stream(PROMPTS[3], LONG, lora_request=lora) for lora in adapted.choices]
    for stream in streams:
        next(stream)
    for stream in streams[:2]:
        stream.close()
    crowd.check(llm)
    for stream in streams[2:]:
        stream.close()
    assert llm.remove_lora(1) and llm.remove_lora(2) and llm.remove_lora(3) and llm.engine.adapters.files == {}
    assert llm.reset_prefix_cache(), "the pool is empty"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_weights_that_are_nan(with_loras: Make, adapted: Adapted, crowd: Crowd, settings: dict[str, Any]) -> None:
    """They are whoever asks for them's own trouble, and their place is as good as new for the next one."""
    llm, lora = with_loras(**settings), adapted.write("nan", 8, seed=21, std=NAN)
    streams = [llm.stream(prompt, GREEDY.clone(max_tokens=30), lora_request=lora) for prompt in PROMPTS]
    crowd.check(llm)
    for stream in streams:
        _outcome(stream)
    crowd.check(llm)


def _outcome(stream: Any) -> PagedecError | None:
    try:
        list(stream)
    except PagedecError as error:
        return error
    return None


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("how", ["gone", "others"])
def test_files_that_change(
    with_loras: Make, adapted: Adapted, crowd: Crowd, how: str, settings: dict[str, Any]
) -> None:
    """An adapter is read again when it gets a place; what is not what it was is refused, and costs its own requests."""
    llm, lora = with_loras(**settings), adapted.write("changing", 8, seed=31, folder=f"changing-{how}-{len(settings)}")
    assert llm.add_lora(lora)
    if how == "gone":
        shutil.rmtree(lora.lora_path)
    else:
        adapted.write("changing", 8, seed=32, folder=f"changing-{how}-{len(settings)}")
    stream = llm.stream(PROMPTS[0], GREEDY, lora_request=lora)
    crowd.check(llm)
    with pytest.raises(RequestError, match="does not exist" if how == "gone" else "not what it was when it was added"):
        list(stream)
    crowd.check(llm)


# --------------------------------------------------------------------------------------------------- models without any
@pytest.mark.parametrize(
    ("family", "settings"), [("gpt2", {}), ("llama", {"model_impl": "transformers"})], ids=["gpt2", "hosted"]
)
def test_models_that_take_none(family: str, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp(family)
    make_checkpoint(variant(family, family, length=8), path)
    with pytest.raises((InvalidArgument, PagedecError)) as caught:
        LLM(str(path), dtype="float32", skip_tokenizer_init=True, num_blocks=16, enable_lora=True, **settings)
    assert isinstance(caught.value, InvalidArgument) and caught.value.field == "enable_lora"
    LLM(str(path), dtype="float32", skip_tokenizer_init=True, num_blocks=16, **settings).close()


# ----------------------------------------------------------------------------------------------------------------- text
def test_text_and_chats(tmp_path: Path) -> None:
    """The default model, whose weights are quantised: chats and grammars under an adapter, in one batch with none."""
    generator = torch.Generator().manual_seed(1)

    def pair(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, k, generator=generator) * 0.05, torch.randn(n, 8, generator=generator) * 0.05

    shapes = {"self_attn.q_proj": (576, 576), "mlp.down_proj": (576, 1536)}
    pairs = {f"model.layers.{i}.{name}": pair(*shape) for i in range(30) for name, shape in shapes.items()}
    lora = LoRARequest("words", 1, str(write_lora(tmp_path / "words", pairs, alpha=16)))
    with LLM("smollm2", num_blocks=96, max_model_len=512) as without:
        short = SamplingParams(temperature=0, max_tokens=12)
        chat = [{"role": "user", "content": "Say a word."}]
        [want] = without.chat(chat, short, use_tqdm=False)
    with LLM("smollm2", num_blocks=96, max_model_len=512, enable_lora=True) as llm:
        own, plain = llm.chat([chat, chat], short, use_tqdm=False, lora_request=[lora, None])
        assert plain.outputs[0].token_ids == want.outputs[0].token_ids != own.outputs[0].token_ids
        assert own.lora_request is lora and plain.lora_request is None
        choice = short.clone(structured_outputs=StructuredOutputsParams(choice=["yes, please", "no, thanks"]))
        found = llm.generate(["Yes or no?"] * 2, choice, use_tqdm=False, lora_request=[lora, None])
        assert all(one.outputs[0].text in ("yes, please", "no, thanks") for one in found)
        with llm.session(messages=chat, lora_request=lora) as session:
            assert session.generate(short).outputs[0].token_ids == own.outputs[0].token_ids
            session.append({"role": "user", "content": "And now another one."})
            told = session.generate(short)
        conversation = llm.conversation(chat[:0])
        conversation.ask("Say a word.")
        conversation.answer(own.outputs[0].token_ids)
        prompt = conversation.ask("And now another one.")
        [again] = llm.generate([prompt], short, use_tqdm=False, lora_request=lora)
        assert again.outputs[0].token_ids == told.outputs[0].token_ids


# -------------------------------------------------------------------------------------------------------------- numbers
NUMBERS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}, {"quantization": "int8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("isa", "numbers"),
    [
        pytest.param(isa, own, id=f"{isa}-{own}", marks=pytest.mark.long if isa == EMULATED_DEVICE and i else [])
        for isa in (None, "scalar", "avx2", EMULATED_DEVICE)
        for i, own in enumerate(NUMBERS)
    ],
)
def test_bits_in_all_numbers(
    with_loras: Make, adapted: Adapted, isa: str | None, numbers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a mixture, and without an adapter also in an engine that has no places for any."""
    if isa is not None:
        monkeypatch.setenv("PAGEDEC_ISA", isa)
    if isa == EMULATED_DEVICE:
        monkeypatch.setenv("PAGEDEC_DEBUG", "0")
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    prompts, loras = PROMPTS[:3], adapted.choices
    asked = [(prompt, lora) for prompt in prompts for lora in loras]
    llm = with_loras(max_loras=2, **numbers)
    mixed = llm.generate(
        [prompt for prompt, _ in asked], params, use_tqdm=False, lora_request=[lora for _, lora in asked]
    )  # fmt: skip
    single = with_loras(max_num_batched_tokens=32, **numbers)
    alone = [single.generate(prompt, params, use_tqdm=False, lora_request=lora)[0] for prompt, lora in asked]
    assert bits_of(mixed) == bits_of(alone)
    without = with_loras(enable_lora=False, **numbers)
    plain = without.generate(prompts, params, use_tqdm=False)
    assert bits_of(plain) == bits_of(alone[:: len(loras)])


@pytest.mark.parametrize("settings", [{"executor": "process"}, {"tensor_parallel_size": 2}], ids=str)
def test_workers_of_their_own(with_loras: Make, adapted: Adapted, settings: dict[str, Any], tmp_path: Path) -> None:
    """They are told which files there are; a group that dies is started anew, and reads them again."""
    llm = with_loras(max_loras=2, **settings)
    asked = [(prompt, lora) for prompt in PROMPTS for lora in adapted.choices]
    given = [prompt for prompt, _ in asked], GREEDY

    def answers() -> list[list[int]]:
        return tokens_of(llm.generate(*given, use_tqdm=False, lora_request=[lora for _, lora in asked]))

    want = [adapted.want(lora, prompt) for prompt, lora in asked]
    assert answers() == want
    streams = [llm.stream(PROMPTS[0], GREEDY, lora_request=lora) for lora in adapted.choices]
    for stream in streams:
        next(stream)
    os.kill(executor_of(llm).pids[-1], signal.SIGKILL)
    assert [list(stream)[-1].outputs[0].token_ids for stream in streams] == want[:4]
    assert llm.remove_lora(1) and answers() == want
