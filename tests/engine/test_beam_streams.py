"""Streams of beams: what no step can change any more is shown as it comes, and never taken back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from pagedec import LLM, AsyncLLM, RequestOutput, SamplingParams
from pagedec.params import BeamSearchParams, RequestOutputKind
from tests.batch.tiny import make_tiny

SETTINGS = {"load_format": "dummy", "num_blocks": 256, "seed": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SETTINGS) as made:
        yield made


def beams(llm: LLM, letters: str, seed: int, **more: object) -> BeamSearchParams:
    """Beams over few tokens, one of which is far more probable than the others every now and then: paths meet."""
    rng = random.Random(seed)
    ids = llm.get_tokenizer().encode(letters)
    width = rng.randint(2, 5)
    given = {
        "beam_width": width, "num_return_sequences": rng.randint(1, width), "max_tokens": rng.randint(10, 60),
        "allowed_token_ids": sorted(set(ids)), "logit_bias": {ids[0]: rng.choice([0, 2.0])}, "logprobs": 0,
        "length_penalty": rng.choice([-1.0, 0.0, 1.0]), "early_stopping": rng.choice([True, False, "never"]),
        "do_sample": rng.random() < 0.3, "seed": seed,
    }  # fmt: skip
    return BeamSearchParams(**given | more)


def read(llm: LLM, prompt: str, params: BeamSearchParams) -> tuple[list[RequestOutput], RequestOutput]:
    *before, last = llm.stream(prompt, params)
    [whole] = llm.generate(prompt, params, use_tqdm=False)
    assert last.finished and not any(output.finished for output in before)
    return before, last if params.output_kind is RequestOutputKind.DELTA else check_last(last, whole)


def check_last(last: RequestOutput, whole: RequestOutput) -> RequestOutput:
    assert last.outputs == whole.outputs
    return last


@pytest.mark.sampled(10)
@pytest.mark.parametrize("letters", ["abcd", "é→a", "漢字"])
def test_all_answers_grow_by_what_they_have_in_common(llm: LLM, letters: str) -> None:
    num_early = 0
    for seed in range(6):
        params = beams(llm, letters, seed)
        before, last = read(llm, f"prompt {seed}", params)
        for output in before:
            assert [answer.index for answer in output.outputs] == list(range(params.num_answers))
            for answer, final in zip(output.outputs, last.outputs, strict=True):
                assert final.text.startswith(answer.text)
                assert final.token_ids[: len(answer.token_ids)] == answer.token_ids and answer.token_ids
                assert final.logprobs is not None and final.logprobs[: len(answer.token_ids)] == answer.logprobs
                assert answer.finish_reason is None and answer.score is None
        for one, other in pairwise(before):
            assert len(one.outputs[0].token_ids) < len(other.outputs[0].token_ids)
        num_early += sum(len(output.outputs[0].text) > 0 for output in before)
    assert num_early > 10


def test_pieces_add_up(llm: LLM) -> None:
    num_pieces = 0
    for seed in range(12):
        params = beams(llm, "ab→", seed)
        pieces = [*llm.stream("x", params.clone(output_kind=RequestOutputKind.DELTA))]
        [whole] = llm.generate("x", params, use_tqdm=False)
        num_pieces += len(pieces) - 1
        for i, answer in enumerate(whole.outputs):
            parts = [piece.outputs[i] for piece in pieces]
            assert "".join(part.text for part in parts) == answer.text
            assert [token for part in parts for token in part.token_ids] == answer.token_ids
            assert [table for part in parts for table in part.logprobs or ()] == answer.logprobs
            assert (parts[-1].score, parts[-1].ancestry) == (answer.score, answer.ancestry)
    assert num_pieces > 20
    only = [*llm.stream("x", params.clone(output_kind=RequestOutputKind.FINAL_ONLY))]
    assert [output.outputs for output in only] == [whole.outputs]


def test_what_may_begin_a_stop_string_is_held_back(llm: LLM) -> None:
    num_held = num_stopped = 0
    for seed in range(20):
        params = beams(llm, "abc", seed, stop=["bcab", "cc", "aab"], min_tokens=seed % 7)
        before, last = read(llm, "y", params)
        num_stopped += sum(isinstance(answer.stop_reason, str) for answer in last.outputs)
        for output in before:
            for answer, final in zip(output.outputs, last.outputs, strict=True):
                assert final.text.startswith(answer.text)
                num_held += len(answer.text) < len(answer.token_ids)
    assert num_held > 5 and num_stopped > 5


def test_beside_other_requests_and_for_coroutines(model: Path, llm: LLM) -> None:
    params = beams(llm, "abcd", 7, max_tokens=50, num_return_sequences=2)
    expected = [
        llm.generate("z", own, use_tqdm=False)[0].outputs for own in (params, SamplingParams(max_tokens=20, seed=1))
    ]

    async def main() -> list[list[RequestOutput]]:
        async with AsyncLLM(str(model), **SETTINGS) as async_llm:

            async def outputs(own: object) -> list[RequestOutput]:
                return [output async for output in async_llm.generate("z", own)]

            return await asyncio.gather(
                outputs(params), outputs(SamplingParams(max_tokens=20, seed=1)), outputs(params)
            )

    read = asyncio.run(main())
    assert [outputs[-1].outputs for outputs in read] == [*expected, expected[0]]
    for outputs in (read[0], read[2]):
        assert all(
            final.text.startswith(answer.text)
            for output in outputs
            for answer, final in zip(output.outputs, expected[0], strict=True)
        )


def test_a_stream_that_is_left_early(llm: LLM) -> None:
    params = beams(llm, "abcd", 3, max_tokens=200, num_return_sequences=2)
    stream = llm.stream("w", params)
    first = next(stream)
    stream.close()
    assert first.outputs[0].text and first.outputs[0].text == first.outputs[1].text
    llm.reset_prefix_cache()
    assert not llm.engine.scheduler.requests
