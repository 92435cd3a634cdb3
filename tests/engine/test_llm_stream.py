"""Answers while they grow are beginnings of what they become, whoever else runs, and nothing stays behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.errors import InvalidArgument, RequestError
from pagedec.outputs import CompletionOutput, RequestOutput
from pagedec.params import RequestOutputKind
from tests.algorithms.beam import BeamParams
from tests.algorithms.interactive import InteractiveParams
from tests.algorithms.ngram import NGramParams

Tiny = Callable[..., LLM]
PROMPT = "The capital of France is"
IDS = [5, 17, 40, 99, 3]


def check_growth(outputs: list[RequestOutput]) -> None:
    """Each output is a beginning of the next one, and only the last one is finished."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for earlier, later in zip(outputs, outputs[1:], strict=False):
        becomes = {answer.index: answer for answer in later.outputs}
        for answer in earlier.outputs:
            after = becomes[answer.index]
            assert after.text.startswith(answer.text)
            assert after.token_ids[: len(answer.token_ids)] == answer.token_ids
            assert answer.finish_reason is None or answer == after


def settled(llm: LLM) -> bool:
    llm.engine.scheduler.check()
    return llm.engine.scheduler.requests == [] and not llm.loop._sinks and not llm.engine._arrived


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=16),
        SamplingParams(temperature=0, max_tokens=16, stop=". It", include_stop_str_in_output=True),
        SamplingParams(temperature=0, max_tokens=24, stop=["\n\nThe", "never"]),
        SamplingParams(temperature=1.2, seed=4, n=3, max_tokens=10, logprobs=1),
        SamplingParams(temperature=2.0, seed=4, n=2, max_tokens=12, top_k=2000),
        SamplingParams(temperature=0, max_tokens=5, detokenize=False),
    ],
    ids=range(6),
)
def test_the_last_output_is_what_generate_returns(text_llm: LLM, params: SamplingParams) -> None:
    outputs = list(text_llm.stream(PROMPT, params))
    check_growth(outputs)
    [expected] = text_llm.generate(PROMPT, params, use_tqdm=False)
    assert outputs[-1].outputs == expected.outputs and len(outputs) > 3
    assert (outputs[-1].prompt, outputs[-1].prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)
    assert outputs[-1].metrics is not None and settled(text_llm)


def test_each_of_several_answers_ends_for_itself(tiny: Tiny) -> None:
    """Answers that have ended stay as they are, with their reasons, while others go on."""
    llm, params = tiny(), SamplingParams(n=12, seed=3, max_tokens=30, stop_token_ids=range(40, 50))
    outputs = list(llm.stream(IDS, params))
    check_growth(outputs)
    lengths = {len(answer.token_ids) for answer in outputs[-1].outputs}
    assert len(lengths) > 2, "they end at different times"
    early = [answer for answer in outputs[-2].outputs if answer.finish_reason == "stop"]
    assert early and outputs[-1].outputs == llm.generate(IDS, params, use_tqdm=False)[0].outputs


