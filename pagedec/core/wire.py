"""A step, its masks and its answers as one buffer each, for whoever carries out steps elsewhere: a process, or another
machine.

A message is int32 words in the machine's order: magic, version, kind, words in all, numbers, arrays; then the numbers;
then the two lengths of each array, -1 for a second one that it lacks and for both of an array that is not there; then
the arrays, each from an even word on, so that 64-bit fields are aligned. Which array is which, and of what dtype,
follows from its place. What is unpacked are views that nobody can write through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedec.core.adapter_places import AdapterFile, AdapterFiles
from pagedec.core.forward import (
    BEST_GROUP_DTYPE,
    BEST_ROW_DTYPE,
    DRAW_DTYPE,
    ROLL_DTYPE,
    Answers,
    Forwards,
    LaneAnswers,
    LaneForward,
    Masks,
    Problems,
    ProcessRows,
    Reported,
    ReportRows,
)
from pagedec.core.logits_rules import LogitsRules
from pagedec.errors import InvariantError

MAGIC, VERSION = 0x50444543, 8
FORWARDS, MASKS, ANSWERS, ROLLED, DONE = 1, 2, 3, 4, 5
LANES = ("target", "draft")
_HEAD = 6  # words before a message's numbers
_INT, _WIDE, _FLOAT, _DOUBLE = (np.dtype(code) for code in ("<i4", "<i8", "<f4", "<f8"))
_NONE = {
    dtype: np.empty(0, dtype)
    for dtype in (_INT, _WIDE, _FLOAT, _DOUBLE, DRAW_DTYPE, ROLL_DTYPE, BEST_ROW_DTYPE, BEST_GROUP_DTYPE)
}
for _none in _NONE.values():
    _none.flags.writeable = False
_Layout = tuple[tuple[str, np.dtype[Any]], ...]


def _ints(*names: str) -> _Layout:
    return tuple((name, _INT) for name in names)


_LANE: _Layout = (
    ("draws", DRAW_DTYPE), ("rolls", ROLL_DTYPE), ("best_rows", BEST_ROW_DTYPE), ("best_groups", BEST_GROUP_DTYPE),
    *_ints(
        "token_ids", "positions", "slots", "row_indptr", "kv_len", "block_table", "parents", "adapters", "copy_src",
        "copy_dst", "offload_blocks", "offload_places", "load_places", "load_adapters", "fresh", "read_rows",
        "topk_rows", "logprob_rows", "logprob_tokens", "banned_rows", "banned_tokens", "masked_rows", "roll_slots",
        "roll_indptr",
        "feature_slots", "verified_draws", "verified_tokens",
    ),
)  # fmt: skip
_PROCESS: _Layout = (*_ints("rows", "branches", "prompt_lengths"), ("rule_ids", _WIDE), ("of_logprobs", _INT))
_REPORT: _Layout = _ints("rows", "num_top", "given_rows", "given_tokens")
_LANE_ANSWERS: _Layout = (
    *_ints("draws", "topk_tokens"), ("topk_logprobs", _FLOAT), ("logprobs", _FLOAT),
    *_ints("best_counts", "best_parents", "best_tokens"), ("best_scores", _FLOAT), ("best_logprobs", _FLOAT),
    ("best_keys", _FLOAT), *_ints("rolled"),
)  # fmt: skip
_REPORTED: _Layout = (
    ("top_ids", _INT), ("top_logprobs", _FLOAT), ("given_logprobs", _FLOAT), ("given_ranks", _INT),
    ("draw_logprobs", _FLOAT), ("draw_ranks", _INT), ("topk_logprobs", _FLOAT), ("topk_ranks", _INT),
    ("logprob_ranks", _INT),
    ("best_logprobs", _FLOAT), ("best_ranks", _INT),
)  # fmt: skip
_RULES: tuple[np.dtype[Any], ...] = (_INT, _INT, _INT, _INT, _DOUBLE, _DOUBLE)  # see _arrays_of


class Step(NamedTuple):
    """What a worker is told for one step: its forwards, the rules and adapters it does not know yet, and those that no
    request has any more."""

    number: int
    forwards: Forwards
    new_rules: Mapping[int, LogitsRules]
    old_rules: Sequence[int]
    new_adapters: AdapterFiles = {}
    old_adapters: Sequence[int] = ()


def awaits_rolled(step: Step) -> bool:
    """Whether the step's masks are of tokens that its draft lane rolls: they are made when these are known."""
    target, draft = step.forwards.get("target"), step.forwards.get("draft")
    return target is not None and draft is not None and len(target.masked_rows) > 0 and len(draft.rolls) > 0


