"""Texts and their ends, log-probabilities, salts and defaults, as `LLM.generate` returns them."""

from __future__ import annotations

import gc
import json
import math
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, Logprob, SamplingParams, TextPrompt, TokensPrompt
from pagedec.errors import FeatureNotAvailable, InvalidArgument, ModelFileError, PagedecError
from pagedec.outputs import CompletionOutput, RequestOutput

Tiny = Callable[..., LLM]
PROMPT = "The capital of France is"
FREE = SamplingParams(temperature=0, max_tokens=20)
IDS = [5, 17, 40, 99, 3]


def generate(llm: LLM, prompts: Any, params: Any = None, **arguments: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **arguments)


def one(llm: LLM, params: SamplingParams, prompt: Any = PROMPT) -> CompletionOutput:
    [output] = generate(llm, prompt, params)
    [answer] = output.outputs
    return answer


@pytest.fixture(scope="module")
def free(text_llm: LLM) -> CompletionOutput:
    """What the model says when nothing stops it."""
    return one(text_llm, FREE)


# --------------------------------------------------------------------------------------------------------- stop strings
def test_text_ends_at_the_first_stop_string(text_llm: LLM, free: CompletionOutput) -> None:
    """Pieces of the free text as stop strings: the text is what comes before the first place, the tokens are all."""
    stops = [free.text[i : i + 1 + i % 7] for i in range(1, len(free.text) - 6, 4)]
    cut = [FREE.clone(stop=stop) for stop in stops]
    kept = [FREE.clone(stop=["never so", stop], include_stop_str_in_output=True) for stop in stops]
    outputs = [output.outputs[0] for output in generate(text_llm, [PROMPT] * 2 * len(stops), [*cut, *kept])]
    assert len(stops) > 6
    for stop, without, included in zip(stops, outputs, outputs[len(stops) :], strict=False):
        assert without.text == free.text[: free.text.index(stop)]
        assert (without.finish_reason, without.stop_reason) == ("stop", stop)
        assert without.token_ids == free.token_ids[: len(without.token_ids)] == included.token_ids
        assert included.text == without.text + stop


def test_a_stop_string_that_never_comes_changes_nothing(text_llm: LLM, free: CompletionOutput) -> None:
    assert one(text_llm, FREE.clone(stop=["@@@", "never so"])) == free
    assert (free.finish_reason, free.stop_reason) == ("length", None)


def test_no_stop_string_before_min_tokens(text_llm: LLM, free: CompletionOutput) -> None:
    first = text_llm.get_tokenizer().decode(free.token_ids[:1])
    assert one(text_llm, FREE.clone(stop=first, min_tokens=1)).token_ids != free.token_ids[:1]


def test_stop_tokens_in_the_text(text_llm: LLM, free: CompletionOutput) -> None:
    stop = next(token for token in free.token_ids[2:] if free.token_ids.index(token) > 1)
    token_ids = free.token_ids[: free.token_ids.index(stop) + 1]
    tokenizer = text_llm.get_tokenizer()
    without = one(text_llm, FREE.clone(stop_token_ids=[stop]))
    included = one(text_llm, FREE.clone(stop_token_ids=[stop], include_stop_str_in_output=True))
    assert without.token_ids == included.token_ids == token_ids
    assert without.text == tokenizer.decode(token_ids[:-1]) and included.text == tokenizer.decode(token_ids)
    assert without.stop_reason == included.stop_reason == stop


def test_the_end_token_as_a_stop_token(text_llm: LLM) -> None:
    """The model's own end has no reason, unless it is asked for by its id where it would be ignored."""
    chat = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    [end] = text_llm.engine.limits.eos_token_ids
    plain = one(text_llm, FREE, chat)
    named = one(text_llm, FREE.clone(stop_token_ids=[end], ignore_eos=True), chat)
    shown = one(text_llm, FREE.clone(include_stop_str_in_output=True, skip_special_tokens=False), chat)
    assert plain.token_ids == named.token_ids == shown.token_ids and plain.token_ids[-1] == end
    assert (plain.stop_reason, named.stop_reason) == (None, end)
    assert shown.text == plain.text + "<|im_end|>" and named.text == plain.text


def test_text_can_be_left_out(text_llm: LLM, free: CompletionOutput) -> None:
    answer = one(text_llm, FREE.clone(detokenize=False))
    assert (answer.text, answer.token_ids) == ("", free.token_ids)


