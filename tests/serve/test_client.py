"""`pagedec.client` gives what `LLM` and its sessions give: the same tokens, texts, reports and errors."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pagedec import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    InvalidArgument,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    RequestsFailed,
    SamplingParams,
    StructuredOutputsParams,
    UnusedWarning,
)
from pagedec.client import AsyncClient, Client, ServedTrie, ServerError
from pagedec.client.asking import as_parameters
from pagedec.constraints import TokenTrie
from pagedec.errors import FeatureNotAvailable, NotFound
from pagedec.fields import field_names
from pagedec.params import RequestParams
from pagedec.serve import queueing
from pagedec.serve.access import Client as Somebody
from pagedec.serve.orders import Limits, read_order
from pagedec.serve.server_config import ServerConfig
from pagedec.serve.statuses import Refusal
from tests.serve.serving import Serving, client_of, plain

Serve = Callable[..., Serving]
PROMPT = [5 + i * 7 % 120 for i in range(40)]
ITEMS = [[9, 8, 7], [9, 8, 3, 4], [11, 12], [11, 13, 14, 15]]
DRAINING_SOON = Refusal("UNAVAILABLE", "DRAINING", "the server lets no more requests in", 0.1)
DRAFTED = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


def test_it_needs_no_torch() -> None:
    program = (
        "import pagedec.client, sys; print([m for m in ('torch', 'tokenizers', 'pagedec.llm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# ---- arguments
ALIKE = [(LLM, Client), (AsyncLLM, AsyncClient)]


@pytest.mark.parametrize(("near", "far"), ALIKE)
def test_each_argument_of_an_llm_is_one_of_a_client_in_the_same_place(near: type, far: type) -> None:
    methods = [
        name for name, _ in inspect.getmembers(near, inspect.isfunction) if name[0] != "_" and hasattr(far, name)
    ]
    assert {"generate", "chat", "beam_search", "session"} <= set(methods)
    for name in methods:
        own, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in (near, far))
        assert [each for each in theirs if each in own] == list(own), name
        assert all(theirs[each].replace(annotation="") == own[each].replace(annotation="") for each in own), name


def test_what_only_an_llm_can_take_is_refused_by_name() -> None:
    """Nobody is asked."""
    lora, beams, hi = (
        LoRARequest("mine", 1, "/srv/mine"),
        BeamSearchParams(max_tokens=2),
        [{"role": "user", "content": "Hi"}],
    )
    client, coroutines = Client("127.0.0.1:1"), AsyncClient("127.0.0.1:1")

    async def first(outputs: AsyncIterator[RequestOutput]) -> None:
        await anext(outputs)

    for call in (
        lambda: client.generate(PROMPT, lora_request=lora), lambda: client.chat(hi, lora_request=lora),
        lambda: client.beam_search(PROMPT, beams, lora), lambda: client.stream(PROMPT, lora_request=lora),
        lambda: asyncio.run(first(coroutines.generate(PROMPT, lora_request=lora))),
        lambda: asyncio.run(first(coroutines.chat(hi, lora_request=lora))),
        lambda: asyncio.run(first(coroutines.beam_search(PROMPT, None, beams, lora))),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="^lora_request is .*mine.*: must be a ServedLora"):
            call()  # type: ignore[no-untyped-call]
    for call in (
        lambda: client.generate(PROMPT, tokenization_kwargs=lora), lambda: client.chat(hi, tokenization_kwargs=lora),
        lambda: asyncio.run(first(coroutines.generate(PROMPT, tokenization_kwargs=lora))),
        lambda: asyncio.run(first(coroutines.chat(hi, tokenization_kwargs=lora))),
    ):  # fmt: skip
        with pytest.raises(FeatureNotAvailable, match="^tokenization_kwargs is .*mine.*: tokenizing with options"):
            call()  # type: ignore[no-untyped-call]
    for one in (client, coroutines):
        for given in ({"messages": hi}, {"prompt": PROMPT}):
            with pytest.raises(InvalidArgument, match="^chat_template is '{{ messages }}': must be None: the server "):
                one.session(chat_template="{{ messages }}", **given)  # type: ignore[attr-defined]


# ---- parameters
EVERY = {
    "max_tokens": 30, "max_time": 2.5, "min_tokens": 2, "stop": ("x", "y"), "stop_token_ids": (7, 9),
    "ignore_eos": True, "include_stop_str_in_output": True, "seed": 2**64 - 1, "presence_penalty": 0.5,
    "frequency_penalty": -0.25, "repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "logit_bias": {3: 1.5, 9: -100.0},
    "allowed_token_ids": (4, 8), "bad_words": ("z",), "logprobs": -1, "prompt_logprobs": 2,
    "skip_special_tokens": False, "truncate_prompt_tokens": 5,
}  # fmt: skip
SAMPLED = {"n": 3, "temperature": 0.75, "top_p": 0.5, "top_k": 4, "min_p": 0.25, "speculative": {"method": "ngram"}}
BEAMED = {
    "beam_width": 6, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": "never",
    "num_beam_groups": 3, "diversity_penalty": 0.5, "hf_semantics": "4.38", "speculative": False,
}  # fmt: skip
DRAWN = {"do_sample": True, "temperature": 1.5, "top_p": 0.5, "top_k": 9, "min_p": 0.125, "early_stopping": True}
HERE = {"output_kind", "stream_interval", "spaces_between_special_tokens", "allowed_tokens_fn"}
"""Fields that do not travel: what a stream's outputs hold is seen to here; the last ones mean nothing, or cannot."""
TRIE = TokenTrie([[1, 2], [3]])
LIMITS = Limits(ServerConfig(), {"temperature": 0.5, "max_tokens": 3, "top_k": 5}, 4096, 131, {"items": TRIE})


