"""What beam search promises beyond parity with transformers (`test_beam_parity.py`), on log-probabilities from a table:
ends, few candidates, what is settled, conclusions, ancestry."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pagedec.core.protocol import DecoderContext
from pagedec.core.stop_strings import StopStrings
from pagedec.core.stopping import Stopping
from pagedec.decoders.agreement import Agreement
from pagedec.decoders.beam import Beam
from pagedec.errors import InvalidArgument
from pagedec.params import BeamSearchParams
from tests.decoders.beam_driver import LogProbsOf, Search


def table(seed: int, vocab_size: int, scale: float = 1.5, lift: dict[int, float] | None = None) -> LogProbsOf:
    """Log-probabilities behind the last two tokens, at random; `lift` is added to tokens' logits."""
    logits = np.random.default_rng(seed).normal(scale=scale, size=(vocab_size,) * 3)
    for token, number in (lift or {}).items():
        logits[:, :, token] += number
    logprobs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    return lambda text: np.asarray(logprobs[text[-2], text[-1]])


def params(**changes: Any) -> BeamSearchParams:
    return BeamSearchParams(**({"max_tokens": 8, "beam_width": 4} | changes))


# ---------------------------------------------------------------------------------------------------------------- width
@pytest.mark.parametrize("semantics", ["5", "4.38"])
@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_one_beam_is_greedy(semantics: str, early_stopping: bool, length_penalty: float) -> None:
    for seed in range(8):
        logprobs, eos, text = table(seed, 12, lift={3: 2.0}), (3, 5), [1, 2]
        own = params(
            beam_width=1,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            hf_semantics=semantics,
            min_tokens=seed % 3,
        )
        [got] = Search(own, text, logprobs, 12, eos).run().texts()
        while len(text) < 2 + 8:
            row = logprobs(text).copy()
            row[list(eos if len(text) - 2 < own.min_tokens else ())] = -np.inf
            text = [*text, int(row.argmax())]
            if text[-1] in eos:
                break
        assert got == text[2:]


def test_as_wide_as_all_texts_it_finds_the_best_of_all() -> None:
    logprobs = table(3, 3)
    search = Search(params(beam_width=27, max_tokens=3), [0, 1], logprobs, 3).run()
    scores = {}
    for text in itertools.product(range(3), repeat=3):
        rows = [logprobs([0, 1, *text[:i]])[token] for i, token in enumerate(text)]
        scores[text] = float(np.float32(np.float32(np.float32(rows[0]) + rows[1]) + rows[2]) / np.float32(3))
    want = sorted(scores, key=lambda text: -scores[text])
    assert [tuple(text) for text in search.texts()] == want
    assert [answer.score for answer in search.done] == [scores[text] for text in want]


@pytest.mark.parametrize("semantics", ["5", "4.38"])
def test_fewer_candidates_make_fewer_beams(semantics: str) -> None:
    """Two tokens and four beams: two beams, then four; and no answer twice, nor one that was made up."""
    search = Search(params(max_tokens=1, hf_semantics=semantics), [0, 1], table(1, 2), 2).run()
    assert sorted(search.texts()) == [[0], [1]]
    search = Search(params(max_tokens=3, hf_semantics=semantics), [0, 1], table(1, 2), 2)
    widths = []
    while search.step():
        widths.append(len(search.branches))
    assert widths == [2, 4]
    assert len({tuple(text) for text in search.texts()}) == 4
    assert all(answer.score > -100 for answer in search.done)


@pytest.mark.parametrize("semantics", ["5", "4.38"])
def test_where_nothing_is_allowed_beams_are_answers_as_they_stand(semantics: str) -> None:
    open_rows = table(1, 4)

    def logprobs(text: Sequence[int]) -> np.ndarray:
        return open_rows(text) if len(text) < 4 else np.full(4, -np.inf, np.float32)

    search = Search(params(beam_width=2, hf_semantics=semantics), [0, 1], logprobs, 4)
    search.step()
    search.step()
    want = search.generations[-1]
    assert not search.step()
    assert search.texts() == want and {answer.reason for answer in search.done} == {"length"}
    nothing = Search(params(), [0, 1], lambda _: np.full(4, -np.inf, np.float32), 4).run()
    assert nothing.texts() == [[]]


