"""Constraints on the fake device: every decoder returns what plain lists return, and the states fork as tokens do."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from pagedec.constraints.function import FunctionConstraint
from pagedec.constraints.trie import TokenTrie, TrieConstraint
from pagedec.core.constraint import Constraint, Forbidden, cut_within, permits
from pagedec.core.cutting import closing
from pagedec.core.masking import node_states, pack_rows, without
from pagedec.core.protocol import DecoderContext
from pagedec.core.request import Branch, Request
from pagedec.core.stopping import Stopping
from pagedec.decoders import make_decoder
from pagedec.params import SamplingParams
from tests.algorithms.beam import BeamParams, beam
from tests.algorithms.lookahead import LookaheadParams
from tests.algorithms.ngram import NGramParams
from tests.algorithms.oracle_tree import OracleTreeParams
from tests.algorithms.random_tree import RandomTreeParams
from tests.algorithms.speculative import SpeculativeParams
from tests.core.fake import EOS, VOCABULARY, FakeEngine, LanguageModel, pick, reference_noise
from tests.core.world import limits, results

METHODS: tuple[type[SamplingParams], ...] = (
    SamplingParams, NGramParams, RandomTreeParams, LookaheadParams, SpeculativeParams, OracleTreeParams,
)  # fmt: skip
MAX_TOKENS = 8


class WordConstraint(FunctionConstraint):
    """A function's answers as words of bits."""

    def allowed(self, state: Any) -> Any:
        ids = super().allowed(state)
        words = np.zeros(1, np.uint32)
        for token in ids if ids is not None else range(VOCABULARY):
            words[0] |= np.uint32(1 << int(token))
        return words


def no_neighbours(tokens: Sequence[int]) -> list[int] | None:
    """Depends on all of the text: often one token, sometimes any."""
    number = sum((i + 1) * token for i, token in enumerate(tokens))
    kind = number % 4
    if kind == 0:
        return None
    return sorted({number % VOCABULARY, *range(number % 3, VOCABULARY, 3)}) if kind > 1 else [1 + number % 7]


def random_trie(rng: random.Random) -> TokenTrie:
    """Sequences of which some begin others, and some end with the end token."""
    some = {tuple(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 30))}
    whole = [sequence for sequence in some if EOS not in sequence[:-1]]
    return TokenTrie(whole or [(1, 2)])


def in_trie(trie: TokenTrie, tokens: Sequence[int], stops: Sequence[int]) -> list[int] | None:
    """What may follow on plain lists; None: it is over."""
    node = 0
    for token in tokens:
        node = trie.child(node, token)
        if node < 0:
            return None
    ids = [token for token in range(VOCABULARY) if trie.child(node, token) >= 0]
    return sorted({*ids, *(stops if trie.ends[node] >= 0 and node else ())}) if ids else None


class Rules:
    """What a constraint allows behind a prompt and generated tokens, by plain lists: ids, or None where it is over."""

    def __init__(self, constraint: Constraint, allowed: Callable[[list[int], list[int]], list[int] | None]) -> None:
        self.constraint, self.allowed = constraint, allowed


def kinds(rng: random.Random, stops: Sequence[int]) -> list[Rules]:
    trie = random_trie(rng)

    def function(prompt: list[int], generated: list[int]) -> list[int] | None:
        return no_neighbours([*prompt, *generated]) or list(range(VOCABULARY))

    return [
        Rules(TrieConstraint(trie, stops), lambda prompt, generated: in_trie(trie, generated, stops)),
        Rules(FunctionConstraint(no_neighbours, VOCABULARY), function),
        Rules(WordConstraint(no_neighbours, VOCABULARY), function),
    ]


def sampled(
    model: LanguageModel, rules: Rules, prompt: list[int], seed: int | None, stream: int, stops: Sequence[int], low: int
) -> list[int]:
    """One answer on plain lists."""
    out: list[int] = []
    while len(out) < MAX_TOKENS:
        allowed = rules.allowed(prompt, out)
        if allowed is None:
            break
        early = set(stops) if len(out) < low else set()
        left = [token for token in allowed if token not in early] or allowed
        text = [*prompt, *out]
        noise = reference_noise(seed or 0, stream, len(text))
        banned = [token for token in range(VOCABULARY) if token not in left]
        out.append(pick(model(text), seed is None, noise, banned))
        if out[-1] in stops:
            break
    return [*prompt, *out]


