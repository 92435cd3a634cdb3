"""Requests that name adapters: answers are those of the merged weights, whoever is in the step, and only one's own KV
is found."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedec import LLM, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams
from pagedec.core.resuming import Resume, ToldAnswer
from pagedec.errors import FeatureNotAvailable, InvalidArgument, ModelFileError, NotFound
from tests.engine.lora_models import GREEDY, NUM_TOKENS, PROMPTS, Adapted, bits_of, prompts_of, tokens_of

Make = Callable[..., LLM]
MIXED = list(itertools.product(range(4), range(len(PROMPTS))))
"""Every adapter, and none, with every prompt."""


def mixed(llm: LLM, adapted: Adapted, params: Any = GREEDY) -> list[Any]:
    loras = [adapted.choices[i] for i, _ in MIXED]
    return llm.generate([PROMPTS[j] for _, j in MIXED], params, use_tqdm=False, lora_request=loras)


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"max_loras": 2}, {"max_loras": 4, "max_lora_rank": 64}, {"max_loras": 2, "max_num_batched_tokens": 16},
        {"max_loras": 2, "num_blocks": 12, "block_size": 8}, {"max_loras": 2, "async_scheduling": True},
        {"max_loras": 2, "enable_prefix_caching": False}, {"max_loras": 2, "attention_backend": "reference"},
    ],
    ids=str,
)  # fmt: skip
def test_mixtures_answer_as_merged_weights_do(with_loras: Make, adapted: Adapted, settings: dict[str, Any]) -> None:
    want = [adapted.want(adapted.choices[i], PROMPTS[j]) for i, j in MIXED]
    assert len({*map(tuple, want)}) == len(want), "each adapter changes each answer"
    llm = with_loras(**settings)
    outputs = mixed(llm, adapted)
    assert tokens_of(outputs) == want
    assert [output.lora_request for output in outputs] == [adapted.choices[i] for i, _ in MIXED]
    assert all(output.outputs[0].lora_request is output.lora_request for output in outputs)
    assert llm.list_loras() == {1, 2, 3}


@pytest.mark.parametrize("settings", [{"max_loras": 1}, {"max_loras": 3, "max_num_batched_tokens": 16}], ids=str)
def test_no_bit_depends_on_the_neighbours(with_loras: Make, adapted: Adapted, settings: dict[str, Any]) -> None:
    params = SamplingParams(n=2, seed=5, max_tokens=8, logprobs=3)
    llm = with_loras()
    alone = [
        llm.generate(PROMPTS[j], params, use_tqdm=False, lora_request=adapted.choices[i])[0] for i, j in MIXED
    ]  # fmt: skip
    without = LLM(str(adapted.path), dtype="float32", skip_tokenizer_init=True, num_blocks=64)
    plain = without.generate(PROMPTS, params, use_tqdm=False)
    without.close()
    assert bits_of(alone[: len(PROMPTS)]) == bits_of(plain), "nor on whether there are places for adapters"
    assert bits_of(mixed(with_loras(**settings), adapted, params)) == bits_of(alone)


def test_one_for_all_or_one_for_each(with_loras: Make, adapted: Adapted) -> None:
    llm, (one, two, _) = with_loras(max_loras=2), adapted.loras
    short = PROMPTS[:2]
    assert tokens_of(llm.generate(short, GREEDY, use_tqdm=False, lora_request=two)) == [
        adapted.want(two, prompt) for prompt in short
    ]
    each = llm.generate(short, [GREEDY, GREEDY.clone(max_tokens=3)], use_tqdm=False, lora_request=(None, one))
    assert tokens_of(each) == [adapted.want(None, short[0]), adapted.want(one, short[1])[:3]]
    assert [output.lora_request for output in each] == [None, one]
    streamed = list(llm.stream(short[0], GREEDY, lora_request=one))
    assert streamed[-1].outputs[0].token_ids == adapted.want(one, short[0])
    assert all(output.lora_request is one for output in streamed)
    again = LoRARequest("a1", 1, f"{one.lora_path}/../a1")
    assert tokens_of(llm.generate(short[0], GREEDY, use_tqdm=False, lora_request=again)) == [
        adapted.want(one, short[0])
    ], "the same files by another path"


def test_kv_is_found_by_the_same_adapter_alone(with_loras: Make, adapted: Adapted) -> None:
    llm, prompt = with_loras(), PROMPTS[3]
    one, two, _ = adapted.loras
    same = LoRARequest("b1", 9, one.lora_path)

    def cached(lora: LoRARequest | None, salt: str = "") -> int:
        given: Any = {"prompt_token_ids": prompt, "cache_salt": salt}
        [output] = llm.generate([given], GREEDY, use_tqdm=False, lora_request=lora)
        assert output.outputs[0].token_ids == adapted.want(one if lora is same else lora, prompt)
        return output.num_cached_tokens

    whole = (len(prompt) - 1) // 16 * 16
    assert [cached(lora) for lora in (one, None, two, one, None, two)] == [0, 0, 0, whole, whole, whole]
    assert [cached(one, "x"), cached(one, "x"), cached(None, "x")] == [0, whole, 0]
    digest = llm.loras.named("a1").adapter.file.digest
    hostile = [f"{digest}\0", f"\0{digest}\0", f"\0{digest}\0x", "\0"]
    assert [cached(None, salt) for salt in hostile] == [0] * 4, "whoever knows an adapter's files finds nothing of its"
    assert cached(same) == whole, "by its content, whatever its name"
    assert llm.reset_prefix_cache() and cached(one) == 0


# ------------------------------------------------------------------------------------------------- with everything else
def test_beams(with_loras: Make, adapted: Adapted) -> None:
    llm, params = with_loras(max_loras=2), BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    prompts, loras = [PROMPTS[1]] * 4, adapted.choices
    outputs = llm.beam_search(prompts, params, loras, concurrency_limit=3)
    for lora, output in zip(loras, outputs, strict=True):
        path = adapted.path if lora is None else adapted.merged_path(lora)
        with LLM(str(path), dtype="float32", skip_tokenizer_init=True, num_blocks=64) as merged:
            [want] = merged.beam_search(prompts[0], params)
        assert [one.tokens for one in output.sequences] == [one.tokens for one in want.sequences]
        assert [one.cum_logprob for one in output.sequences] == pytest.approx(
            [one.cum_logprob for one in want.sequences], abs=1e-3
        )
        assert all(one.lora_request is lora for one in output.sequences)


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead", "jacobi", "draft_model"])
def test_speculation(with_loras: Make, adapted: Adapted, method: str) -> None:
    """Drafts of the model without adapters are still only drafts."""
    table: dict[str, Any] = {"method": method}
    if method == "draft_model":
        table |= {"model": str(adapted.path), "num_speculative_tokens": 3}
    llm = with_loras(max_loras=2, speculative_config=table, max_num_seqs=6)
    long = GREEDY.clone(max_tokens=24)
    outputs = mixed(llm, adapted, long)
    plain = mixed(with_loras(), adapted, long)
    assert tokens_of(outputs) == tokens_of(plain)
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    assert drafted > 0 or method == "lookahead", "which has seen nothing twice"
    drawn = SamplingParams(seed=3, max_tokens=12, logprobs=1)
    assert bits_of(mixed(llm, adapted, drawn)) == bits_of(mixed(with_loras(), adapted, drawn))


def test_rules(with_loras: Make, adapted: Adapted) -> None:
    """What may be drawn is asked of the adapter's own numbers."""
    llm, some = with_loras(max_loras=2), [7, 30, 31, 90, 101]
    outputs = mixed(llm, adapted, GREEDY.clone(allowed_token_ids=some, max_tokens=4))
    for (i, j), output in zip(MIXED, outputs, strict=True):
        model, tokens = adapted.merged(adapted.choices[i]), list(PROMPTS[j])
        for token in output.outputs[0].token_ids:
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            assert token == max(some, key=lambda one: float(logits[one]))
            tokens.append(token)


