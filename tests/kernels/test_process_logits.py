"""Rules of requests on logits: against their meaning token by token, and against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from pagedec.core.logits_rules import LogitsRules
from pagedec.errors import InvalidArgument
from pagedec.kernels.backend import Backend
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import Context, KernelError, ProcessLogitsArgs, Rules
from pagedec.kernels.processing import rows_within
from pagedec.runtime.runner import RuleTable
from tests.kernels import calls
from tests.kernels.processing_cases import Case, processed, random_case, simple_case

SEEDS = range(25)


def torch_backend() -> Backend:
    return ReferenceBackend(torch.float32)


def native(context: Context) -> Backend:
    return calls.native(context)


def assert_exact(case: Case, backend: Backend) -> None:
    assert calls.same_bits(case.process(backend), case.expected())


@pytest.mark.parametrize("seed", SEEDS)
def test_chains_and_trees_of_many_branches(context: Context, seed: int) -> None:
    assert_exact(random_case(seed), native(context))
    assert_exact(random_case(seed + 1000, trees=False, vocab=30), native(context))


@pytest.mark.parametrize("seed", SEEDS)
def test_torch_gives_the_same(seed: int) -> None:
    assert_exact(random_case(seed), torch_backend())
    assert_exact(random_case(seed + 1000, trees=False, vocab=30), torch_backend())


def test_cases_are_worth_something() -> None:
    """Every rule changes some row of the random cases, and trees, shared blocks and unprocessed rows are among them."""
    fields = ("allowed_token_ids", "bad_words", "logit_bias", "no_repeat_ngram_size", "repetition_penalty",
              "frequency_penalty", "presence_penalty")  # fmt: skip
    changed = dict.fromkeys(fields, 0)
    nodes = shared = untouched = 0
    for case in map(random_case, SEEDS):
        forward, wanted = case.forward, case.forward.processing
        assert wanted is not None and forward.parents is not None
        nodes += int((forward.parents[forward.read_rows[wanted.rows]] >= 0).sum())
        shared += int((forward.block_table[1:, 0] == forward.block_table[:-1, 0]).sum())
        untouched += len(forward.read_rows) - len(wanted.rows)
        for row, prompt, rule in zip(wanted.rows, wanted.prompt_lengths, wanted.rule_ids, strict=True):
            rules, logits = case.rules[rule], case.logits[row].numpy()
            for field in fields:
                alone = LogitsRules(**{field: getattr(rules, field)})
                changed[field] += not np.array_equal(processed(logits, case.histories[row], int(prompt), alone), logits)
    assert min(*changed.values(), nodes, shared, untouched) > 20, (changed, nodes, shared, untouched)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_pieces_equal_the_whole(context: Context, size: int) -> None:
    for backend in (native(context), torch_backend()):
        for seed in range(5):
            case = random_case(seed)
            starts = range(0, len(case.logits), size)
            pieces = [case.process(backend, start, min(start + size, len(case.logits))) for start in starts]
            assert calls.same_bits(torch.cat(pieces), case.expected())


def test_rows_do_not_depend_on_threads_or_neighbours(context: Context) -> None:
    backend = native(context)
    for seed in range(5):
        case = random_case(seed)
        wanted = case.forward.processing
        assert wanted is not None
        whole = case.process(backend)
        for num_threads in (1, 2, 3, 7):
            backend = calls.native(context, num_threads)
            assert calls.same_bits(case.process(backend), whole)
            for i, row in enumerate(wanted.rows):
                alone = case.only([i]).process(backend)
                assert calls.same_bits(alone[row], whole[row])
                assert calls.same_bits(alone[row + 1 :], case.logits[row + 1 :])


def test_nothing_is_processed_without_rules(context: Context) -> None:
    case = random_case(1)
    for backend in (native(context), torch_backend()):
        for other in (replace(case, forward=replace(case.forward, processing=None)), case.only([])):
            assert calls.same_bits(other.process(backend), case.logits)
    assert rows_within(None, 0, 5) == slice(0, 0)


def test_long_histories_and_a_large_vocabulary(context: Context) -> None:
    rng, vocab = np.random.default_rng(0), 1000
    histories = [rng.integers(0, 50, 3000).tolist(), [7] * 3000, [*([3, 4] * 1500)]]
    words, biases = ((3,), (4, 3, 5), (7, 7, 7, 8)), ((9, 2.5), (10, -1.0))
    rules = LogitsRules(None, words, biases, 4, 1.3, 0.01, 0.2)
    case = simple_case(histories, calls.normal(3, vocab, seed=1, scale=4.0), rules, prompt=1000)
    for backend in (native(context), torch_backend()):
        assert_exact(case, backend)
        assert case.process(backend)[1, 7] == -torch.inf


# ---- the edges of each rule, one by one


@pytest.mark.parametrize(
    ("rules", "history", "banned"),
    [
        (LogitsRules(no_repeat_ngram_size=1), [3, 5], {3, 5}),
        (LogitsRules(no_repeat_ngram_size=2), [3], set()),
        (LogitsRules(no_repeat_ngram_size=2), [3, 3], {3}),
        (LogitsRules(no_repeat_ngram_size=3), [1, 2], set()),
        (LogitsRules(no_repeat_ngram_size=3), [1, 2, 3, 1, 2], {3}),
        (LogitsRules(no_repeat_ngram_size=4), [1, 1, 1, 1], {1}),
        (LogitsRules(no_repeat_ngram_size=9), [1, 2, 3], set()),
        (LogitsRules(no_repeat_ngram_size=7), [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0], {0, 1}),
        (LogitsRules(bad_words=((4,),)), [1], {4}),
        (LogitsRules(bad_words=((1, 4),)), [1], {4}),
        (LogitsRules(bad_words=((1, 1, 4),)), [1], set()),
        (LogitsRules(bad_words=((2, 1, 4), (1, 5))), [0, 2, 1], {4, 5}),
        (LogitsRules(bad_words=((2, 1, 4),)), [2, 1, 0], set()),
        (LogitsRules(allowed_token_ids=(2, 2, 0)), [1], {1, 3, 4, 5, 6}),
        (LogitsRules(allowed_token_ids=()), [1], set(range(7))),
        (LogitsRules(allowed_token_ids=(1, 2), bad_words=((1,),), logit_bias=((3, 100.0), (1, 5.0))), [1],
         {0, 1, 3, 4, 5, 6}),
    ],
)  # fmt: skip
def test_bans(context: Context, rules: LogitsRules, history: list[int], banned: set[int]) -> None:
    case = simple_case([history], torch.ones(1, 7), rules)
    for backend in (native(context), torch_backend()):
        out = case.process(backend)[0]
        assert {i for i in range(7) if out[i] == -torch.inf} == banned
        assert_exact(case, backend)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("n", [2, 3, 5, 6, 7])
def test_ngrams_of_every_history_of_two_tokens(context: Context, n: int) -> None:
    """Histories that overlap with themselves in every way there is."""
    for length in (n, 11):
        histories = [[i >> j & 1 for j in range(length)] for i in range(2**length)]
        case = simple_case(histories, torch.ones(len(histories), 2), LogitsRules(no_repeat_ngram_size=n))
        expected = case.expected()
        for backend in (native(context), torch_backend()):
            assert calls.same_bits(case.process(backend), expected)


def test_penalties_follow_the_sign_and_the_count(context: Context) -> None:
    rules = LogitsRules(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    case = simple_case([[0, 1, 1, 2, 2, 2]], torch.tensor([[4.0, 4.0, -4.0, 4.0]]), rules, prompt=2)
    for backend in (native(context), torch_backend()):
        assert case.process(backend)[0].tolist() == [2.0, 2.0 - 0.5 - 0.25, -8.0 - 1.5 - 0.25, 4.0]


def test_prompt_may_be_longer_than_what_a_row_sees(context: Context) -> None:
    case = simple_case([[1, 2]], torch.ones(1, 4), LogitsRules(frequency_penalty=1.0), prompt=9)
    for backend in (native(context), torch_backend()):
        assert case.process(backend).tolist() == [[1.0] * 4]


def test_unknown_tokens_of_a_history_are_passed_over(context: Context) -> None:
    history = [-1, 2, 7, 2**31 - 1, -(2**31), 2, 7]
    rules = LogitsRules(no_repeat_ngram_size=1, repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=1.0)
    case = simple_case([history, [3]], torch.ones(2, 7), rules)
    for backend in (native(context), torch_backend()):
        out = case.process(backend)
        assert out[0].tolist() == [1, 1, -torch.inf, 1, 1, 1, 1]
        assert out[1].tolist() == [1, 1, 1, -torch.inf, 1, 1, 1]


@pytest.mark.parametrize("vocab", [1, 63, 64, 1000])
def test_a_row_without_any_token_left_is_still_read_out(context: Context, vocab: int) -> None:
    """The lowest id, and no NaN."""
    case = simple_case([[0]] * 3, calls.normal(3, vocab, seed=1), LogitsRules(allowed_token_ids=()))
    rows = np.arange(3, dtype=np.int32)
    draws = calls.draws(5, row=[0, 0, 1, 2, 2], temperature=[0, 1, 0.5, 1, 1], top_p=[1, 1, 1, 0.9, 1])
    draws["top_k"], draws["min_p"] = [0, 0, 1, 0, 0], [0, 0, 0, 0, 0.1]
    for backend in (native(context), torch_backend()):
        logits = case.process(backend)
        assert (logits == -torch.inf).all()
        assert backend.sample(logits, draws).tolist() == [0] * 5
        assert backend.sample(logits, calls.draws(3, row=rows, temperature=0.0)).tolist() == [0] * 3
        k = min(3, vocab)
        ids, values, lse = backend.topk(logits, rows, k)
        assert ids.tolist() == [list(range(k))] * 3
        assert (values == -np.inf).all() and (lse == -np.inf).all()


# ---- transformers


def against_transformers(
    context: Context, rules: LogitsRules, processor: Callable[..., torch.Tensor], low: int
) -> None:
    rng, vocab = np.random.default_rng(3), 20
    for length in (low, low + 1, 12, 70):
        history = rng.integers(0, vocab if length < 70 else 5, (6, length))
        logits = calls.normal(6, vocab, seed=length, scale=3.0)
        expected = processor(torch.from_numpy(history), logits.clone())
        case = simple_case(history.tolist(), logits, rules)
        for backend in (native(context), torch_backend()):
            assert calls.same_bits(case.process(backend), expected)


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3])
def test_repetition_penalty_is_that_of_transformers(context: Context, penalty: float) -> None:
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    against_transformers(context, LogitsRules(repetition_penalty=penalty), processor, 1)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_ngrams_are_those_of_transformers(context: Context, n: int) -> None:
    processor = transformers.NoRepeatNGramLogitsProcessor(n)
    against_transformers(context, LogitsRules(no_repeat_ngram_size=n), processor, 1)


def test_bad_words_are_those_of_transformers(context: Context) -> None:
    """From three tokens on: transformers passes over a word longer than the history even if its prefix is all of it."""
    words = ((4,), (1, 2), (2, 1), (3, 3), (0, 1, 2), (4, 4, 4))
    processor = transformers.NoBadWordsLogitsProcessor([list(word) for word in words])
    against_transformers(context, LogitsRules(bad_words=words), processor, 3)


def test_biases_are_those_of_transformers(context: Context) -> None:
    biases = ((0, 2.5), (7, -3.1), (19, 1e-3))
    processor = transformers.SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases})
    against_transformers(context, LogitsRules(logit_bias=biases), processor, 1)


def test_allowed_tokens_are_those_of_transformers(context: Context) -> None:
    allowed = (3, 11, 4)
    processor = transformers.PrefixConstrainedLogitsProcessor(lambda *_: list(allowed), num_beams=1)
    against_transformers(context, LogitsRules(allowed_token_ids=allowed), processor, 1)


# ---- rules that change log-probabilities, as under beams


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_become_log_probabilities_before_their_rules(context: Context, seed: int) -> None:
    case = random_case(seed, trees=True)
    wanted = case.forward.processing
    assert wanted is not None
    marked = case.of_logprobs(np.random.default_rng(seed).random(len(wanted.rows)) < 0.7)
    for backend in (native(context), torch_backend()):
        lse = backend.topk(case.logits, np.arange(len(case.logits), dtype=np.int32), 0)[2].astype(np.float32)
        half = len(case.logits) // 2
        pieces = [marked.process(backend, 0, half), marked.process(backend, half)]
        assert calls.same_bits(torch.cat(pieces), marked.expected(lse))


def test_rows_that_are_all_banned_stay_so(context: Context) -> None:
    logits = calls.normal(3, 20, seed=1)
    logits[1] = -torch.inf
    case = simple_case([[1, 2]] * 3, logits, LogitsRules(repetition_penalty=2.0)).of_logprobs()
    for found in (case.process(native(context)), case.process(torch_backend())):
        assert not found.isnan().any() and (found[1] == -torch.inf).all() and (found[[0, 2]] < 0).all()


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_processors_on_log_probabilities_are_those_of_transformers(context: Context, penalty: float) -> None:
    """As in transformers' beam search: log_softmax, then the processors in their order, and no renormalising."""
    rules = LogitsRules(
        bad_words=((4,), (1, 2)), logit_bias=((0, 2.5), (7, -3.1)), no_repeat_ngram_size=2, repetition_penalty=penalty
    )
    processors = [
        transformers.NoBadWordsLogitsProcessor([[4], [1, 2]]),
        transformers.SequenceBiasLogitsProcessor({(0,): 2.5, (7,): -3.1}),
        transformers.NoRepeatNGramLogitsProcessor(2),
        transformers.RepetitionPenaltyLogitsProcessor(penalty),
    ]
    rng, vocab = np.random.default_rng(5), 20
    for length in (3, 12, 70):
        history = rng.integers(0, vocab, (6, length))
        logits = calls.normal(6, vocab, seed=length, scale=3.0)
        expected = torch.log_softmax(logits, -1)
        for processor in processors:
            expected = processor(torch.from_numpy(history), expected)
        case = simple_case(history.tolist(), logits, rules).of_logprobs()
        for backend in (native(context), torch_backend()):
            assert torch.allclose(case.process(backend), expected, rtol=1e-5, atol=1e-5)