def truth(
    model: LanguageModel, rules: Rules, prompt: list[int], seed: int | None, stops: Sequence[int], low: int
) -> Callable[[Sequence[int], int], int]:
    """What a stream draws after a text of its own; behind others, anything."""

    def oracle(tokens: Sequence[int], stream: int) -> int:
        text = sampled(model, rules, prompt, seed, stream, stops, low)
        return text[len(tokens)] if len(tokens) < len(text) and text[: len(tokens)] == list(tokens) else EOS

    return oracle


def request_of(engine: FakeEngine, name: str, params: Any, prompt: list[int], rules: Rules, **options: Any) -> Request:
    stopping = Stopping((), options.get("stops", ()), options.get("low", 0), MAX_TOKENS)
    request = engine.scheduler.admit(
        name,
        lambda context: make_decoder(params, context),
        prompt,
        options.get("stopping", stopping),
        len(prompt) + MAX_TOKENS,
        eos_token_ids=options.get("eos", ()),
        constraint=rules.constraint,
    )
    engine.scheduler.add(request)
    return request


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("forced", [True, False], ids=["forced chains", "one by one"])
def test_every_sampling_decoder_returns_what_lists_return(seed: int, forced: bool) -> None:
    """Greedy and seeded, n > 1, drafts and trees, in a pool that is too small, preempted at random, in one batch."""
    rng = random.Random(seed)
    target = LanguageModel(seed, 2)
    models: dict[str, Any] = {"target": target, "draft": LanguageModel(seed, 2, noisy=0.25)}
    engine = FakeEngine(models, limits(rng.choice([16, 40]), draft_forced=forced, array_settle=seed % 2 == 0))
    stops, low, want = (EOS,), rng.choice([0, 0, 3]), {}
    for i, (method, rules) in enumerate(itertools.product(METHODS, kinds(rng, stops))):
        own_seed, n = rng.choice([None, seed]), rng.choice([1, 3])
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 9))]
        more: dict[str, Any] = {}
        if method is OracleTreeParams:
            more = {"oracle": truth(target, rules, prompt, own_seed, stops, low), "wrong": EOS}
        params = method(n=n, temperature=0.0 if own_seed is None else 1.0, seed=own_seed or 0, **more)
        name = f"{method.__name__} {i}"
        request = request_of(engine, name, params, prompt, rules, stops=stops, low=low)
        want[name] = request, [sampled(target, rules, prompt, own_seed, s, stops, low) for s in range(n)]
    for _ in range(3000):
        if engine.scheduler.idle:
            break
        if rng.random() < 0.1 and engine.scheduler.requests:
            engine.scheduler.preempt(rng.choice(engine.scheduler.requests).id)
        engine.step()
    assert not engine.failed
    for name, (request, texts) in want.items():
        assert results(request) == texts, name
    engine.check_whole()
    assert forced or not any(request.num_forced_tokens for request, _ in want.values())