# ------------------------------------------------------------------------------------------------------------- sessions
def test_sessions(with_loras: Make, adapted: Adapted) -> None:
    llm, lora, prompt = with_loras(), adapted.loras[1], PROMPTS[2]
    want = adapted.want(lora, prompt)
    with llm.session(prompt, lora_request=lora) as session, llm.session(prompt) as plain:
        first = session.generate(GREEDY.clone(max_tokens=4))
        assert first.outputs[0].token_ids == want[:4] and first.lora_request is lora
        fork, mark = session.fork(), session.mark()
        outputs = session.generate_all([session, fork, plain], GREEDY.clone(max_tokens=6))
        assert tokens_of(outputs) == [want[4:], want[4:], adapted.want(None, prompt)[:6]]
        assert [output.lora_request for output in outputs] == [lora, lora, None]
        session.rollback(mark)
        assert tokens_of(session.stream(GREEDY.clone(max_tokens=6)))[-1] == want[4:]
        fork.rollback(10)
        fork.append(prompts_of((20,), seed=7)[0])
        behind = [*prompt, *prompts_of((20,), seed=7)[0]]
        assert fork.token_ids == behind
        all_kept = fork.generate(SamplingParams(n=2, seed=1, max_tokens=3), keep="all")
        assert [branch.num_tokens for branch in all_kept.branches] == [len(behind) + 3] * 2
        scores = fork.score([[5, 9, 60], [5, 9, 61], [100]])
    with torch.no_grad():
        model = adapted.merged(lora)
        for score in scores:
            logits = model(torch.tensor([[*behind, *score.token_ids]])).logits[0].log_softmax(-1)
            own = [float(logits[len(behind) - 1 + i, t]) for i, t in enumerate(score.token_ids)]
            assert score.token_logprobs == pytest.approx(own, abs=1e-3)
    assert llm.engine.sessions.num_branches == 0