# ---- what is refused


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (LogitsRules(allowed_token_ids=(3, 7)), "allowed_token_ids is 7: its token ids must be from 0 to 6"),
        (LogitsRules(bad_words=((3,), (2, -1))), "bad_words is -1: its token ids"),
        (LogitsRules(bad_words=((3,), ())), r"bad_words is \(\): each must have one token or more"),
        (LogitsRules(logit_bias=((2**40, 1.0),)), "logit_bias is 1099511627776: its token ids"),
        (LogitsRules(logit_bias=((1, 1.0), (1, 2.0))), "logit_bias is .*: each token id must stand there once"),
        (LogitsRules(logit_bias=((1, 1e40),)), r"logit_bias is 1e\+40: must be finite in fp32"),
        (LogitsRules(repetition_penalty=0.0), "repetition_penalty is 0.0: must be above 0 in fp32"),
        (LogitsRules(repetition_penalty=1e-60), "repetition_penalty is 1e-60: must be above 0 in fp32"),
        (LogitsRules(frequency_penalty=float("inf")), "frequency_penalty is inf: must be finite"),
        (LogitsRules(presence_penalty=float("nan")), "presence_penalty is nan: must be finite"),
        (LogitsRules(no_repeat_ngram_size=-2), "no_repeat_ngram_size is -2: must be from 0"),
    ],
)
def test_rules_without_a_meaning_are_named(context: Context, rules: LogitsRules, message: str) -> None:
    case = simple_case([[1]], torch.ones(1, 7), rules)
    for backend in (native(context), torch_backend()):
        with pytest.raises(InvalidArgument, match=f"^{message}"):
            case.process(backend)