# ----------------------------------------------------------------------------------------------------------------- ends
@pytest.mark.parametrize("semantics", ["5", "4.38"])
def test_a_stop_string_of_one_token_ends_as_its_token_does(semantics: str) -> None:
    pieces = [bytes([97 + i]) for i in range(12)]
    for seed in range(12):
        own, rows = params(hf_semantics=semantics, early_stopping=seed % 2 == 0), table(seed, 12, lift={4: 1.5})
        by_string = Stopping((3,), (), 0, 8, strings=StopStrings(["e"]), pieces=pieces)
        found = Search(own, [1, 2], rows, 12, (3,), stopping=by_string).run()
        want = Search(own, [1, 2], rows, 12, (3,), stopping=Stopping((3,), (4,), 0, 8)).run()
        assert found.texts() == want.texts()
        assert [answer.score for answer in found.done] == [answer.score for answer in want.done]
        for answer, text in zip(found.done, found.texts(), strict=True):
            assert (answer.stop_string == "e") == (text[-1] == 4)
            assert (answer.stop_token == 3) == (text[-1] == 3)


@pytest.mark.parametrize("semantics", ["5", "4.38"])
def test_stop_strings_across_tokens_end_beams_and_leave_enough(semantics: str) -> None:
    pieces = [b"a", b"b", b"ab", b"ba", b"c", b"abc", b"\xff", b"bb", b"d", b"e"]
    seen = 0
    for seed in range(20):
        stopping = Stopping((), (), 0, 10, strings=StopStrings(["bab", "cc", "d"]), pieces=pieces)
        own = params(hf_semantics=semantics, early_stopping="never", max_tokens=10)
        search = Search(own, [1, 2], table(seed, 10), 10, stopping=stopping)
        while search.step():
            assert len(search.branches) == 4
            for text in search.generations[-1]:
                data = b"".join(pieces[token] for token in text)
                assert not any(stop in data for stop in (b"bab", b"cc", b"d"))
        for answer, text in zip(search.done, search.texts(), strict=True):
            data = b"".join(pieces[token] for token in text)
            if answer.reason == "stop":
                assert answer.stop_string is not None
                assert data[: len(data) - answer.excess_bytes].endswith(answer.stop_string.encode())
                seen += answer.excess_bytes > 0 or len(answer.stop_string) > 1
            else:
                assert len(text) == 10
    assert seen > 3


def test_groups_that_are_done_without_any_end_token() -> None:
    """By stop strings: there is no token that they could be counted with."""
    pieces = [bytes([97 + i]) for i in range(12)]
    stopping = Stopping((), (), 0, 8, strings=StopStrings(["e"]), pieces=pieces)
    own = params(beam_width=4, num_beam_groups=4, diversity_penalty=1.0, early_stopping=True)
    one_by_one = 0
    for seed in range(10):
        search = Search(own, [1, 2], table(seed, 12, lift={4: 2.0}), 12, stopping=stopping).run()
        assert len(search.done) == 4
        texts = search.texts()
        one_by_one += len(set(map(len, texts))) > 1
        for answer, text in zip(search.done, texts, strict=True):
            assert (text[-1] == 4) == (answer.stop_string == "e")
    assert one_by_one > 3


def test_a_penalty_as_large_as_numbers_forbids() -> None:
    """Twice as much is infinite, of which numpy has no warning for anybody."""
    own = params(beam_width=6, num_beam_groups=3, diversity_penalty=3e38)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(10):
            assert len(Search(own, [1, 2], table(seed, 12), 12).run().texts()) == 6