def test_a_session_goes_on_with_its_adapter_when_that_is_removed(with_loras: Make, adapted: Adapted) -> None:
    llm, lora, prompt = with_loras(), adapted.loras[0], PROMPTS[0]
    session = llm.session(prompt, lora_request=lora)
    assert llm.remove_lora(1) and not llm.remove_lora(1) and llm.list_loras() == set()
    llm.generate(PROMPTS[1], GREEDY, use_tqdm=False, lora_request=adapted.loras[1])  # it has the only place now
    assert tokens_of([session.fork().generate(GREEDY), session.generate(GREEDY)]) == [adapted.want(lora, prompt)] * 2
    assert [file.path for file in llm.engine.adapters.files.values()] == [lora.lora_path]
    session.close()
    assert llm.engine.adapters.files == {}


# ------------------------------------------------------------------------------------------------- adapters come and go
def test_adapters_by_hand(with_loras: Make, adapted: Adapted) -> None:
    llm, (one, two, three) = with_loras(max_loras=2), adapted.loras
    assert llm.list_loras() == set() and llm.add_lora(one) and llm.add_lora(two) and llm.add_lora(one)
    assert llm.list_loras() == {1, 2} and llm.pin_lora(2)
    with pytest.raises(InvalidArgument, match="^lora_id is 3: must be that of an adapter that was added: 1, 2$"):
        llm.pin_lora(3)
    assert llm.remove_lora(2) and llm.list_loras() == {1} and not llm.remove_lora(3)
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=three)[0].finished
    assert llm.list_loras() == {1, 3}
    assert tokens_of(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=two)) == [
        adapted.want(two, PROMPTS[0])
    ], "named again, it is read again"
    assert [request.lora_name for request in llm.loras.requests] == ["a1", "a3", "a2"]
    assert llm.loras.load("a1", one.lora_path) is one and llm.loras.load("b", two.lora_path).lora_int_id == 4
    assert llm.loras.requests[3] == LoRARequest("b", 4, two.lora_path)


def test_removal_while_it_runs(with_loras: Make, adapted: Adapted, tmp_path: Path) -> None:
    """What runs has the files that it began with; the name is free for others at once."""
    llm, lora = with_loras(max_loras=1), adapted.loras[0]
    other = LoRARequest("a1", 1, adapted.write("other", 8, seed=11).lora_path)
    stream = llm.stream(PROMPTS[0], GREEDY, lora_request=lora)
    begun = [next(stream) for _ in range(3)]
    with pytest.raises(InvalidArgument, match=r"^lora_path is .*other.*: must be .*a1, from which a1 was read"):
        llm.add_lora(other)
    assert llm.remove_lora(1)
    [output] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=other)
    assert output.outputs[0].token_ids not in [adapted.want(one, PROMPTS[0]) for one in (None, lora)]
    assert output.num_cached_tokens == 0
    *_, last = [*begun, *stream]
    assert last.outputs[0].token_ids == adapted.want(lora, PROMPTS[0]) and last.lora_request is lora
    assert llm.engine.adapters.files == {}, "nobody goes through them any more"