def record(**fields: object) -> tuple[ProcessLogitsArgs, list[object]]:
    """A valid record of one row of one branch with the fields given; and what keeps it alive."""
    numbers = {"num_allowed": -1, "repetition_penalty": 1.0}
    rules = Rules(**(numbers | {k: v for k, v in fields.items() if hasattr(Rules, k)}))
    zero, one, logits = calls.ints([0, 0]), calls.ints([0, 1]), torch.zeros(4)
    pointers = dict.fromkeys(
        ("rows", "rule_ids", "prompt_lengths", "branches", "query_rows", "block_table", "token_plane"), zero.data_ptr()
    )
    sizes = {"num_rules": 1, "num_branches": 1, "table_stride": 1, "block_size": 8, "vocab": 4}
    pointers |= {"row_indptr": one.data_ptr(), "kv_len": one.data_ptr() + 4, "num_rows": one.data_ptr() + 4}
    pointers |= {"logits": logits.data_ptr(), "rules": np.frombuffer(rules, np.uint8).ctypes.data}
    own = {k: v for k, v in fields.items() if hasattr(ProcessLogitsArgs, k)}
    keep: list[object] = [rules, zero, one, logits]
    for name, value in own.items():
        if isinstance(value, list):
            keep.append(calls.ints(value))
            own[name] = keep[-1].data_ptr()  # type: ignore[attr-defined]
    return ProcessLogitsArgs(**(pointers | sizes | own)), keep


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logits": None}, "logits is NULL"),
        ({"token_plane": None}, "token_plane is NULL"),
        ({"vocab": 0}, "vocab is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"rows": [-1]}, r"rows\[0\] is -1"),
        ({"num_rows": [2], "rows": [3, 3]}, r"rows\[1\] is 3; it must be 0 or more and above"),
        ({"rule_ids": [1]}, r"rule_ids\[\] is 1; it must be 0 to 0"),
        ({"branches": [1]}, r"branches\[\] is 1; it must be 0 to 0"),
        ({"query_rows": [1]}, r"query_rows\[\] is 1; it must be 0 to 0"),
        ({"prompt_lengths": [-1]}, r"prompt_lengths\[\] is -1"),
        ({"kv_len": [0]}, r"kv_len\[\] is 0; it must be 1 to 8"),
        ({"kv_len": [9]}, r"kv_len\[\] is 9; it must be 1 to 8"),
        ({"parents": [0]}, r"parents\[0\] is 0; a parent stands before its node"),
        ({"num_allowed": -2}, r"rules\[0\].num_allowed is -2"),
        ({"num_allowed": 1}, r"rules\[\].allowed is NULL"),
        ({"num_words": 1}, r"rules\[\].word_indptr is NULL"),
        ({"num_biases": 1}, r"rules\[\].bias_tokens is NULL"),
        ({"no_repeat_ngram_size": -1}, r"rules\[0\].no_repeat_ngram_size is -1"),
        ({"repetition_penalty": 0.0}, r"rules\[0\].repetition_penalty is 0"),
        ({"presence_penalty": float("inf")}, r"rules\[0\].presence_penalty is inf"),
    ],
)
def test_an_invalid_record_is_named(context: Context, fields: dict[str, object], message: str) -> None:
    valid, kept = record()
    context.call(valid)
    assert len(kept) == 4
    invalid, kept = record(**fields)
    with pytest.raises(KernelError, match=f"^pd_process_logits: {message}"):
        context.call(invalid)