def test_text_needs_a_tokenizer(tiny: Tiny) -> None:
    for params in (SamplingParams(stop="a"), SamplingParams(bad_words=["a"])):
        with pytest.raises(InvalidArgument, match="must be empty: the engine has no tokenizer"):
            generate(tiny(), IDS, params)
    for call in (lambda llm: llm.chat([{"role": "user", "content": "Hi"}]), lambda llm: llm.get_tokenizer()):
        with pytest.raises(InvalidArgument, match=r"^skip_tokenizer_init is True: must be false"):
            call(tiny())


# ---------------------------------------------------------------------------------------------------- log-probabilities
def test_logprobs_hold_the_token_and_the_best(text_llm: LLM, free: CompletionOutput) -> None:
    tokenizer = text_llm.get_tokenizer()
    for params in (FREE.clone(logprobs=3), FREE.clone(logprobs=3, temperature=1.3, seed=5)):
        answer = one(text_llm, params)
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        total = 0.0
        for token_id, table in zip(answer.token_ids, answer.logprobs, strict=True):
            assert table is not None and next(iter(table)) == token_id and len(table) in (3, 4)
            assert {entry.rank for entry in table.values()} >= {1, 2, 3}
            assert all(isinstance(entry, Logprob) and entry.logprob <= 0 for entry in table.values())
            assert all(entry.decoded_token == tokenizer.decode([i], False) for i, entry in table.items())
            best = sorted(table.values(), key=lambda entry: -entry.logprob)
            assert [entry.rank for entry in best] == sorted(entry.rank for entry in best)
            total += table[token_id].logprob
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-6)
    assert one(text_llm, FREE.clone(logprobs=3)).token_ids == free.token_ids, "reporting changes nothing"
    zero = one(text_llm, FREE.clone(logprobs=0))
    assert [list(table) for table in zero.logprobs] == [[token_id] for token_id in zero.token_ids]
    assert free.logprobs is None and free.cumulative_logprob is None


def test_logprobs_of_the_whole_vocabulary_sum_to_one(tiny: Tiny) -> None:
    [output] = generate(tiny(), IDS, SamplingParams(seed=3, max_tokens=3, logprobs=-1, prompt_logprobs=-1))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(IDS)
    tables = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
    for table in tables:
        assert len(table) == 131 and sum(math.exp(entry.logprob) for entry in table.values()) == pytest.approx(
            1, abs=1e-4
        )
        assert all(entry.decoded_token is None for entry in table.values())


def test_prompt_logprobs_are_what_generation_reports(text_llm: LLM, free: CompletionOutput) -> None:
    """An answer's tokens, given as a prompt, have the same tables: bit for bit."""
    tokenizer = text_llm.get_tokenizer()
    said = one(text_llm, FREE.clone(logprobs=2))
    prompt = [*tokenizer.encode(PROMPT), *said.token_ids]
    [output] = generate(text_llm, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, prompt_logprobs=2))
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[-len(said.token_ids) :] == said.logprobs


def test_halves_of_characters_show_as_such(text_llm: LLM) -> None:
    token_ids = text_llm.get_tokenizer().encode("\N{SNOWMAN}")
    [output] = generate(text_llm, [token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    shown = [output.prompt_logprobs[i][token].decoded_token for i, token in enumerate(token_ids) if i]
    assert len(token_ids) > 1 and "\ufffd" in shown[-1]


# -------------------------------------------------------------------------------------------------------------- prompts
def test_only_the_end_of_a_prompt_is_kept(text_llm: LLM) -> None:
    tokenizer = text_llm.get_tokenizer()
    [short] = generate(text_llm, "One two three " + PROMPT, FREE.clone(truncate_prompt_tokens=5))
    assert short.prompt_token_ids == tokenizer.encode("One two three " + PROMPT)[-5:]
    [long] = generate(text_llm, "word " * 600, FREE.clone(truncate_prompt_tokens=20, max_tokens=2))
    assert len(long.prompt_token_ids) == 20
    [whole] = generate(text_llm, PROMPT, FREE.clone(truncate_prompt_tokens=1000))
    assert whole.prompt_token_ids == tokenizer.encode(PROMPT)


def test_salts_keep_prompts_apart(tiny: Tiny) -> None:
    llm, params, long = tiny(), SamplingParams(temperature=0, max_tokens=2), [7, 8] * 24
    prompts = [TokensPrompt(prompt_token_ids=long, cache_salt=salt) for salt in ("a", "a", "b", "b", "")]
    cached = [generate(llm, prompt, params)[0].num_cached_tokens for prompt in prompts]
    assert cached == [0, 48, 0, 48, 0]
    [output] = generate(llm, [{"prompt_token_ids": long, "cache_salt": None}], params)
    assert output.num_cached_tokens == 48


def test_typed_prompts(text_llm: LLM, free: CompletionOutput) -> None:
    ids = text_llm.get_tokenizer().encode(PROMPT)
    for prompt in (TextPrompt(prompt=PROMPT), TokensPrompt(prompt_token_ids=ids, prompt="other words")):
        assert one(text_llm, FREE, prompt).token_ids == free.token_ids


# ------------------------------------------------------------------------------------------------------------- defaults
@pytest.fixture
def recommending(tiny_path: Path, tmp_path: Path) -> Path:
    """The tiny model with its makers' advice."""
    path = Path(shutil.copytree(tiny_path, tmp_path / "model"))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7, "max_new_tokens": 5}))
    return path