def test_several_ends_and_ignored_ones() -> None:
    rows = table(2, 12, lift={3: 3.0, 4: 3.0})
    texts = Search(params(ignore_eos=True), [1, 2], rows, 12, (3, 4)).run().texts()
    assert all(len(text) == 8 for text in texts) and any({3, 4} & set(text[:-1]) for text in texts)
    own = Search(params(ignore_eos=True, stop_token_ids=(4,)), [1, 2], rows, 12, (3, 4)).run()
    ended = [text for answer, text in zip(own.done, own.texts(), strict=True) if answer.reason == "stop"]
    assert ended and all(text[-1] == 4 and 4 not in text[:-1] for text in ended)


@pytest.mark.parametrize("semantics", ["5", "4.38"])
def test_the_contexts_end_ends_answers_before_max_tokens(semantics: str) -> None:
    search = Search(params(max_tokens=50, hf_semantics=semantics), [1, 2], table(2, 12), 12, room=5).run()
    assert [len(text) for text in search.texts()] == [5] * 4
    assert {answer.reason for answer in search.done} == {"length"}


# ----------------------------------------------------------------------------------------------- settled, and concluded
def draws(count: int, seed: int) -> list[Search]:
    """Searches in which ends are likely, so that answers wait that no living beam agrees with."""
    rng, out = random.Random(seed), []
    for i in range(count):
        width = rng.choice((1, 2, 3, 4, 6))
        own = params(
            beam_width=width,
            num_return_sequences=rng.randint(1, width),
            max_tokens=rng.randint(1, 24),
            early_stopping=rng.choice((True, False, "never")),
            length_penalty=rng.choice((-1.0, 0.0, 1.0, 2.0)),
            hf_semantics=rng.choice(("5", "4.38")),
            do_sample=i % 4 == 3,
            seed=i,
            **({"num_beam_groups": width, "diversity_penalty": rng.choice((0.0, 1.0))} if i % 4 == 2 < width else {}),
        )
        scale, lift = rng.choice((1.0, 4.0, 8.0)), {3: rng.choice((-2.0, 1.0, 4.0))}
        out.append(Search(own, [1, 2], table(rng.randrange(50), 8, scale, lift), 8, (3,)))
    return out


def waiting(search: Search) -> list[list[int]]:
    """The texts of answers that wait and may be returned."""
    assert isinstance(search.decoder, Beam)
    found = [entry.hypothesis for g in search.decoder.groups for entry in g.pool.entries[: search.params.num_answers]]
    return search.texts(found)


def test_what_is_settled_is_what_all_agree_on() -> None:
    disagreed = settled_late = 0
    for search in draws(150, seed=1):
        while search.step():
            live = search.generations[-1]
            common = len(os.path.commonprefix([*live, *waiting(search)]))
            disagreed += common < len(os.path.commonprefix(live))
            settled_late += 0 < common < len(live[0])
            assert search.settled[-1] == 2 + common
            concluded = search.texts(search.decoder.conclude(search.branches))
            for text in concluded:
                assert text[:common] == live[0][:common]
        for text in search.texts():
            told = max([2, *search.settled]) - 2
            assert text[:told] == search.texts()[0][:told] and len(text) >= told
        assert search.settled == sorted(search.settled)
    assert disagreed > 30 and settled_late > 100


@pytest.mark.parametrize("semantics", ["5", "4.38"])
def test_concluded_early_is_a_shorter_search(semantics: str) -> None:
    """Without ends, what there is after n tokens is what a search of n tokens finds."""
    rows = table(9, 12)
    for length in (1, 3, 6):
        want = Search(params(max_tokens=length, hf_semantics=semantics), [1, 2], rows, 12).run()
        search = Search(params(max_tokens=20, hf_semantics=semantics), [1, 2], rows, 12)
        for _ in range(length):
            search.step()
        got = search.decoder.conclude(search.branches)
        assert got is not None and [answer.rank for answer in got] == [0, 1, 2, 3]
        assert search.texts(got) == want.texts()
        assert [(a.score, a.ancestry) for a in got] == [(a.score, a.ancestry) for a in want.done]
        assert search.step(), "it goes on as if nothing had been asked"