def there_and_back(params: RequestParams) -> RequestParams:
    return read_order(as_parameters(params), LIMITS, RequestOutputKind.CUMULATIVE).params


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        BeamSearchParams(max_tokens=4),
        SamplingParams(**EVERY, **SAMPLED),
        SamplingParams(speculative=False, detokenize=False),
        BeamSearchParams(**EVERY, **BEAMED),
        BeamSearchParams(max_tokens=8, **DRAWN),
        SamplingParams(structured_outputs={"json": {"type": "object"}, "disable_any_whitespace": True}),
        SamplingParams(structured_outputs={"json": True, "disable_additional_properties": True}),
        SamplingParams(structured_outputs={"json_object": True, "whitespace_pattern": "[ ]?"}),
        SamplingParams(structured_outputs={"regex": "a+"}),
        SamplingParams(structured_outputs={"choice": ["a", "b"]}),
        BeamSearchParams(structured_outputs={"grammar": 'start: "a"'}, max_tokens=3),
    ],
)
def test_every_field_travels(params: RequestParams) -> None:
    back = there_and_back(params)
    assert type(back) is type(params)
    for name in set(field_names(type(params))) - HERE:
        assert getattr(back, name) == getattr(params, name), name


def test_every_field_is_tried() -> None:
    constraints = {"structured_outputs", "token_trie", "detokenize"}
    assert {*EVERY, *SAMPLED, *HERE, *constraints} == set(field_names(SamplingParams))
    assert {*EVERY, *BEAMED, *DRAWN, *HERE, *constraints} == set(field_names(BeamSearchParams))
    for values, kind in (({**EVERY, **SAMPLED}, SamplingParams), ({**EVERY, **BEAMED}, BeamSearchParams)):
        made, default = kind(**values), kind(max_tokens=1)  # type: ignore[arg-type]
        assert [name for name in values if getattr(made, name) == getattr(default, name)] == []


def test_what_cannot_travel_is_said() -> None:
    assert there_and_back(SamplingParams(token_trie=ServedTrie("items"))).token_trie is TRIE
    with pytest.raises(InvalidArgument, match="^token_trie is .*: must be a ServedTrie"):
        as_parameters(SamplingParams(token_trie=TRIE))
    with pytest.warns(UnusedWarning, match="^temperature changes nothing in a beam search without do_sample$"):
        as_parameters(BeamSearchParams(max_tokens=4, temperature=0.5))
    with pytest.raises(InvalidArgument, match="^allowed_tokens_fn is a function: must be None"):
        as_parameters(SamplingParams(allowed_tokens_fn=lambda tokens: None))
    with pytest.raises(
        InvalidArgument, match="^sampling_params is .*: must be a SamplingParams, a BeamSearchParams, or CustomParams"
    ):
        as_parameters(RequestParams())


# ---- requests
CASES: dict[str, RequestParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "sampled": SamplingParams(n=3, temperature=0.9, top_k=40, max_tokens=20, logprobs=2, prompt_logprobs=1, seed=5),
    "beams": BeamSearchParams(beam_width=5, num_return_sequences=3, length_penalty=0.6, max_tokens=20, logprobs=0),
    "drawn beams": BeamSearchParams(beam_width=4, do_sample=True, temperature=1.3, max_tokens=20, seed=11),
    "drafted": SamplingParams(temperature=0, max_tokens=60, speculative=DRAFTED),
    "trie": SamplingParams(temperature=1.0, max_tokens=6, seed=3, token_trie=ServedTrie("items")),
    "beams in a trie": BeamSearchParams(beam_width=3, max_tokens=6, token_trie=ServedTrie("items")),
}