@pytest.mark.parametrize("array_settle", [True, False])
def test_tokens_without_a_choice_are_one_step(array_settle: bool) -> None:
    """Of seven tokens two are chosen: the first, and the one behind the fork."""
    trie = TokenTrie([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 2, 6, 7], [2, 2, 2, 2, 2, 2, 2]])
    found = []
    for forced in (True, False):
        target = LanguageModel(4, 2)
        engine = FakeEngine({"target": target}, limits(40, draft_forced=forced, array_settle=array_settle))
        rules = Rules(TrieConstraint(trie, (EOS,)), lambda prompt, generated: in_trie(trie, generated, (EOS,)))
        request = request_of(engine, "one", SamplingParams(seed=5, n=2), [5, 6], rules)
        engine.run()
        want = [sampled(target, rules, [5, 6], 5, stream, (EOS,), 0) for stream in range(2)]
        assert results(request) == want
        found.append((engine.num_steps, request.num_forced_tokens))
    assert found[0][0] < found[1][0] and found[0][1] > 0 == found[1][1]


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead", "jacobi", "draft_model"])
@pytest.mark.parametrize("seed", range(4))
def test_who_drafts_guesses_where_there_is_a_choice(method: str, seed: int) -> None:
    """What is forced is drafted by itself, and is none of the guesses that are counted."""
    trie = TokenTrie([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 2, 6, 7], [1, 3, 2, 2, 2, 2, 2]])
    models: dict[str, Any] = {"target": LanguageModel(seed, 2), "draft": LanguageModel(seed, 2, noisy=0.25)}
    counts = []
    for speculative in (None, {"method": method}):
        engine = FakeEngine(models, limits(40))
        rules = Rules(TrieConstraint(trie, (EOS,)), lambda prompt, generated: in_trie(trie, generated, (EOS,)))
        params = SamplingParams(seed=5, speculative=speculative)
        request = request_of(engine, "one", params, [5, 6, 5, 6], rules)
        engine.run()
        assert results(request) == [sampled(models["target"], rules, [5, 6, 5, 6], 5, 0, (EOS,), 0)]
        counts.append((engine.num_steps, request.num_forced_tokens))
        if speculative is None:
            assert request.acceptance.num_drafts == 0
        else:
            assert request.acceptance.num_drafts <= 2, "of seven tokens two at most are chosen"
    assert counts[1][0] <= counts[0][0] and counts[0][1] >= counts[1][1] > 0


@pytest.mark.parametrize("seed", range(20))
def test_beams_return_what_lists_return(seed: int) -> None:
    rng = random.Random(seed)
    target = LanguageModel(seed, 3)
    engine = FakeEngine({"target": target, "draft": target}, limits(40))
    wanted = []
    for i, rules in enumerate(kinds(rng, (EOS,))[1:]):
        prompt = [rng.randrange(1, VOCABULARY) for _ in range(4)]
        params = BeamParams(3, max_tokens=MAX_TOKENS)

        def masked(tokens: Sequence[int], own: Rules = rules, given: int = len(prompt)) -> list[float]:
            allowed = own.allowed(list(tokens[:given]), list(tokens[given:])) or []
            values = enumerate(target(tokens))
            return [value if token in allowed else -math.inf for token, value in values]

        stopping = Stopping((), (), 0, MAX_TOKENS)
        request = request_of(engine, f"beam {i}", params, prompt, rules, stopping=stopping, eos=(EOS,))
        wanted.append((request, beam(masked, prompt, params, (EOS,))))
    engine.run()
    assert not engine.failed
    for request, texts in wanted:
        assert results(request) == texts
    engine.check_whole()


def test_a_wide_beam_search_over_a_trie_finds_the_best_sequences() -> None:
    """Equal to brute force: as many beams as the trie's widest level lose nothing."""
    for seed in range(12):
        rng = random.Random(seed)
        target = LanguageModel(seed, 3)
        sequences = sorted({tuple(rng.randrange(1, VOCABULARY) for _ in range(4)) for _ in range(20)})
        trie = TokenTrie(sequences, item_ids=range(500, 500 + len(sequences)))
        prompt = [3, 1]

        def score(sequence: Sequence[int], given: list[int] = prompt, model: LanguageModel = target) -> float:
            return sum(
                model([*given, *sequence[:i]])[token] for i, token in enumerate(sequence)
            )  # in the same order as the beams' own

        best = sorted(sequences, key=lambda sequence: -score(sequence))[:5]
        engine = FakeEngine({"target": target, "draft": target}, limits(90, max_num_batched_tokens=64))
        rules = Rules(TrieConstraint(trie, ()), lambda prompt, generated: None)
        params = BeamParams(20, max_tokens=4, early_stopping=False)
        request = request_of(engine, "beams", params, prompt, rules, stopping=Stopping((), (), 0, 4))
        engine.run()
        found = [tuple(text[2:]) for text in results(request)]
        assert found[:5] == best and len(found) == len(set(found)) == len(sequences)
        assert [rules.constraint.item(tokens) for tokens in found[:5]] == [500 + sequences.index(b) for b in best]