def test_rules_are_made_once_when_a_row_first_names_them() -> None:
    table = RuleTable(torch_backend(), 7)
    table.told |= {5: LogitsRules(bad_words=((3,), (9,))), 2**40: LogitsRules(repetition_penalty=0.0)}
    assert not table, "nothing is made before somebody asks"
    assert table[5].word_tokens.tolist() == [3], "of a word that the model does not know nothing is left"
    assert table[5] is table[5] and list(table) == [5]
    with pytest.raises(InvalidArgument, match="repetition_penalty is 0"):
        table[2**40]
    with pytest.raises(KeyError):
        table[6]


def test_rows_name_rules_by_any_number(context: Context) -> None:
    """Large numbers, several rows of one number, rules that no row names."""
    case = random_case(3)
    numbers = sorted(case.rules)
    for backend in (native(context), torch_backend()):
        renamed = {2**62 + 3 * i: case.rules[number] for i, number in enumerate(numbers)}
        wanted = case.forward.processing
        assert wanted is not None
        ids = np.array([2**62 + 3 * numbers.index(int(rule_id)) for rule_id in wanted.rule_ids])
        other = replace(case, forward=replace(case.forward, processing=replace(wanted, rule_ids=ids)), rules=renamed)
        assert calls.same_bits(other.process(backend), case.expected())