@pytest.fixture
def trie_file(tmp_path: Path) -> str:
    TokenTrie(ITEMS).save(tmp_path / "items.trie")
    return str(tmp_path / "items.trie")


def test_requests_are_as_offline(serve: Serve, llm: LLM, trie_file: str) -> None:
    own = TokenTrie.open(trie_file)
    local = [p if p.token_trie is None else p.clone(token_trie=own) for p in CASES.values()]
    wanted = llm.generate([PROMPT] * len(local), local, use_tqdm=False)
    with client_of(serve(trie=(f"items={trie_file}",))) as client:
        together = client.generate([PROMPT] * len(local), list(CASES.values()), use_tqdm=False)
        assert [plain(output) for output in together] == [plain(output) for output in wanted]
        for params, want in zip(CASES.values(), wanted, strict=True):
            [alone] = client.generate(PROMPT, params)
            assert plain(alone) == plain(want) and alone.metrics is not None and want.metrics is not None
            assert alone.metrics.num_output_tokens == want.metrics.num_output_tokens
            for kind in RequestOutputKind:
                for interval in (1, 7):
                    outputs = list(client.stream(PROMPT, params.clone(output_kind=kind, stream_interval=interval)))
                    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
                    if kind is not RequestOutputKind.DELTA:
                        assert plain(outputs[-1]) == plain(want)
                        continue
                    for i, answer in enumerate(want.outputs):
                        parts = [part for output in outputs for part in output.outputs if part.index == i]
                        assert [token for part in parts for token in part.token_ids] == answer.token_ids
                        assert [t for part in parts for t in part.logprobs or ()] == (answer.logprobs or [])
                        assert parts[-1].finish_reason == answer.finish_reason


TEXTS: dict[str, RequestParams] = {
    "choice": SamplingParams(
        temperature=0, structured_outputs=StructuredOutputsParams(choice=["red", "green", "blue"]), logprobs=1
    ),
    "regex": SamplingParams(temperature=1.0, seed=4, structured_outputs={"regex": "[a-z]{3,9}"}, max_tokens=12),
    "json": SamplingParams(
        temperature=0, max_tokens=24,
        structured_outputs={"json": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}},
    ),
    "grammar": BeamSearchParams(
        beam_width=2, max_tokens=6, structured_outputs={"grammar": 'start: ("yes" | "no") " "? "!"'}
    ),
    "stops": SamplingParams(n=2, temperature=0.8, seed=1, stop=["\n", "."], max_tokens=24),
}  # fmt: skip
QUESTION = "Name a color:"


def test_texts_are_as_offline(text_server: Serving, text_llm: LLM) -> None:
    llm = text_llm
    with client_of(text_server) as client:
        wanted = llm.generate([QUESTION] * len(TEXTS), list(TEXTS.values()), use_tqdm=False)
        got = client.generate([QUESTION] * len(TEXTS), list(TEXTS.values()), use_tqdm=False)
        assert [plain(output) for output in got] == [plain(output) for output in wanted]
        for params, want in zip(TEXTS.values(), wanted, strict=True):
            *_, last = client.stream(QUESTION, params)
            assert plain(last) == plain(want)
        chat = [{"role": "user", "content": "Say hello."}]
        few = SamplingParams(temperature=0, max_tokens=6)
        assert plain(client.chat(chat, few)[0]) == plain(llm.chat(chat, few, use_tqdm=False)[0])
        beams = BeamSearchParams(beam_width=2, max_tokens=5)
        assert client.beam_search([QUESTION, [5, 9]], beams) == llm.beam_search([QUESTION, [5, 9]], beams)
        ids = client.tokenize(QUESTION)
        assert ids == llm.get_tokenizer().encode(QUESTION) and client.detokenize(ids) == QUESTION
        assert client.tokenize(messages=chat)[0] in llm.get_tokenizer().byte_table.special_ids
        assert client.models()[0].name == "smollm2"