def failing(tokens: list[int]) -> list[int]:
    if len(tokens) == 6:
        raise ZeroDivisionError("made up")
    return [1, 2, 3]


@pytest.mark.parametrize("function", [failing, lambda tokens: [], lambda tokens: [99], lambda tokens: ["x"]])
@pytest.mark.parametrize("method", METHODS[:-1])
def test_a_function_that_fails_ends_its_request_alone(method: Any, function: Any) -> None:
    target = LanguageModel(1, 2)
    engine = FakeEngine({"target": target, "draft": target}, limits(40))
    free = Rules(FunctionConstraint(lambda tokens: None, VOCABULARY), lambda prompt, generated: list(range(8)))
    request_of(engine, "bad", method(seed=3), [1, 2], Rules(FunctionConstraint(function, VOCABULARY), free.allowed))
    others = [request_of(engine, f"{i}", method(seed=i), [1, 2, i], free) for i in range(4)]
    engine.run()
    assert list(engine.failed) == ["bad"] and "its constraint cannot say what is allowed" in str(engine.failed["bad"])
    assert isinstance(engine.failed["bad"].__cause__, (ZeroDivisionError, ValueError, TypeError))
    for i, request in enumerate(others):
        assert results(request) == [sampled(target, free, [1, 2, i], i, 0, (), 0)]
    engine.check_whole()


def test_a_function_is_asked_once_for_each_text_and_gets_all_of_it() -> None:
    asked: list[list[int]] = []

    def function(tokens: list[int]) -> list[int]:
        asked.append(list(tokens))
        tokens.append(77)  # what it is given is its own
        return [1, 2, 3, 4]

    target = LanguageModel(1, 2)
    engine = FakeEngine({"target": target, "draft": target}, limits(40))
    rules = Rules(FunctionConstraint(function, VOCABULARY), lambda prompt, generated: [1, 2, 3, 4])
    request = request_of(engine, "one", SamplingParams(n=3, seed=5), [5, 6, 7], rules)
    engine.run()
    texts = results(request)
    assert texts == [sampled(target, rules, [5, 6, 7], 5, stream, (), 0) for stream in range(3)]
    prefixes = sorted({tuple(text[:i]) for text in texts for i in range(3, len(text))})
    assert set(map(tuple, asked)) == set(prefixes)
    assert asked.count([5, 6, 7]) == 1


def test_a_trie_ends_an_answer_without_an_end_token() -> None:
    target = LanguageModel(1, 2)
    engine = FakeEngine({"target": target, "draft": target}, limits(40))
    trie = TokenTrie([[1, 2, 3], [4, 5]])
    rules = Rules(TrieConstraint(trie, (EOS,)), lambda prompt, generated: in_trie(trie, generated, (EOS,)))
    request = request_of(engine, "one", SamplingParams(seed=5), [5, 6, 7], rules, stops=(EOS,), low=7)
    engine.run()
    [hypothesis] = request.done
    assert hypothesis.reason == "stop" and hypothesis.stop_token is None
    assert trie.item(request.output(hypothesis)) in (0, 1)


def test_a_gang_learns_which_continuations_end() -> None:
    trie = TokenTrie([[1, 2, 3], [1, 4], [5, EOS]])
    target = LanguageModel(1, 2)
    engine = FakeEngine({"target": target}, limits(40))
    rules = Rules(TrieConstraint(trie, (EOS,)), lambda prompt, generated: None)
    request = request_of(engine, "one", BeamParams(2, max_tokens=4), [5, 6], rules, stops=(EOS,), low=3)
    root = request.branches[0]
    states = [rules.constraint.next(0, 1), rules.constraint.next(0, 5)]
    branches = [Branch(root.tip, {}, 0, 0, 2, constraint_state=state) for state in states]
    context = DecoderContext(request.history, 2, 9, VOCABULARY, (), request.stopping, rules.constraint)
    places, tokens = np.array([0, 0, 1]), np.array([2, 4, EOS])
    assert closing(context, branches, places, tokens).tolist() == [False, True, True]
    endings = [context.ending(branches[place], token) for place, token in zip(places, tokens.tolist(), strict=True)]
    assert [None if cut is None else cut.reason for cut in endings] == [None, "stop", "stop"]
    free = DecoderContext(request.history, 2, 9, VOCABULARY, (), request.stopping)
    assert not closing(free, branches, places, tokens).any()