def test_before_the_first_token_the_conclusion_is_empty() -> None:
    search = Search(params(), [1, 2], table(9, 12), 12)
    got = search.decoder.conclude(search.branches)
    assert got is not None and search.texts(got) == [[]]


def test_concluded_with_answers_that_wait() -> None:
    """4.38's `finalize`: living beams join the pool and are ranked with it."""
    found = 0
    for seed in range(20):
        rows = table(seed, 8, 2.0, {3: 2.0})
        own = {"hf_semantics": "4.38", "early_stopping": seed % 2 == 0}
        for length in range(1, 8):
            search = Search(params(max_tokens=20, **own), [1, 2], rows, 8, (3,))
            if all(search.step() for _ in range(length)):
                got = search.decoder.conclude(search.branches)
                want = Search(params(max_tokens=length, **own), [1, 2], rows, 8, (3,)).run()
                assert got is not None and search.texts(got) == want.texts()
                found += len({answer.reason for answer in want.done}) == 2
    assert found > 5


def test_ancestry_leads_through_the_generations() -> None:
    for search in draws(60, seed=2):
        search.run()
        for answer, text in zip(search.done, search.texts(), strict=True):
            assert len(answer.ancestry) == len(text) and answer.ancestry[0] == 0
            group_width = search.params.beam_width // search.params.num_beam_groups
            for length, number in enumerate(answer.ancestry[1:], start=1):
                generation = search.generations[length - 1]
                if len(generation) == search.params.beam_width:
                    assert generation[number] == text[:length]
                assert number // group_width == answer.ancestry[1] // group_width


def test_agreement_counts_each_text_once_and_forgets() -> None:
    agreement = Agreement(3)
    a, b = agreement.grow([agreement.root] * 2, [5, 5], distinct=False)
    assert a is b
    agreement.release([agreement.root])
    assert agreement.settle() == 4
    c, d = agreement.grow([a, b], [6, 7], distinct=False)
    agreement.release([a, b])
    assert agreement.settle() == 4
    agreement.release([c])
    assert agreement.settle() == 5 == agreement.length
    assert agreement.grow([], [], distinct=True) == []
    assert d[1] == 5


# ----------------------------------------------------------------------------------------------------------- parameters
@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"beam_width": 0}, "beam_width"), ({"beam_width": 513}, "beam_width"), ({"max_tokens": None}, "max_tokens"),
        ({"num_return_sequences": 5}, "num_return_sequences"), ({"num_beam_groups": 3}, "num_beam_groups"),
        ({"diversity_penalty": 1.0}, "diversity_penalty"), ({"early_stopping": "often"}, "early_stopping"),
        ({"hf_semantics": "4"}, "hf_semantics"), ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 6.0}, "length_penalty"), ({"num_beam_groups": 2, "do_sample": True}, "do_sample"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_named(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        params(**wrong)
    assert error.value.field == field


def test_more_candidates_are_asked_for_where_some_may_be_displaced() -> None:
    def asked(stopping: Stopping | None = None, **changes: Any) -> int:
        own = params(**changes)
        search = Search(own, [1, 2], table(1, 8), 8, (3,), stopping=stopping)
        assert isinstance(search.context, DecoderContext)
        [query] = search.decoder.propose(search.branches, 0)
        return int(query.asks[0].k)  # type: ignore[union-attr]

    assert asked() == 2 * 4
    assert asked(stop_token_ids=(4, 5)) == 4 * 4
    assert asked(ignore_eos=True) == 2 * 4
    assert asked(stopping=Stopping((3,), strings=StopStrings(["x", "y"]), pieces=[b"x"])) == 2 * 4 + 2 * 4
    assert asked(num_beam_groups=2, diversity_penalty=1.0) == 2 * 2 + 2 * 2
    assert asked(num_beam_groups=2) == 2 * 2