def test_what_waits_to_be_taken_keeps_its_adapter(with_loras: Make, adapted: Adapted) -> None:
    llm, lora = with_loras(), adapted.loras[2]
    prepared = llm.prepare(PROMPTS, GREEDY, lora=lora)
    assert llm.remove_lora(3)
    assert tokens_of(llm._run(prepared, False, False)) == [adapted.want(lora, prompt) for prompt in PROMPTS]
    assert llm.engine.adapters.files == {}


def test_a_request_that_is_not_taken_holds_nothing(with_loras: Make, adapted: Adapted) -> None:
    llm, lora = with_loras(), adapted.loras[0]
    first = llm.prepare([PROMPTS[0]], GREEDY, request_id="a", lora=lora)
    again = llm.prepare([PROMPTS[0]], GREEDY, request_id="a", lora=lora)
    llm.engine.add(first[0].request)
    with pytest.raises(InvalidArgument, match="^request_id is 'a'"):
        llm.engine.add(again[0].request)
    llm.engine.abort("a")
    assert llm.remove_lora(1) and llm.engine.adapters.files == {}


# ------------------------------------------------------------------------------------------------------------- mistakes
def test_names_numbers_and_files_are_of_one_adapter(with_loras: Make, adapted: Adapted) -> None:
    llm, (one, two, _) = with_loras(), adapted.loras
    assert llm.add_lora(one)
    for wrong, message in (
        (LoRARequest("a1", 7, one.lora_path), "^lora_int_id is 7: must be 1, that of adapter 'a1'$"),
        (
            LoRARequest("b", 1, one.lora_path),
            "^lora_int_id is 1: must be another one for adapter 'b': .* 'a1'$",
        ),
        (LoRARequest("a1", 1, two.lora_path), "^lora_path is '.*a2': must be .*a1, from which a1 was read; remove it"),
    ):
        for call in (llm.add_lora, lambda lora: llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=lora)):
            with pytest.raises(InvalidArgument, match=message):
                call(wrong)
    assert llm.list_loras() == {1} and llm._num_requests == 0


def test_adapters_that_do_not_fit(with_loras: Make, adapted: Adapted, tmp_path: Path) -> None:
    llm = with_loras(max_lora_rank=8)
    with pytest.raises(InvalidArgument, match="^max_lora_rank is 8: must be at least 16, the rank of the adapter at"):
        llm.generate(PROMPTS[0], GREEDY, lora_request=adapted.loras[1])
    (tmp_path / "empty").mkdir()
    for path, problem in ((tmp_path / "none", "does not exist"), (tmp_path / "empty", "adapter_config.json")):
        with pytest.raises(ModelFileError, match=problem):
            llm.add_lora(LoRARequest("x", 1, str(path)))
    with pytest.raises(InvalidArgument, match=r"^lora_request is a list of 1: must be one, or one or None for each of"):
        llm.generate(PROMPTS, GREEDY, lora_request=[None])
    assert llm.list_loras() == set() and llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].finished


def test_a_model_without_places(tiny: Make, adapted: Adapted) -> None:
    llm, lora = tiny(), adapted.loras[0]
    for call in (
        lambda: llm.generate(PROMPTS, GREEDY, lora_request=lora), lambda: llm.session(PROMPTS[0], lora_request=lora),
        lambda: llm.stream(PROMPTS[0], lora_request=lora), lambda: llm.add_lora(lora),
        lambda: llm.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=2), lora),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="^lora_request is 'a1': must be None: .* without enable_lora$"):
            call()
    assert llm.list_loras() == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1, "p"), "lora_name is ''"), ((None, 1, "p"), "lora_name is None"), (("a\0", 1, "p"), "lora_name is 'a"),
        (("a", 0, "p"), "lora_int_id is 0: must be a whole number above 0"), (("a", True, "p"), "lora_int_id is True"),
        (("a", "1", "p"), "lora_int_id is '1'"), (("a", 1, ""), "lora_path is ''"),
        (("a", 1, b"p"), "lora_path is b'p'"), (("a", 1, None), "lora_path is None"),
    ],
)  # fmt: skip
def test_wrong_values(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        LoRARequest(*arguments)


def test_a_request_is_a_value() -> None:
    request = LoRARequest("sql", 3, "/there", base_model_name="m")
    assert request == LoRARequest("sql", 3, "/there") == pickle.loads(pickle.dumps(request))
    assert repr(request) == "LoRARequest(lora_name='sql', lora_int_id=3, lora_path='/there')"
    assert hash(request) == hash(LoRARequest("sql", 3, "/there")) and request != LoRARequest("sql", 4, "/there")
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "/there")
    by_path: Any = Path("/there")
    assert LoRARequest("sql", 3, by_path) == request and type(LoRARequest("sql", 3, by_path).lora_path) is str
    for name, value in (("load_inplace", True), ("long_lora_max_len", 4096), ("tensorizer_config_dict", {"a": 1})):
        with pytest.raises(FeatureNotAvailable, match=f"^{name} is .* not available in this version; available: "):
            LoRARequest("sql", 3, "/there", **{name: value})