# ------------------------------------------------------------------------------------------------------------- messages
def pack_step(step: Step) -> np.ndarray:
    """The step as words."""
    counts = len(step.forwards), len(step.new_rules), len(step.new_adapters)
    numbers, arrays = [step.number, *counts], list[np.ndarray | None]()
    for forward in step.forwards.values():
        numbers += LANES.index(forward.lane), forward.topk_k
        arrays += _fields(forward, _LANE)
        arrays += _fields(forward.processing, _PROCESS)
        arrays += _fields(forward.report, _REPORT)
    arrays += np.array(list(step.new_adapters), _WIDE), np.array(step.old_adapters, _WIDE)
    for file in step.new_adapters.values():
        arrays += map(_codes, file)
    arrays += np.array(list(step.new_rules), _WIDE), np.array(step.old_rules, _WIDE)
    for rules in step.new_rules.values():
        arrays += _arrays_of(rules)
    return _pack(FORWARDS, numbers, arrays)


def unpack_step(words: np.ndarray) -> Step:
    """The step that `pack_step` was given. Raises `InvariantError` for what is no such message."""
    message = _Message(words, FORWARDS)
    number, num_lanes, num_rules, num_adapters = (message.number() for _ in range(4))
    forwards: dict[str, LaneForward] = {}
    for _ in range(num_lanes):
        lane, topk_k = LANES[message.number()], message.number()
        arrays = message.record(_LANE)
        process, report = message.record(_PROCESS), message.record(_REPORT)
        forwards[lane] = LaneForward(
            lane=lane,
            topk_k=topk_k,
            **arrays,
            processing=None if process["rows"] is None else ProcessRows(**process),
            report=None if report["rows"] is None else ReportRows(**report),
        )
    adapters, gone = message.array(_WIDE), message.array(_WIDE)
    files = [AdapterFile(_text(message.array(_INT)), _text(message.array(_INT))) for _ in range(num_adapters)]
    ids, old = message.array(_WIDE), message.array(_WIDE)
    rules = [_rules_of([message.array(dtype) for dtype in _RULES]) for _ in range(num_rules)]
    told = dict(zip(ids.tolist(), rules, strict=True)), old.tolist()
    return Step(number, forwards, *told, dict(zip(adapters.tolist(), files, strict=True)), gone.tolist())


def pack_masks(number: int, masks: Masks) -> np.ndarray:
    """The masks of step `number` as words."""
    return _pack(MASKS, [number], [masks.places, masks.words.view(np.int32), masks.indptr, masks.tokens])


def unpack_masks(words: np.ndarray) -> tuple[int, Masks]:
    """The number and the masks that `pack_masks` was given. Raises `InvariantError` for what is no such message."""
    message = _Message(words, MASKS)
    places, bits, indptr, tokens = (message.array(_INT) for _ in range(4))
    return message.number(), Masks(places, bits.view(np.uint32), indptr, tokens)


def pack_rolled(number: int, rolled: np.ndarray) -> np.ndarray:
    """What the draft lane has rolled in step `number`, before its masks are made, as words."""
    return _pack(ROLLED, [number], [rolled])


def unpack_rolled(words: np.ndarray) -> tuple[int, np.ndarray]:
    """The number and the tokens that `pack_rolled` was given. Raises `InvariantError` for what is no such message."""
    message = _Message(words, ROLLED)
    return message.number(), message.array(_INT)


def pack_answers(number: int, answers: Answers) -> np.ndarray:
    """The answers of step `number` as words."""
    numbers, arrays = [number, len(answers)], list[np.ndarray | None]()
    for lane, given in answers.items():
        numbers.append(LANES.index(lane))
        arrays += _fields(given, _LANE_ANSWERS)
        arrays += _fields(given.report, _REPORTED)
        numbers.append(len(given.not_loaded))
        arrays += _arrays_of_problems(given.not_loaded)
    return _pack(ANSWERS, numbers, arrays)


def unpack_answers(words: np.ndarray) -> tuple[int, Answers]:
    """The number and the answers that `pack_answers` was given. Raises `InvariantError` for what is no such message."""
    message = _Message(words, ANSWERS)
    number, num_lanes = message.number(), message.number()
    answers: Answers = {}
    for _ in range(num_lanes):
        lane = LANES[message.number()]
        arrays, report = message.record(_LANE_ANSWERS), message.record(_REPORTED)
        told = None if report["top_ids"] is None else Reported(**report)
        answers[lane] = LaneAnswers(**arrays, report=told, not_loaded=message.problems(message.number()))
    return number, answers


def pack_done(number: int, not_loaded: Problems) -> np.ndarray:
    """That a rank behind the first is through with step `number`, and what it could not load for it, as words."""
    return _pack(DONE, [number, len(not_loaded)], [*_arrays_of_problems(not_loaded)])


def unpack_done(words: np.ndarray) -> tuple[int, Problems]:
    """What `pack_done` was given. Raises `InvariantError` for what is no such message."""
    message = _Message(words, DONE)
    return message.number(), message.problems(message.number())


def _arrays_of_problems(problems: Problems) -> Iterator[np.ndarray]:
    if problems:
        yield np.array(list(problems), _WIDE)
        yield from map(_codes, problems.values())


