"""`LLM.beam_search` in vLLM's form, and the same searches through `generate`, mixed with other requests."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedec import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    InvalidArgument,
    RequestsFailed,
    SamplingParams,
    UnusedWarning,
)
from pagedec.decoders.beam import Beam
from pagedec.errors import FeatureNotAvailable
from pagedec.outputs import BeamSearchOutput

Tiny = Callable[..., LLM]
PROMPTS = ["The capital of France is", "Once upon a time"]
PARAMS = BeamSearchParams(beam_width=4, max_tokens=12)


def test_sequences_are_the_answers_of_generate(text_llm: LLM) -> None:
    outputs = text_llm.beam_search(PROMPTS, PARAMS)
    plain = text_llm.generate(PROMPTS, PARAMS.clone(logprobs=0), use_tqdm=False)
    for prompt, output, expected in zip(PROMPTS, outputs, plain, strict=True):
        assert isinstance(output, BeamSearchOutput) and len(output.sequences) == 4 == len(expected.outputs)
        scores = [sequence.score for sequence in output.sequences]
        assert scores == sorted(scores, reverse=True) == [answer.score for answer in expected.outputs]
        for sequence, answer in zip(output.sequences, expected.outputs, strict=True):
            assert sequence.tokens[: len(expected.prompt_token_ids)] == expected.prompt_token_ids
            generated = sequence.tokens[len(expected.prompt_token_ids) :]
            assert generated == answer.token_ids[: len(generated)] and len(answer.token_ids) - len(generated) <= 1
            assert sequence.text == prompt + answer.text and sequence.logprobs == answer.logprobs
            assert sequence.cum_logprob == pytest.approx(answer.score * len(answer.token_ids), abs=1e-4)
            assert sequence.cum_logprob == answer.cumulative_logprob
            assert answer.ancestry is not None and len(answer.ancestry) == len(answer.token_ids)
            assert answer.ancestry[0] == 0 and all(0 <= beam < 4 for beam in answer.ancestry)


def test_answers_that_are_asked_for(text_llm: LLM) -> None:
    [best] = text_llm.beam_search(PROMPTS[0], PARAMS.clone(num_return_sequences=1))
    [four] = text_llm.beam_search(PROMPTS[0], PARAMS)
    assert best.sequences == four.sequences[:1]
    [ids] = text_llm.beam_search([{"prompt_token_ids": four.sequences[0].tokens[:5]}], PARAMS)
    assert [sequence.text for sequence in ids.sequences] == [sequence.text for sequence in four.sequences]
    [more] = text_llm.beam_search(PROMPTS[0], PARAMS.clone(logprobs=3, detokenize=False))
    assert all(len(table) in (3, 4) for table in more.sequences[0].logprobs) and more.sequences[0].text is None


def test_an_end_token_is_among_the_tokens_if_it_is_asked_for(tiny: Tiny) -> None:
    llm, params = tiny(), BeamSearchParams(beam_width=6, max_tokens=25, length_penalty=0, logit_bias={2: 6.0})
    [without] = llm.beam_search([[5, 17, 40]], params)
    [having] = llm.beam_search([[5, 17, 40]], params.clone(include_stop_str_in_output=True))
    ended = [sequence for sequence in having.sequences if sequence.finish_reason == "stop"]
    assert ended and all(sequence.tokens[-1] == sequence.stop_reason == 2 for sequence in ended)
    for one, other in zip(without.sequences, having.sequences, strict=True):
        assert other.tokens[:-1] == one.tokens if other.finish_reason == "stop" else other.tokens == one.tokens
        assert (one.cum_logprob, one.score) == (other.cum_logprob, other.score)
        assert len(one.logprobs) == len(other.tokens) - 3 and one.text is None


def test_kinds_of_requests_are_mixed_in_one_call(tiny: Tiny) -> None:
    llm = tiny(num_blocks=40, max_num_seqs=7)
    prompts = [[5, 17, 40, 99, 3][: i + 1] for i in range(5)]
    kinds: list[Any] = [
        BeamSearchParams(beam_width=3, max_tokens=20),
        SamplingParams(n=2, seed=1, max_tokens=15),
        BeamSearchParams(beam_width=4, num_beam_groups=2, diversity_penalty=0.5, max_tokens=9, num_return_sequences=2),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        BeamSearchParams(beam_width=2, do_sample=True, seed=3, max_tokens=20, early_stopping="never"),
    ]
    alone = [llm.generate([p], own, use_tqdm=False)[0].outputs for p, own in zip(prompts, kinds, strict=True)]
    together = llm.generate(prompts, kinds, use_tqdm=False)
    assert [output.outputs for output in together] == alone
    assert [len(answers) for answers in alone] == [3, 2, 2, 1, 2]
    assert [answers[0].score is None for answers in alone] == [False, True, False, True, False]


def test_what_would_draw_is_warned_of_where_nothing_draws(tiny: Tiny) -> None:
    llm, plain = tiny(), BeamSearchParams(beam_width=2, max_tokens=4)
    for name, value in {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1}.items():
        with pytest.warns(UnusedWarning, match=f"^{name} changes nothing in a beam search without do_sample$"):
            [drawn] = llm.generate([5, 17], plain.clone(**{name: value}), use_tqdm=False)
        assert drawn.outputs == llm.generate([5, 17], plain, use_tqdm=False)[0].outputs
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnusedWarning)
        llm.generate([5, 17], plain.clone(do_sample=True, temperature=0.5, top_p=0.9), use_tqdm=False)
        llm.generate([5, 17], plain.clone(temperature=0.0, top_k=-1), use_tqdm=False)


def test_a_limit_of_prompts_at_a_time_changes_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny()
    prompts = [[5, i, 40] for i in range(10, 17)]
    params, most = BeamSearchParams(beam_width=2, max_tokens=6), 0
    expected = llm.beam_search(prompts, params)
    step = llm.engine.step

    def counting() -> Any:
        nonlocal most
        most = max(most, len(llm.engine.scheduler.requests))
        return step()

    monkeypatch.setattr(llm.engine, "step", counting)
    assert llm.beam_search(prompts, params, concurrency_limit=3) == expected and most == 3
    assert llm.beam_search([], params) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"params": SamplingParams(n=2)}, r"params is SamplingParams\(.*must be a BeamSearchParams; other ones go to"),
        ({"concurrency_limit": 0}, "concurrency_limit is 0: must be a whole number from 1"),
        ({"lora_request": "a"}, "lora_request is 'a'"),
        ({"prompts": 7}, "prompts is 7: must be a prompt or a list of them"),
        ({"prompts": [[5, 999]]}, r"prompts\[0\] is 999: token ids must be from 0"),
        (
            {"params": BeamSearchParams(beam_width=300, max_tokens=40)},
            "beam_width is 300: must be at most 32 behind 2 tokens",
        ),
    ],
)
def test_wrong_arguments(tiny: Tiny, given: dict[str, Any], message: str) -> None:
    llm = tiny()
    arguments = {"prompts": [[5, 6]], "params": BeamSearchParams(beam_width=2, max_tokens=4)} | given
    with pytest.raises((InvalidArgument, FeatureNotAvailable), match=message):
        llm.beam_search(**arguments)
    assert llm.engine.idle and llm.engine.stats.num_steps == 0


def test_a_request_that_fails(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, advance = tiny(), Beam.advance

    def failing(beam: Beam, *given: Any) -> Any:
        if beam.context.prompt_length == 2:
            raise ZeroDivisionError("made up")
        return advance(beam, *given)

    monkeypatch.setattr(Beam, "advance", failing)
    with pytest.raises(RequestsFailed, match=r"outputs\[1\], request '1': its decoder cannot advance") as caught:
        llm.beam_search([[5], [5, 6], [5, 6, 7]], BeamSearchParams(beam_width=2, max_tokens=4), concurrency_limit=2)
    assert [output.error is None for output in caught.value.outputs] == [True, False, True]


def test_coroutines(tiny_path: Path, tiny: Tiny) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=20)
    expected = tiny().generate([[5, 6, 7]], params.clone(logprobs=0), use_tqdm=False)[0].outputs

    async def main() -> list[Any]:
        settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64}
        async with AsyncLLM(str(tiny_path), **settings) as llm:
            return [output async for output in llm.beam_search([5, 6, 7], "mine", params)]

    [output] = asyncio.run(main())
    assert output.finished and output.request_id == "mine" and output.outputs == expected


def test_parameters_are_copied(tiny: Tiny) -> None:
    llm, params = tiny(), BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    stream = llm.stream([5, 6], params)
    params.max_tokens = 9
    *_, last = stream
    assert [len(answer.token_ids) for answer in last.outputs] == [5, 5]