# --------------------------------------------------------------------------------------------------------- asynchronous
def test_streams_with_an_abort_beside_them(adapted: Adapted) -> None:
    async def answer(llm: AsyncLLM, i: int, j: int) -> list[int]:
        outputs = [output async for output in llm.generate(PROMPTS[j], GREEDY, lora_request=adapted.choices[i])]
        assert all(output.lora_request is adapted.choices[i] for output in outputs)
        return list(outputs[-1].outputs[0].token_ids)

    async def cut(llm: AsyncLLM, i: int) -> str | None:
        params, outputs = GREEDY.clone(max_tokens=40), []
        async for output in llm.generate(PROMPTS[0], params, f"cut-{i}", lora_request=adapted.choices[i]):
            outputs.append(output)
            await llm.abort(f"cut-{i}")
        reason: str | None = outputs[-1].outputs[0].finish_reason
        return reason

    async def main() -> None:
        settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64, "max_loras": 2}
        async with AsyncLLM(str(adapted.path), enable_lora=True, **settings) as llm:
            got, reasons = await asyncio.gather(
                asyncio.gather(*(answer(llm, i, j) for i, j in MIXED)), asyncio.gather(*(cut(llm, i) for i in range(4)))
            )
            assert got == [adapted.want(adapted.choices[i], PROMPTS[j]) for i, j in MIXED]
            assert reasons == ["abort"] * 4
            assert await llm.list_loras() == {1, 2, 3} and await llm.remove_lora(2) and await llm.pin_lora(3)
            assert await llm.list_loras() == {1, 3} and await llm.add_lora(adapted.loras[1])
            async with llm.session(PROMPTS[0], lora_request=adapted.loras[2]) as session:
                assert (await session.generate(GREEDY)).outputs[0].token_ids == adapted.want(
                    adapted.loras[2], PROMPTS[0]
                )
            beams = BeamSearchParams(beam_width=2, max_tokens=4)
            [found] = [one async for one in llm.beam_search(PROMPTS[0], None, beams, adapted.loras[0])]
            assert found.lora_request is adapted.loras[0] and len(found.outputs) == 2

    asyncio.run(main())


def test_an_answer_that_was_cut_goes_on(adapted: Adapted) -> None:
    lora, prompt = adapted.loras[0], PROMPTS[1]
    want = adapted.want(lora, prompt)

    async def main() -> None:
        settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64}
        async with AsyncLLM(str(adapted.path), enable_lora=True, **settings) as llm:
            told = Resume((ToldAnswer(want[:4]),))
            outputs = [one async for one in llm.resumable(prompt, GREEDY, resume=told, lora_request=lora)]
            assert outputs[-1].outputs[0].token_ids == want and len(want) == NUM_TOKENS
            assert outputs[-1].lora_request is lora

    asyncio.run(main())


def test_who_holds_one_goes_through_it_though_it_is_gone(with_loras: Make, adapted: Adapted) -> None:
    """And where another one has its name meanwhile."""
    llm, (one, two, _), prompt = with_loras(), adapted.loras, PROMPTS[1]
    llm.add_lora(one)
    known = llm.loras.named("a1")
    assert llm.remove_lora(1) and llm.list_loras() == set()
    llm.add_lora(LoRARequest("a1", 1, two.lora_path))
    both = llm.generate([prompt] * 2, GREEDY, use_tqdm=False, lora_request=[known, llm.loras.named("a1")])
    assert tokens_of(both) == [adapted.want(one, prompt), adapted.want(two, prompt)]
    with llm.session(prompt, lora_request=known) as session:
        assert session.generate(GREEDY).outputs[0].token_ids == adapted.want(one, prompt)
    with pytest.raises(NotFound, match="^adapter 'b1' does not exist; known are a1$"):
        llm.loras.named("b1")
    assert llm.list_loras() == {1} and llm.engine.adapters.files == {}