def test_what_is_set_later_is_not_of_a_stream_that_began(tiny: Tiny) -> None:
    llm, params = tiny(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    stream = llm.stream(IDS, params)
    params.max_tokens = 2
    assert len(list(stream)[-1].outputs[0].token_ids) == 6


def test_closing_aborts(tiny: Tiny) -> None:
    llm, params = tiny(num_blocks=8), SamplingParams(max_tokens=60, ignore_eos=True)
    never = llm.stream(IDS, params)
    never.close()
    for _ in range(20):
        stream = llm.stream(IDS, params)
        for _ in range(3):
            assert not next(stream).finished
        assert len(llm.engine.scheduler.requests) == 1
        stream.close()
        assert settled(llm)
    stream = llm.stream(IDS, params)
    next(stream)
    del stream
    assert settled(llm)


def test_streams_and_generate_alternate(tiny: Tiny) -> None:
    """In any order of asking, with prompts of others between: each gets the answer that it has alone."""
    llm, rng = tiny(num_blocks=40, max_num_seqs=5), random.Random(1)
    prompts = [[rng.randrange(3, 131) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=5 + 2 * i, n=1 + i % 2) for i in range(12)]
    alone = [llm.generate(prompt, own, use_tqdm=False)[0].outputs for prompt, own in zip(prompts, params, strict=True)]
    streams = {i: llm.stream(prompts[i], params[i], priority=i % 3) for i in range(12)}
    outputs: dict[int, list[RequestOutput]] = {i: [] for i in streams}
    while streams:
        i = rng.choice(list(streams))
        outputs[i].append(next(streams[i]))
        if outputs[i][-1].finished:
            assert list(streams.pop(i)) == []
        if rng.random() < 0.1:
            k = rng.randrange(12)
            assert llm.generate(prompts[k], params[k], use_tqdm=False)[0].outputs == alone[k]
    for i in outputs:
        check_growth(outputs[i])
        assert outputs[i][-1].outputs == alone[i]
    assert settled(llm)


def test_wrong_arguments_are_refused_at_once(tiny: Tiny) -> None:
    llm = tiny()
    for prompt, params, options, field in (
        ([], None, {}, "prompt"), ([5, 131], None, {}, "prompt"), ("a", None, {}, "prompt"),
        (IDS, SamplingParams(stop_token_ids=[131]), {}, "stop_token_ids"), (IDS, 5, {}, "sampling_params"),
        (IDS, None, {"priority": "high"}, "priority"), (IDS, None, {"cache_salt": 5}, "cache_salt"),
        (IDS, None, {"cache_salt": "\ud800"}, "cache_salt"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument) as caught:
            llm.stream(prompt, params, **options)
        assert caught.value.field == field
    assert settled(llm)


def test_salts_keep_streams_apart(tiny: Tiny) -> None:
    llm, params = tiny(), SamplingParams(temperature=0, max_tokens=1)
    cached = []
    for options in ({"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {}):
        cached.append(list(llm.stream([7, 8] * 24, params, **options))[-1].num_cached_tokens)
    salted = {"prompt_token_ids": [7, 8] * 24, "cache_salt": "b"}
    assert cached == [0, 48, 0, 0] and list(llm.stream(salted, params))[-1].num_cached_tokens == 48


def test_a_device_that_is_gone_ends_all_streams(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them says so, with the device's error; one that had not begun finds it back."""
    llm, params = tiny(), SamplingParams(max_tokens=30, ignore_eos=True)
    streams = [llm.stream(IDS, params) for _ in range(3)]
    for stream in streams[:2]:
        next(stream)

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "execute", fail)
        for stream in streams[:2]:
            with pytest.raises(RequestError, match="the device is gone"):
                for _ in range(3):
                    next(stream)
    assert list(streams[2])[-1].finished
    assert settled(llm)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0, max_tokens=20), SamplingParams(n=3, seed=4, max_tokens=14, logprobs=2),
    SamplingParams(temperature=0, max_tokens=24, stop=["\n\nThe", ". It"], include_stop_str_in_output=True),
    SamplingParams(temperature=0, max_tokens=5, detokenize=False), BeamParams(3, max_tokens=6),
], ids=range(5))  # fmt: skip
def test_what_an_output_holds(text_llm: LLM, params: Any) -> None:
    """Pieces add up to the whole, whose numbers and endings the last piece of each answer has; or there is the whole
    alone."""
    [expected] = text_llm.generate(PROMPT, params, use_tqdm=False)
    [final] = text_llm.stream(PROMPT, replace(params, output_kind=RequestOutputKind.FINAL_ONLY))
    assert final.outputs == expected.outputs and final.finished
    whole: dict[int, CompletionOutput] = {}
    for output in text_llm.stream(PROMPT, replace(params, output_kind=RequestOutputKind.DELTA)):
        for piece in output.outputs:
            last = whole.get(piece.index)
            logprobs = None if piece.logprobs is None else [*((last and last.logprobs) or ()), *piece.logprobs]
            assert last is None or last.finish_reason is None or (output.finished and not piece.token_ids)
            whole[piece.index] = replace(
                piece,
                text=(last.text if last else "") + piece.text,
                logprobs=logprobs,
                token_ids=[*(last.token_ids if last else ()), *piece.token_ids],
            )
    assert [whole[index] for index in sorted(whole)] == expected.outputs


def test_log_probabilities_come_with_their_tokens(tiny: Tiny) -> None:
    llm, params = tiny(), SamplingParams(seed=1, max_tokens=9, logprobs=2, ignore_eos=True)
    outputs = list(llm.stream(IDS, params))
    [whole] = outputs[-1].outputs
    assert whole.logprobs is not None and len(outputs) == 9
    for output in outputs:
        [answer] = output.outputs
        assert answer.logprobs == whole.logprobs[: len(answer.token_ids)]
    assert outputs[-2].outputs[0].cumulative_logprob == pytest.approx(
        sum(table[token].logprob for token, table in zip(whole.token_ids[:8], whole.logprobs, strict=False) if table)
    )


def test_decoders_mix(tiny: Tiny) -> None:
    """Sampling, speculation and beams in one call and in streams, each as it is alone; beams come only when they are
    done."""
    llm = tiny(num_blocks=60)
    params = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=1), BeamParams(3, max_tokens=10),
        NGramParams(temperature=0.7, seed=2, max_tokens=20, n=2), SamplingParams(seed=1, n=3, max_tokens=9),
        BeamParams(2, max_tokens=14),
    ]  # fmt: skip
    alone = [llm.generate(IDS, own, use_tqdm=False)[0].outputs for own in params]
    mixed = llm.generate([IDS] * 5, params, use_tqdm=False, priority=[0, 1, 0, 2, 0])
    assert [output.outputs for output in mixed] == alone
    streams = [llm.stream(IDS, own) for own in params]
    first = [next(stream) for stream in streams]
    assert [output.finished for output in first] == [False, True, False, False, True]
    for output, stream, expected in zip(first, streams, alone, strict=True):
        outputs = [output, *stream]
        check_growth(outputs)
        assert outputs[-1].outputs == expected
    assert params[2].clone(size=3).size == 3
    assert settled(llm)


def test_a_stream_that_waits_for_a_client_says_so(tiny: Tiny) -> None:
    """A session's call, too, whose client can only wait for it."""
    llm = tiny()
    with llm.session(IDS) as session:
        for read in (lambda: list(llm.stream(IDS, InteractiveParams())), lambda: session.generate(InteractiveParams())):
            with pytest.raises(RequestError, match="its decoder waits for a client, and there is none"):
                read()
    assert settled(llm)