def test_a_models_own_defaults(recommending: Path, tmp_path: Path, tiny: Tiny) -> None:
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 16}
    advised = SamplingParams(temperature=0.25, top_k=7, max_tokens=5)
    other = tmp_path / "other.json"
    other.write_text('{"do_sample": false}')
    for value, expected in (
        ("auto", advised), ("none", SamplingParams()), ("vllm", SamplingParams()), (str(recommending), advised),
    ):  # fmt: skip
        with LLM(str(recommending), generation_config=value, **settings) as llm:
            assert llm.get_default_sampling_params() == expected
            if value == "auto":
                [output] = generate(llm, IDS)
                assert len(output.outputs[0].token_ids) <= 5
                [explicit] = generate(llm, IDS, SamplingParams(max_tokens=9, ignore_eos=True))
                assert len(explicit.outputs[0].token_ids) == 9, "explicit parameters are taken as they are"
    for wrong in ("nowhere", str(tmp_path)):
        with pytest.raises(ModelFileError, match="does not exist"):
            LLM(str(recommending), generation_config=wrong, **settings)
    (recommending / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ModelFileError, match="temperature is -1"):
        LLM(str(recommending), **settings)


# ------------------------------------------------------------------------------------------- arguments of other engines
def test_arguments_that_mean_nothing_here(tiny: Tiny) -> None:
    llm = tiny(
        trust_remote_code=True,
        enforce_eager=False,
        disable_log_stats=True,
        gpu_memory_utilization=0.9,
        swap_space=4,
        cpu_offload_gb=0,
        pipeline_parallel_size=1,
        tokenizer_mode="auto",
        tensor_parallel_size=1,
        data_parallel_size=1,
        enable_chunked_prefill=True,
        kv_cache_dtype="auto",
        device="cpu",
        max_logprobs=20,
        max_seq_len_to_capture=8192,
        disable_custom_all_reduce=True,
    )
    assert "swap_space" not in llm.config.to_kwargs()


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("trust_remote_code", "yes", InvalidArgument), ("gpu_memory_utilization", 1.5, InvalidArgument),
        ("swap_space", -1, InvalidArgument), ("pipeline_parallel_size", 2, FeatureNotAvailable),
        ("tokenizer_mode", "slow", FeatureNotAvailable),
        ("max_lora_rank", 0, InvalidArgument), ("max_logprobs", -2, InvalidArgument),
        ("enable_chunked_prefill", False, FeatureNotAvailable), ("kv_cache_dtype", "fp8_e5m2", FeatureNotAvailable),
        ("device", "cuda", FeatureNotAvailable),
    ],
)  # fmt: skip
def test_arguments_that_ask_for_what_there_is_not(tiny: Tiny, name: str, value: Any, kind: type[PagedecError]) -> None:
    with pytest.raises(kind) as caught:
        tiny(**{name: value})
    assert caught.value.field == name and caught.value.value == value


# -------------------------------------------------------------------------------------------------------------- the end
def test_dropping_an_llm_frees_its_memory(tiny_path: Path) -> None:
    for leave in (lambda llm: None, LLM.close, lambda llm: llm.close() or llm.close()):
        llm = LLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=16)
        generate(llm, IDS, SamplingParams(max_tokens=2))
        list(llm.stream(IDS, SamplingParams(max_tokens=2)))
        cache = weakref.ref(llm.engine.executor.worker.lanes["target"].cache.tokens)
        gone = weakref.ref(llm.engine)
        leave(llm)
        del llm
        gc.collect()
        assert gone() is None and cache() is None
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("pagedec-text")]


def test_a_closed_llm_says_so(tiny_path: Path) -> None:
    with LLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=16) as llm:
        running, waiting = (llm.stream(IDS, SamplingParams(max_tokens=20, ignore_eos=True)) for _ in range(2))
        next(running)
    for stream in (running, waiting):
        with pytest.raises(PagedecError, match="closed"):
            next(stream)
    for call in (lambda: generate(llm, IDS), lambda: llm.stream(IDS)):
        with pytest.raises(InvalidArgument, match="^LLM is closed: must be open"):
            call()