def test_deadlines_and_retries(serve: Serve) -> None:
    serving = serve(engine={"num_blocks": 1024, "max_model_len": 16384})
    with client_of(serving) as client:
        with pytest.raises(ServerError) as caught:
            client.generate(PROMPT, SamplingParams(ignore_eos=True), timeout=0.2)
        assert caught.value.status == caught.value.code == "DEADLINE_EXCEEDED"
        said = "^DEADLINE_EXCEEDED: timeout is 0.2: the call had not ended after so many seconds$"
        for num_prompts in (1, 2):
            with pytest.raises(ServerError, match=said):
                client.generate([PROMPT] * num_prompts, SamplingParams(ignore_eos=True), use_tqdm=False, timeout=0.2)
        with pytest.raises(ServerError, match=said):
            list(client.stream(PROMPT, SamplingParams(ignore_eos=True), timeout=0.2))
        assert pickle.loads(pickle.dumps(caught.value)).code == "DEADLINE_EXCEEDED"
        assert client.generate(PROMPT, SamplingParams(max_tokens=2), timeout=1e18)[0].finished, "as good as none"
        serving.server.lifecycle.refusal = refusal = DRAINING_SOON
        began = time.monotonic()
        threading.Timer(0.3, lambda: setattr(serving.server.lifecycle, "refusal", None)).start()
        assert client.generate(PROMPT, SamplingParams(max_tokens=2))[0].finished
        assert time.monotonic() - began > 0.25
        serving.server.lifecycle.refusal = refusal
        with pytest.raises(ServerError, match="^UNAVAILABLE, DRAINING: the server lets no more requests in$"):
            client.session(PROMPT)
        with pytest.raises(ServerError):
            client.generate(PROMPT, SamplingParams(max_tokens=2), timeout=0.15)
        [output] = client.generate(PROMPT, SamplingParams(max_tokens=2), timeout=0.15, on_error="return")
        assert isinstance(output.error, ServerError) and not output.outputs
        serving.server.lifecycle.refusal = None
    nobody = Client("127.0.0.1:1", retries=5)
    with pytest.raises(ServerError) as caught, nobody:
        nobody.models()
    assert (caught.value.status, caught.value.code, caught.value.reason) == ("UNAVAILABLE", "UNAVAILABLE", "")


def test_tokens_and_failures(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(
        '[ada]\ntokens = ["ada-0123456789abcdef"]\nmax_requests = 1\n', encoding="utf-8"
    )
    serving = serve(api_keys=str(tmp_path / "keys.toml"))
    with client_of(serving) as client, pytest.raises(ServerError, match="^UNAUTHENTICATED, TOKEN_MISSING: "):
        client.models()
    with client_of(serving, token="ada-0123456789abcdef") as client:
        outputs = client.generate([PROMPT] * 4, SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [40] * 4, "one after the other"


def test_a_model_that_the_server_has_not_is_named(serve: Serve) -> None:
    serving = serve(served_model_name="mine")
    few = SamplingParams(max_tokens=2)
    with client_of(serving, model="yours") as client:
        for ask in (
            lambda: client.generate(PROMPT, few),
            lambda: client.generate([PROMPT] * 2, few, use_tqdm=False),
            lambda: list(client.stream(PROMPT, few)),
            lambda: client.session(PROMPT),
            lambda: client.tokenize("a"),
            lambda: client.detokenize([5]),
            client.get_default_sampling_params,
        ):
            with pytest.raises(NotFound, match="^model 'yours' does not exist; known are mine$"):
                ask()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("limits", [{"max_requests": 4}, {"max_requests": 1}, {"max_client_tokens": 100}])
def test_a_batch_has_no_more_running_than_it_may(serve: Serve, limits: dict[str, int]) -> None:
    serving = serve(**limits)
    few = SamplingParams(max_tokens=8, temperature=0)
    with client_of(serving) as client, client_of(serving) as other:
        alone = client.generate([PROMPT], few)
        done: list[list[RequestOutput]] = []

        def batch() -> None:
            done.append(client.generate([PROMPT] * 40, few, use_tqdm=False))

        running = threading.Thread(target=batch)
        running.start()
        deadline, num_others = time.monotonic() + 60, 0
        while running.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(ServerError):
                other.generate([PROMPT], few)
                num_others += 1
        running.join(60)
        [outputs] = done
        assert {tuple(output.outputs[0].token_ids) for output in outputs} == {tuple(alone[0].outputs[0].token_ids)}
        assert num_others > 0, "others find a place meanwhile"
    serving.whole()


def test_a_batch_waits_for_others_for_a_while_only(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queueing, "PATIENCE", 0.3)
    serving = serve(max_requests=1)
    with client_of(serving) as client, serving.server.gateway.admission.seat(Somebody(name="x"), 1, None):
        with pytest.raises(RequestsFailed) as caught:
            client.generate([PROMPT] * 3, SamplingParams(max_tokens=2), use_tqdm=False)
        assert [error.reason for error in caught.value.errors if isinstance(error, ServerError)] == ["QUEUE_FULL"] * 3
    serving.whole()