# ---------------------------------------------------------------------------------------------------------------- rules
def _arrays_of(rules: LogitsRules) -> Iterator[np.ndarray | None]:
    """Allowed ids or none, where bad words begin and their tokens, biased tokens, their biases, and the four
    numbers."""
    allowed, bad, bias = rules.allowed_token_ids, rules.bad_words, rules.logit_bias
    yield None if allowed is None else np.array(allowed, _INT)
    yield np.cumsum([0, *map(len, bad)], dtype=_INT)
    yield np.array([token for word in bad for token in word], _INT)
    yield np.array([token for token, _ in bias], _INT)
    yield np.array([number for _, number in bias], _DOUBLE)
    numbers = rules.no_repeat_ngram_size, rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty
    yield np.array(numbers, _DOUBLE)


def _rules_of(arrays: Sequence[Any]) -> LogitsRules:
    allowed = None if arrays[0] is None else tuple(arrays[0].tolist())
    starts, tokens, biased, biases, numbers = (array.tolist() for array in arrays[1:])
    bad = tuple(tuple(tokens[first:stop]) for first, stop in zip(starts, starts[1:], strict=False))
    return LogitsRules(allowed, bad, tuple(zip(biased, biases, strict=True)), int(numbers[0]), *numbers[1:])


def _codes(text: str) -> np.ndarray:
    return np.array([*map(ord, text)], _INT)


def _text(codes: np.ndarray) -> str:
    return "".join(map(chr, codes.tolist()))


# ---------------------------------------------------------------------------------------------------------------- words
def _fields(record: object, layout: _Layout) -> Iterable[np.ndarray | None]:
    return [None] * len(layout) if record is None else [getattr(record, name) for name, _ in layout]


def _pack(kind: int, numbers: Sequence[int], arrays: Sequence[np.ndarray | None]) -> np.ndarray:
    lengths: list[int] = []
    filled: list[np.ndarray] = []
    for array in arrays:
        if array is None:
            lengths += (-1, -1)
            continue
        lengths += array.shape if array.ndim == 2 else (len(array), -1)
        if array.size:
            filled.append(array)
    head = [MAGIC, VERSION, kind, 0, len(numbers), len(arrays), *numbers, *lengths]
    first = _even(len(head))
    end = first + sum(_even(array.nbytes // 4) for array in filled)
    head[3] = end
    words = np.zeros(end, np.int32)
    words[: len(head)] = head
    for array in filled:
        flat = array.reshape(-1).view(np.int32)  # a copy, where an array is no row of numbers
        words[first : first + len(flat)] = flat
        first += _even(len(flat))
    return words


def _even(words: int) -> int:
    return words + (words & 1)


class _Message:
    """Reads one message from its beginning: numbers, and arrays by their place."""

    def __init__(self, words: np.ndarray, kind: int) -> None:
        head = words[:_HEAD].tolist()
        if len(head) < _HEAD or head[:3] != [MAGIC, VERSION, kind] or head[3] != len(words):
            raise InvariantError(f"a message of {len(words)} words begins with {head}; kind {kind} was due")
        self._words = words.view()
        self._words.flags.writeable = False
        num_numbers, num_arrays = head[4:]
        first = _HEAD + num_numbers
        if not 0 <= num_numbers <= len(words) or not 0 <= first + 2 * num_arrays <= len(words):
            ends = f"ends within its {num_numbers} numbers or {num_arrays} lengths"
            raise InvariantError(f"a message of {len(words)} words {ends}")
        self._numbers = words[_HEAD:first].tolist()
        self._lengths = words[first : first + 2 * num_arrays].tolist()
        self._num_read = self._num_arrays = 0
        self._at = _even(first + 2 * num_arrays)

    def number(self) -> int:
        if self._num_read >= len(self._numbers):
            raise InvariantError(f"a message ends within its {len(self._numbers)} numbers")
        self._num_read += 1
        return int(self._numbers[self._num_read - 1])

    def array(self, dtype: np.dtype[Any]) -> Any:
        """The next array; None where there is none."""
        place = 2 * self._num_arrays
        if place >= len(self._lengths):
            raise InvariantError(f"a message ends within its {len(self._lengths) // 2} arrays")
        self._num_arrays += 1
        n, width = self._lengths[place], self._lengths[place + 1]
        if n < 0:
            return None
        count = n if width < 0 else n * width
        if not count:  # most are
            return _NONE[dtype] if width < 0 else _NONE[dtype].reshape(n, width)
        size = count * dtype.itemsize // 4
        flat = self._words[self._at : self._at + size]
        if len(flat) != size:
            raise InvariantError(f"a message ends within an array of {count} {dtype}")
        self._at += _even(size)
        array = flat if dtype is _INT else flat.view(dtype)
        return array if width < 0 else array.reshape(n, width)

    def problems(self, count: int) -> dict[int, str]:
        """The next arrays as so many problems."""
        numbers = self.array(_WIDE).tolist() if count else []
        return {number: _text(self.array(_INT)) for number in numbers}

    def record(self, layout: _Layout) -> dict[str, Any]:
        """The next arrays by name."""
        return {name: self.array(dtype) for name, dtype in layout}
