"""Suffix decoding in an engine: answers are those of plain decoding whatever others have left, who leaves what, and who
finds it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams, TokenTrie
from pagedec.core.protocol import Hypothesis
from pagedec.core.standing import Standing
from pagedec.decoders.suffix import PastAnswers
from pagedec.errors import InvalidArgument
from pagedec.fields import rules
from pagedec.speculation import speculation_of
from tests.engine.crowd import Tiny
from tests.models.checkpoints import VOCAB
from tests.support import add, drain, step

SUFFIX: dict[str, Any] = {"method": "suffix", "adaptive": False}
PRIVATE = {**SUFFIX, "suffix_decoding_max_cached_requests": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LENGTHS = (1, 7, 8, 15, 16, 17, 33, 64, 65, 129)


def prompts_of(seed: int) -> list[list[int]]:
    """Around blocks and chunks, some of them texts that repeat."""
    rng = random.Random(seed)
    made = []
    for i, length in enumerate(LENGTHS):
        words = [rng.randrange(3, VOCAB) for _ in range(7 if i % 2 else length)]
        made.append([words[j % len(words)] for j in range(length)])
    return made


def asked(i: int) -> SamplingParams:
    """Of every kind, in turns."""
    trie = TokenTrie([[a, b, c, a, b] for a in (5, 9) for b in (7, 11, 40) for c in range(60, 70)])
    return [
        SamplingParams(temperature=0, max_tokens=30, logprobs=2),
        SamplingParams(temperature=0.7, seed=i, n=3, max_tokens=25, logprobs=1),
        SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[5, 60, 99], min_tokens=3),
        SamplingParams(temperature=1.0, seed=i, n=2, max_tokens=9, token_trie=trie),
        SamplingParams(temperature=0.4, seed=i, max_tokens=50, repetition_penalty=1.3, no_repeat_ngram_size=4),
        SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=i, max_tokens=30, allowed_token_ids=list(range(20, 40)), ignore_eos=True),
    ][i % 7]  # fmt: skip


def past_of(llm: LLM) -> PastAnswers:
    return llm.engine.scheduler.archive.of(PastAnswers)


def accepted(outputs: list[Any]) -> int:
    return sum(output.metrics.num_accepted_tokens for output in outputs)


# --------------------------------------------------------------------------------------------------------- same answers
@pytest.mark.parametrize(
    ("settings", "adaptive"),
    [
        ({"num_blocks": 400}, True),
        ({"num_blocks": 60, "block_size": 8, "max_num_batched_tokens": 17}, False),
        ({"num_blocks": 24, "max_num_seqs": 5, "executor": "process"}, False),
    ],
    ids=str,
)
def test_answers_are_plain_ones_whatever_others_left(tiny: Tiny, settings: dict[str, Any], adaptive: bool) -> None:
    """Time after time, so that each one's answer has been left there before; beside requests that draft in another way,
    or not at all, and one that is aborted."""
    prompts = prompts_of(1)
    params = [asked(i) for i in range(len(prompts))]
    want = [output.outputs for output in tiny(num_blocks=400).generate(prompts, params, use_tqdm=False)]
    table = {**SUFFIX, "adaptive": adaptive, "suffix_decoding_max_spec_factor": 2.0}
    llm, counts = tiny(**settings, speculative_config=table), []
    ways: list[Any] = [None, {"method": "ngram"}, False]
    for asks in (params, [own.clone(speculative=ways[i % 3]) for i, own in enumerate(params)], params):
        stream = llm.stream(prompts[3], GREEDY)
        next(iter(stream))
        stream.close()
        outputs = llm.generate(prompts, asks, use_tqdm=False)
        assert [output.outputs for output in outputs] == want
        counts.append(accepted(outputs))
    assert adaptive or counts[2] > 1.5 * counts[0]
    assert len(past_of(llm)) > 2 * len(prompts)


def test_in_a_session(tiny: Tiny) -> None:
    """What its branches were given before is text like any other, whoever wrote it."""
    texts = []
    for speculative in (False, SUFFIX, SUFFIX):
        llm = tiny(num_blocks=99, speculative_config=SUFFIX)
        own = GREEDY.clone(speculative=speculative, logprobs=1)
        for _ in range(2):
            with llm.session(prompts_of(2)[4], seed=3) as session:
                first = session.generate(own)
                mark = session.mark()
                session.append([5, 9, 40])
                forks = [session.fork() for _ in range(2)]
                outputs = session.generate_all([session, *forks], own.clone(temperature=0.6, max_tokens=17))
                session.rollback(mark)
                last = session.generate(own.clone(n=2, temperature=0.5, max_tokens=9))
                texts.append([output.outputs for output in (first, *outputs, last)])
    assert all(text == texts[0] for text in texts)


def test_the_same_calls_take_the_same_steps(tiny: Tiny) -> None:
    def steps() -> list[int]:
        llm, found = tiny(num_blocks=99, speculative_config=SUFFIX), []
        for _ in range(3):
            llm.generate(prompts_of(3), [asked(i) for i in range(len(LENGTHS))], use_tqdm=False)
            found.append(llm.engine.stats.num_steps)
        return found

    assert steps() == steps()


# --------------------------------------------------------------------------------------------- who leaves and who finds
PROMPT = [5, 9, 40, 7]


def taken(llm: LLM, params: SamplingParams = GREEDY, **own: Any) -> int:
    """How many drafted tokens a request has accepted."""
    return accepted(llm.generate([{"prompt_token_ids": PROMPT, **own}], params, use_tqdm=False))


def test_a_second_request_drafts_the_first_one_s_answer(tiny: Tiny) -> None:
    llm = tiny(speculative_config=SUFFIX)
    before = taken(llm)
    assert taken(llm) >= before + 20 and len(past_of(llm)) == 2


def test_a_request_that_says_0_leaves_none_and_finds_none(tiny: Tiny) -> None:
    llm = tiny(speculative_config=SUFFIX)
    private = GREEDY.clone(speculative=PRIVATE)
    alone = taken(llm, private)
    assert len(past_of(llm)) == 0 and taken(llm, private) == alone == taken(llm)
    assert len(past_of(llm)) == 1 and taken(llm, private) == alone < taken(llm)


def test_an_engine_that_says_0_has_none_whatever_requests_say(tiny: Tiny) -> None:
    llm = tiny(speculative_config=PRIVATE)
    alone = taken(llm)
    assert [taken(llm), taken(llm, GREEDY.clone(speculative=SUFFIX)), taken(llm)] == [alone] * 3
    assert len(past_of(llm)) == 0


def test_a_request_widens_and_narrows_nothing_for_others(tiny: Tiny) -> None:
    llm = tiny(num_blocks=99, speculative_config={**SUFFIX, "suffix_decoding_max_cached_requests": 4})
    for number in (1, 10_000_000):
        own = GREEDY.clone(max_tokens=3, speculative={**SUFFIX, "suffix_decoding_max_cached_requests": number})
        llm.generate([[i] for i in range(9)], own, use_tqdm=False)
        assert len(past_of(llm)) == 4


@pytest.mark.parametrize("engine_s", [None, {"method": "ngram"}])
def test_where_the_engine_drafts_otherwise_those_share_that_draft_so(
    tiny: Tiny, engine_s: dict[str, Any] | None
) -> None:
    llm = tiny(speculative_config=engine_s)
    llm.generate([PROMPT], GREEDY, use_tqdm=False)
    own = GREEDY.clone(speculative=SUFFIX)
    alone = taken(llm, own)
    assert len(past_of(llm)) == 1 and taken(llm, own) > alone


def test_who_shares_cached_prefixes_shares_answers(tiny: Tiny) -> None:
    llm = tiny(speculative_config=SUFFIX)
    alone = taken(llm, cache_salt="mine")
    assert taken(llm, cache_salt="other") == alone == taken(llm)
    assert min(taken(llm, cache_salt=salt) for salt in ("mine", "other", "")) > alone


def test_what_is_aborted_or_fails_leaves_nothing(tiny: Tiny) -> None:
    llm = tiny(speculative_config=SUFFIX)
    engine = llm.engine
    now = [0.0]
    engine.clock = lambda: now[0]
    add(engine, "aborted", PROMPT, GREEDY)
    add(engine, "failing", PROMPT, GREEDY)
    add(engine, "concluded", PROMPT, GREEDY.clone(max_time=50.0))
    for _ in range(4):
        step(engine)
    engine.abort("aborted")
    engine.scheduler.get("failing").decoder.advance = None  # type: ignore[method-assign, assignment]
    with pytest.raises(Exception, match="'failing'"):
        drain(engine)
    assert len(past_of(llm)) == 0
    now[0] = 99.0
    assert [*drain(engine)] == ["concluded"] and len(past_of(llm)) == 1


def test_a_decoder_that_raises_at_its_end_fails_alone(tiny: Tiny) -> None:
    llm = tiny(num_blocks=99, speculative_config=SUFFIX)
    [plain] = llm.generate([PROMPT], GREEDY.clone(speculative=False), use_tqdm=False)
    with llm.session(PROMPT) as session:
        for home in (None, session):
            request = add(llm.engine, "wrong", PROMPT, GREEDY.clone(max_tokens=5))

            def wrong(answers: list[Hypothesis]) -> None:
                raise ZeroDivisionError("at the end")

            request.decoder.ended = wrong  # type: ignore[method-assign, assignment]
            add(llm.engine, "right", PROMPT, GREEDY)
            failed = llm.engine.stats.num_failed
            with pytest.raises(Exception, match=re.escape("'wrong': its decoder cannot end: ZeroDivisionError")):
                drain(llm.engine)
            assert drain(llm.engine)["right"] == [plain.outputs[0].token_ids]
            assert llm.engine.stats.num_failed == failed + 1 and home in (None, session)
    assert not llm.engine.scheduler.requests and not llm.engine._arrived


def test_resting_requests_leave_their_answers_too(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stepped plainly, without being asked."""
    llm = tiny(speculative_config={**SUFFIX, "adaptive": True})
    with monkeypatch.context() as patch:
        patch.setattr(Standing, "rests", lambda own, step, num: True)
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert output.metrics is not None and output.metrics.num_draft_tokens == 0 and len(past_of(llm)) == 1
    assert taken(llm, GREEDY.clone(speculative=SUFFIX)) >= 20


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(("own", "message"), [
    ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0: must be a whole number from 1"),
    ({"num_speculative_tokens": 300}, "num_speculative_tokens is 300: must be less than 256, the context"),
    ({"suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth is 0: must be a whole number from 1 to 64"),
    ({"suffix_decoding_max_tree_depth": 65}, "suffix_decoding_max_tree_depth is 65: must be a whole number from 1 to"),
    ({"suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests is -1: must be a whole number"),
    ({"suffix_decoding_max_spec_factor": -0.5}, "suffix_decoding_max_spec_factor is -0.5: must be a finite number at"),
    ({"suffix_decoding_max_spec_factor": "1"}, "suffix_decoding_max_spec_factor is '1': must be a finite number"),
    ({"suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob is 1.5: must be a finite number at"),
    ({"suffix_decoding_max_depth": 3}, "suffix_decoding_max_depth is 3: not a field of the method suffix"),
    ({"prompt_lookup_max": 3}, "prompt_lookup_max is 3: not a field of the method suffix"),
    ({"verify": "rejection"}, "verify is 'rejection': must be left out"),
])  # fmt: skip
def test_wrong_tables_are_refused_by_name(tiny: Tiny, own: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^speculative.{message}"):
        tiny(max_model_len=256).generate([[5]], SamplingParams(speculative={**SUFFIX, **own}), use_tqdm=False)
    with pytest.raises(InvalidArgument, match=f"^speculative_config.{message}"):
        tiny(max_model_len=256, speculative_config={**SUFFIX, **own})


def test_numbers_that_nobody_has_said() -> None:
    """vLLM's."""
    own = speculation_of({"method": "suffix"})
    assert {name: getattr(own, name) for name in rules(type(own))} == {
        "adaptive": True, "num_speculative_tokens": 24, "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10_000, "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    }  # fmt: skip
    assert speculation_of({"method": "suffix", "suffix_decoding_max_tree_depth": 9}).reach == {
        "num_speculative_tokens": 9
    }


def test_beams_do_not_draft_so(tiny: Tiny) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, speculative=SUFFIX)
    with pytest.raises(
        InvalidArgument, match="a table of draft_model, eagle3, lookahead or ngram: the decoder beam does not"
    ):
        tiny().generate([PROMPT], params, use_tqdm=False)
    llm = tiny(speculative_config=SUFFIX)
    assert llm.generate([PROMPT], params.clone(speculative=None), use_tqdm=False)[0].finished
