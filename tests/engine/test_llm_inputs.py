"""Wrong input is refused before anything starts, in words that name field, value and limit, and nothing is left
behind."""

from __future__ import annotations

import errno
import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.errors import InvalidArgument, ModelFileError, PagedecError
from pagedec.runtime import loading

Tiny = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
PROMPT = [5, 6, 7]


@pytest.fixture
def llm(tiny: Tiny) -> LLM:
    return tiny(max_model_len=40)


def state(llm: LLM) -> tuple[object, ...]:
    """All that a request could have changed."""
    scheduler, pool = llm.engine.scheduler, llm.engine.scheduler.pools["target"]
    return (
        scheduler.step, len(scheduler.requests), scheduler._num_arrivals, list(pool.free), list(pool.evictable),
        llm.engine.stats.num_steps, llm._num_requests, llm.engine.num_unseeded,
    )  # fmt: skip


def refused(llm: LLM, prompts: Any, params: Any = GREEDY, **others: Any) -> InvalidArgument:
    """The error, after which the engine is as it was, and works."""
    before = state(llm)
    with pytest.raises(InvalidArgument) as caught:
        llm.generate(prompts, params, use_tqdm=False, **others)
    assert state(llm) == before
    error = caught.value
    assert error.field in str(error) and error.limit in str(error) and error.code == "INVALID_ARGUMENT"
    good = PROMPT if llm.tokenizer is None else "Hello"
    [output] = llm.generate(good, GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4 or output.outputs[0].finish_reason == "stop"
    llm.engine.scheduler.check()
    return error


@pytest.mark.parametrize(
    ("prompts", "field", "value", "limit"),
    [
        ([[]], "prompts[0]", "empty", "must have at least one token"),
        ([PROMPT, []], "prompts[1]", "empty", "must have at least one token"),
        ([[5, 131]], "prompts[0]", 131, "token ids must be from 0 to 130"),
        ([5, 131], "prompts[0]", 131, "token ids must be from 0 to 130"),
        ([PROMPT, [3, -1]], "prompts[1]", -1, "token ids must be from 0 to 130"),
        ([[2**70]], "prompts[0]", 2**70, "token ids must be from 0 to 130"),
        ([[1] * 40], "prompts[0]", "40 tokens", "must be at most 39 tokens long: the context holds 40"),
        ("text", "prompts[0]", "text", "must be token ids: the engine runs with skip_tokenizer_init"),
        ({"prompt": "text"}, "prompts[0]", "text", "must be token ids: the engine runs with skip_tokenizer_init"),
        ({"prompt": PROMPT}, "prompts[0].prompt", PROMPT, "must be text"),
        ({"prompt_token_ids": "ab"}, "prompts[0].prompt_token_ids", "ab", "must be token ids"),
        ({"prompt_token_ids": None}, "prompts[0]", ["prompt_token_ids"], "must have prompt or prompt_token_ids"),
        ({}, "prompts[0]", [], "must have prompt or prompt_token_ids, may have cache_salt, and nothing else"),
        ([PROMPT, {"tokens": PROMPT}], "prompts[1]", ["tokens"], "must have prompt or prompt_token_ids"),
        ({"prompt_token_ids": PROMPT, "multi_model_data": {}}, "prompts[0]", ["prompt_token_ids", "multi_model_data"],
         "and nothing else"),
        ({"prompt": 5, "prompt_token_ids": PROMPT}, "prompts[0].prompt", 5, "must be text"),
        ({"prompt_token_ids": PROMPT, "cache_salt": 5}, "prompts[0].cache_salt", 5, "must be text"),
        ({"prompt_token_ids": PROMPT, "cache_salt": "a\ud800"}, "prompts[0].cache_salt", "a\ud800",
         "must be text, has half a surrogate pair at character 1"),
        ({"prompt_token_ids": [5, 6.0]}, "prompts[0].prompt_token_ids", [5, 6.0],
        "must be token ids: whole numbers in"),
        (7, "prompts", 7, "must be a prompt or a list of them"),
        (None, "prompts", None, "must be a prompt or a list of them"),
        (b"\x05\x06", "prompts", b"\x05\x06", "must be a prompt or a list of them"),
        ([b"\x05\x06"], "prompts[0]", b"\x05\x06", "must be text, a list of token ids, or a mapping"),
        ([None], "prompts[0]", None, "must be text, a list of token ids, or a mapping"),
        ([5, None], "prompts[0]", 5, "must be text, a list of token ids, or a mapping"),
        ([[5, 6.0]], "prompts[0]", [5, 6.0], "must be text, a list of token ids, or a mapping"),
        ([[5, True]], "prompts[0]", [5, True], "must be text, a list of token ids, or a mapping"),
        ([[[5, 6]]], "prompts[0]", [[5, 6]], "must be text, a list of token ids, or a mapping"),
        ([PROMPT, [5, "6"]], "prompts[1]", [5, "6"], "must be text, a list of token ids, or a mapping"),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_wrong_prompt(llm: LLM, prompts: Any, field: str, value: Any, limit: str) -> None:
    error = refused(llm, prompts)
    assert (error.field, error.value) == (field, value)
    assert limit in error.limit


def test_messages_of_a_chat_are_no_prompts(llm: LLM) -> None:
    error = refused(llm, [{"role": "user", "content": "Hi"}])
    assert error.limit.endswith("and nothing else; messages of a chat go to `chat`")


def test_prompt_longer_than_the_pool(tiny: Tiny) -> None:
    error = refused(tiny(num_blocks=3), [[1] * 32])
    assert (error.field, error.value) == ("prompts[0]", "32 tokens")
    assert error.limit == "must be at most 31 tokens long: the KV pool holds 32, and one must be new"


def test_the_longest_prompt_that_fits_is_taken(tiny: Tiny) -> None:
    for arguments, length in (({"num_blocks": 3}, 31), ({"max_model_len": 40}, 39)):
        [output] = tiny(**arguments).generate([[1] * length], SamplingParams(ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("params", "field", "value", "limit"),
    [
        ([GREEDY], "sampling_params", "a list of 1", "must be one, or one for each of 2 prompts"),
        ([GREEDY] * 3, "sampling_params", "a list of 3", "must be one, or one for each of 2 prompts"),
        ([], "sampling_params", "a list of 0", "must be one, or one for each of 2 prompts"),
        (
            [GREEDY, None],
            "sampling_params[1]",
            None,
            "must be a SamplingParams, a BeamSearchParams, or of another decoder",
        ),
        ([GREEDY, {"temperature": 0}], "sampling_params[1]", {"temperature": 0}, "; SamplingParams(**...) makes one"),
        ({"temperature": 0}, "sampling_params", {"temperature": 0}, "; SamplingParams(**...) makes one"),
        ("greedy", "sampling_params", "greedy", "sampling (SamplingParams)"),
        (SamplingParams, "sampling_params", SamplingParams, "sampling (SamplingParams)"),
        (SamplingParams(stop_token_ids=[3, 131]), "stop_token_ids", 131, "token ids must be from 0 to 130"),
        ([GREEDY, SamplingParams(stop_token_ids=[131])], "sampling_params[1].stop_token_ids", 131, "token ids must be"),
        (
            [GREEDY, BeamSearchParams(beam_width=400, max_tokens=3)],
            "sampling_params[1].beam_width",
            400,
            "must be at most ",
        ),
        (SamplingParams(stop_token_ids=range(131), min_tokens=1), "stop_token_ids", "131 tokens", "must leave a token"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_wrong_params(llm: LLM, params: Any, field: str, value: Any, limit: str) -> None:
    error = refused(llm, [PROMPT, PROMPT], params)
    assert (error.field, error.value) == (field, value)
    assert limit in error.limit


def test_a_list_of_params_has_the_wrong_one_named(text_llm: LLM) -> None:
    wrong = SamplingParams(structured_outputs={"regex": "(a"})  # type: ignore[arg-type]
    assert refused(text_llm, ["x", "y"], [GREEDY, wrong]).field == "sampling_params[1].structured_outputs.regex"
    assert refused(text_llm, ["x", "y"], wrong).field == "structured_outputs.regex"
    talk = [{"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidArgument, match=r"^sampling_params\[1\]\.structured_outputs\.regex is '\(a': "):
        text_llm.chat([talk, talk], [GREEDY, wrong])


@pytest.mark.parametrize("priority", [[1], [1, 2, 3], 5, "12", [1, "2"], [1, None], [0.5, 1], [True, 1]], ids=repr)
def test_wrong_priority(llm: LLM, priority: Any) -> None:
    assert refused(llm, [PROMPT, PROMPT], priority=priority).field == "priority"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (math.nan, -0.5, math.inf, "1")),
        *(("top_p", value) for value in (math.nan, 0, 1.5)),
        *(("min_p", value) for value in (math.nan, -0.1)),
        *(("n", value) for value in (0, 1.5)),
        *(("max_tokens", value) for value in (0, -3, math.nan)),
        *(("seed", value) for value in (-1, 0.5)),
        ("stop_token_ids", [-1]), ("best_of", 3), ("top_k", math.nan),
    ],
)  # fmt: skip
def test_wrong_sampling_params_name_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert repr(value) in str(caught.value) and caught.value.limit


def test_wrong_text(text_llm: LLM) -> None:
    for text in ("", "half a \ud800 pair"):
        assert refused(text_llm, ["fine", text]).field == "prompts[1]"
    error = refused(text_llm, ["word " * 600])
    assert error.field == "prompts[0]" and "at most 511 tokens" in error.limit and len(str(error)) < 300


def test_other_spellings_of_a_prompt_mean_the_same(llm: LLM, text_llm: LLM) -> None:
    both = {"prompt": "shown", "prompt_token_ids": PROMPT, "cache_salt": ""}
    spellings = [
        PROMPT,
        tuple(PROMPT),
        np.array(PROMPT).tolist(),
        list(np.array(PROMPT)),
        {"prompt_token_ids": PROMPT},
        both,
    ]
    outputs = llm.generate(spellings, GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert all(output.prompt_token_ids == PROMPT for output in outputs)
    assert [output.prompt for output in outputs] == [None] * 5 + ["shown"]
    for alone in (PROMPT, {"prompt_token_ids": PROMPT}, (prompt for prompt in [PROMPT])):
        [output] = llm.generate(alone, GREEDY, use_tqdm=False)
        assert output.outputs == outputs[0].outputs
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    text = "The sky is"
    assert text_llm.tokenizer is not None
    mixed = [text, text_llm.tokenizer.encode(text), {"prompt": text}]
    outputs = text_llm.generate(mixed, GREEDY, use_tqdm=False)
    assert len({output.outputs[0].text for output in outputs}) == 1 and outputs[0].outputs[0].text
    assert [output.prompt for output in outputs] == [text, None, text]


# -------------------------------------------------------------------------------------------- what an engine is made of
@pytest.fixture
def copy(tiny_path: Path, tmp_path: Path) -> Path:
    """The tiny model's files, to be damaged."""
    return Path(shutil.copytree(tiny_path, tmp_path / "model"))


def not_made(monkeypatch: pytest.MonkeyPatch, model: object, **arguments: Any) -> PagedecError:
    """The error of an engine for which no KV was allocated."""
    monkeypatch.setattr(loading, "allocate_cache", lambda *_: pytest.fail("KV is allocated for what cannot run"))
    with pytest.raises(PagedecError) as caught:
        LLM(str(model), **{"skip_tokenizer_init": True, **arguments})
    return caught.value


def change(path: Path, **values: Any) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**config, **values}.items() if value is not ...}))


@pytest.mark.parametrize(
    ("arguments", "field", "limit"),
    [
        ({"no_such": 1}, "no_such", "known are model, "),
        ({"num_blocks": 0}, "num_blocks", "must be a whole number from 1"),
        ({"num_blocks": 1}, "num_blocks", "must be at least 2"),
        ({"kv_cache_memory": "64KiB", "block_size": 64}, "kv_cache_memory", "must be at least 2 blocks of"),
        ({"max_model_len": 257}, "max_model_len", "must be at most 256, the model's context"),
        ({"max_model_len": math.nan}, "max_model_len", "must be a whole number"),
        ({"block_size": 24}, "block_size", "must be one of 8, 16, 32, 64, 128, 256"),
        ({"dtype": "float8"}, "dtype", "must be one of"),
        ({"attention_backend": "flash-attn"}, "attention_backend", "must be auto, native or reference on a processor"),
        ({"max_num_seqs": 0}, "max_num_seqs", "must be a whole number from 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens", "must be a whole number from 1"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_wrong_engine_argument(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], field: str, limit: str
) -> None:
    error = not_made(monkeypatch, tiny_path, **arguments)
    assert isinstance(error, InvalidArgument) and error.field == field
    assert limit in error.limit


@pytest.mark.parametrize(
    "arguments", [{"num_blocks": 2**31 - 1}, {"kv_cache_memory": 2**50}], ids=lambda value: next(iter(value))
)
def test_a_pool_that_the_machine_has_no_memory_for(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(loading, "allocate_cache", refuse)
    [name] = arguments
    with pytest.raises(
        InvalidArgument, match=f"^{name} is .*: must be less: the KV pool would take [0-9.]+ GiB, which"
    ):
        LLM(str(tiny_path), skip_tokenizer_init=True, **arguments)


def test_missing_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (tmp_path / "nowhere", tmp_path / "nowhere.gguf", tmp_path):
        error = not_made(monkeypatch, name)
        assert isinstance(error, ModelFileError) and str(error).startswith(f"model is {str(name)!r}: ")
    assert str(error).endswith(": config.json: does not exist: a model directory needs a config.json")


def test_the_argument_that_names_a_file_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    junk = copy / "junk.gguf"
    junk.write_bytes(b"junkjunk")
    nowhere = str(copy / "nowhere")
    cases = [
        ({"tokenizer": nowhere, "skip_tokenizer_init": False}, "tokenizer", nowhere, "does not exist"),
        ({"tokenizer": str(junk), "skip_tokenizer_init": False}, "tokenizer", str(junk), "begins with b'junk', "),
        ({"generation_config": nowhere}, "generation_config", nowhere, "does not exist; "),
        ({"generation_config": "~nobody-here/x"}, "generation_config", "~nobody-here/x", "is no path: Could not "),
        ({"speculative_config": {"model": nowhere}}, "speculative_config.model", nowhere, "does not exist"),
    ]
    for arguments, field, given, problem in cases:
        error = not_made(monkeypatch, copy, **arguments)  # type: ignore[arg-type]
        assert isinstance(error, ModelFileError) and (error.field, error.given) == (field, given)
        assert str(error).startswith(f"{field} is {given!r}: {problem}")
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    error = not_made(monkeypatch, copy, generation_config="x" * 256)
    assert isinstance(error, ModelFileError) and error.problem.startswith("is no path: File name too long; ")
    assert str(not_made(monkeypatch, junk)).startswith(f"model is {str(junk)!r}: begins with b'junk', ")
    (copy / "model.safetensors").unlink()
    assert str(not_made(monkeypatch, copy)) == f"model is {str(copy)!r}: has no safetensors weights"


def test_missing_tokenizer_is_noticed_before_the_weights_are_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_model_weights", lambda *_: pytest.fail("weights are opened for what cannot run"))
    error = not_made(monkeypatch, copy, skip_tokenizer_init=False)
    said = "name a tokenizer directory; or set skip_tokenizer_init=True and pass token ids"
    assert str(error) == f"model is {str(copy)!r}: tokenizer.json: does not exist; {said}"


def test_a_model_that_cannot_be_run_is_told_of_before_its_tokenizer(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not (copy / "tokenizer.json").exists()
    change(copy / "config.json", architectures=["NoSuchForCausalLM"])
    assert "architectures is NoSuch" in str(not_made(monkeypatch, copy, skip_tokenizer_init=False)).replace("'", "")
    (copy / "config.json").write_text("{")
    error = not_made(monkeypatch, copy, skip_tokenizer_init=False)
    assert str(error).startswith(f"model is {str(copy)!r}: config.json: ")


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda model: (model / "config.json").unlink(), "config.json"),
        (lambda model: cut(model / "config.json", 0.5), "config.json"),
        (lambda model: (model / "config.json").write_text("[]"), "config.json"),
        (lambda model: change(model / "config.json", hidden_size=...), "hidden_size"),
        (lambda model: change(model / "config.json", architectures=["NoSuchForCausalLM"]), "architectures"),
        (lambda model: change(model / "config.json", hidden_act="gelu"), "hidden_act"),
        (lambda model: change(model / "config.json", intermediate_size=95), "mlp.gate_proj.weight"),
        (lambda model: change(model / "config.json", num_hidden_layers=3), "model.layers.2"),
        (lambda model: change(model / "config.json", num_hidden_layers=1), "model.layers.1"),
        (lambda model: change(model / "config.json", eos_token_id=131), "eos_token_id"),
        (lambda model: (model / "model.safetensors").unlink(), "safetensors"),
        (lambda model: cut(model / "model.safetensors", 0.7), "model.safetensors"),
        (lambda model: cut(model / "model.safetensors", 0.001), "model.safetensors"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), "model.safetensors"),
    ],
)
def test_damaged_files(copy: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], named: str) -> None:
    damage(copy)
    assert named in str(not_made(monkeypatch, copy))