# ------------------------------------------------------------------------------------------------------------ the parts
def test_min_tokens_give_way_where_nothing_else_is_allowed() -> None:
    ids, words = np.array([2, 5], np.int32), np.array([0b100100], np.uint32)
    assert without(ids, (2,), VOCABULARY).tolist() == [5] and without(ids, (2, 5), VOCABULARY).tolist() == [2, 5]
    assert without(words, (2,), 8).tolist() == [0b100000] and without(words, (2, 5), 8).tolist() == [0b100100]
    assert int(without(None, (1,), 40)[0]) == 0xFFFFFFFD
    assert words.tolist() == [0b100100]


def test_rows_as_arrays() -> None:
    words = np.array([5, 1], np.uint32)
    masks = pack_rows([None, np.array([3, 4], np.int32), words, np.array([7], np.int32)], 40)
    assert masks.places.tolist() == [-2, -1, 0, -1] and masks.indptr.tolist() == [0, 0, 2, 2, 3]
    assert masks.tokens.tolist() == [3, 4, 7] and masks.words.tolist() == [[5, 1]]
    assert pack_rows([None], 40).words.shape == (0, 2)


def test_what_is_allowed() -> None:
    words = np.array([0, 1 << 31], np.uint32)
    assert permits(words, 63) and not permits(words, 62) and not permits(words, 64)
    assert permits(None, 3) and permits(np.array([9], np.int32), 9) and not permits(np.array([9], np.int32), 3)


def test_what_stands_behind_a_forbidden_token_is_cut_off_or_an_error() -> None:
    from pagedec.core.draft import Draft

    constraint = TrieConstraint(TokenTrie([[1, 2, 3], [4, 5]]), (EOS,))
    draft = Draft((1, 7, 2, 3, 4), (0, 0, 1, 3, 0))
    assert set(node_states(constraint, frozenset({EOS}), 0, draft)) == {0, 1, 3, 5}
    stopping = Stopping((), (EOS,), 0, 9)
    cut, state = cut_within(constraint, stopping, 0, 0, (1, 2, 3, 6, 6), 99)
    assert cut.tokens == (1, 2, 3) and cut.reason == "stop" and cut.stop_token is None and constraint.is_over(state)
    with pytest.raises(Forbidden, match="token 5 is not allowed behind 1 generated token:"):
        cut_within(constraint, stopping, 0, 0, (1, 5), 99)
    cut, _ = cut_within(constraint, stopping, 0, 0, (1, 2, 3), 2)
    assert cut.tokens == (1, 2) and cut.reason == "length"


class Walked(tuple[int, ...]):
    """Counts how often somebody has gone through it."""

    num_walks = 0

    def __iter__(self) -> Iterator[int]:
        type(self).num_walks += 1
        return super().__iter__()


def test_stop_tokens_are_taken_out_of_masks_without_walking_through_them_for_each_row() -> None:
    """They may be nearly the vocabulary, of which 70 is no whole number of words, and lie behind a mask's end."""
    for ends in (Walked(range(2, 69)), Walked([0, 31, 32, 95, 200])):
        whole = np.packbits(np.arange(96) % 3 == 0, bitorder="little").view(np.uint32)
        for allowed in [None, whole, np.array([1, 2, 31, 69], np.int32)] * 5:
            left = without(allowed, ends, 70)
            before, after = ([token for token in range(70) if permits(some, token)] for some in (allowed, left))
            assert after == [token for token in before if not tuple.__contains__(ends, token)]
    assert Walked.num_walks <= 2
