"""Steps, masks and answers as words: what comes out is what went in, and what is no message is refused by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from pagedec.core.adapter_places import AdapterFile
from pagedec.core.forward import (
    BEST_GROUP_DTYPE,
    BEST_ROW_DTYPE,
    DRAW_DTYPE,
    ROLL_DTYPE,
    Answers,
    LaneAnswers,
    LaneForward,
    Masks,
    ProcessRows,
    Reported,
    ReportRows,
)
from pagedec.core.logits_rules import NO_RULES, LogitsRules
from pagedec.core.wire import (
    LANES,
    Step,
    pack_answers,
    pack_done,
    pack_masks,
    pack_rolled,
    pack_step,
    unpack_answers,
    unpack_done,
    unpack_masks,
    unpack_rolled,
    unpack_step,
)
from pagedec.errors import InvariantError
from tests.masks import of_words

DTYPES = {
    "draws": DRAW_DTYPE, "rolls": ROLL_DTYPE, "rule_ids": np.dtype(np.int64), "best_groups": BEST_GROUP_DTYPE,
    "best_rows": BEST_ROW_DTYPE, "of_logprobs": np.dtype(np.int32),
}  # fmt: skip
RULES = [
    NO_RULES,
    LogitsRules(allowed_token_ids=()),
    LogitsRules(allowed_token_ids=(5, 5, 0), bad_words=((3,), (1, 2, 3)), logit_bias=((7, 0.1), (8, -1e300))),
    LogitsRules(bad_words=((2**31 - 1,),), no_repeat_ngram_size=2**31 - 1, repetition_penalty=1 / 3),
    LogitsRules(frequency_penalty=-0.1, presence_penalty=5e-324),
]

TEXTS = ("", "/tmp/a", "\u00e9\U0001f600\udc80", "x" * 513)


class Random:
    """Arrays of any size, empty and of one entry included, of bytes that nobody chose."""

    def __init__(self, seed: int) -> None:
        self.numbers, self.sizes = np.random.default_rng(seed), random.Random(seed)

    def array(self, dtype: np.dtype[Any], *shape: int) -> np.ndarray:
        count = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(self.numbers.bytes(count), dtype).reshape(shape)

    def size(self) -> int:
        return self.sizes.choice([0, 1, 2, 3, 15, 16, 64, 65, 513])

    def record(self, kind: type[Any], **given: Any) -> Any:
        """A record of arrays; those of floats and with two sides by their comments' types."""
        values: dict[str, Any] = dict(given)
        for field in fields(kind):
            if field.name in values or "ndarray" not in str(field.type):
                continue
            dtype = DTYPES.get(field.name) or np.dtype(
                np.float32 if field.name.endswith(("logprobs", "scores", "keys")) else np.int32
            )
            if field.name == "draws" and kind is LaneAnswers:
                dtype = np.dtype(np.int32)
            two = field.name in ("block_table", "topk_tokens", "topk_ranks") or (field.name == "topk_logprobs")
            values[field.name] = self.array(dtype, self.size(), *([self.size()] if two else []))
        return kind(**values)

    def forward(self, lane: str) -> LaneForward:
        some = self.sizes.random
        return self.record(
            LaneForward,
            lane=lane,
            topk_k=self.size(),
            parents=None if some() < 0.5 else self.array(np.dtype("<i4"), self.size()),
            processing=None if some() < 0.5 else self.record(ProcessRows),
            report=None if some() < 0.5 else self.record(ReportRows),
        )

    def step(self) -> Step:
        rules = {
            self.sizes.getrandbits(62): rule for rule in self.sizes.sample(RULES, self.sizes.randrange(len(RULES) + 1))
        }
        lanes = self.sizes.choice([LANES, LANES[::-1], LANES[:1], ()])
        old = [self.sizes.getrandbits(62) for _ in range(self.sizes.randrange(4))]
        files = {self.sizes.getrandbits(62): AdapterFile(text, text[::-1]) for text in self.sizes.sample(TEXTS, 2)}
        gone = [self.sizes.getrandbits(62) for _ in range(self.sizes.randrange(3))]
        forwards = {lane: self.forward(lane) for lane in lanes}
        return Step(self.sizes.getrandbits(30), forwards, rules, old, files, gone)

    def answers(self) -> Answers:
        lanes = self.sizes.choice([LANES, LANES[:1], ()])
        return {
            lane: self.record(
                LaneAnswers,
                report=None if self.sizes.random() < 0.5 else self.record(Reported),
                not_loaded=self.problems(),
            )
            for lane in lanes
        }

    def problems(self) -> dict[int, str]:
        texts = self.sizes.sample(TEXTS, self.sizes.randrange(3))
        return {self.sizes.getrandbits(62): text for text in texts}


def same(a: Any, b: Any) -> bool:
    """Bit for bit: random floats are NaN now and then."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if is_dataclass(a) and not isinstance(a, LogitsRules):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Step):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def arrays(record: Any) -> Iterator[np.ndarray]:
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            yield value
        elif is_dataclass(value):
            yield from arrays(value)


@pytest.mark.parametrize("seed", range(60))
def test_what_goes_in_comes_out(seed: int) -> None:
    given = Random(seed)
    step, answers = given.step(), given.answers()
    assert same(unpack_step(pack_step(step)), step)
    number, back = unpack_answers(pack_answers(seed, answers))
    assert number == seed and same(back, answers)
    words, ints = given.array(np.dtype(np.uint32), given.size(), 3), np.dtype(np.int32)
    masks = Masks(given.array(ints, given.size()), words, given.array(ints, given.size()), given.array(ints, 3))
    number, unpacked = unpack_masks(pack_masks(2**30, masks))
    assert number == 2**30 and same(unpacked, masks)
    number, rolled = unpack_rolled(pack_rolled(3, masks.tokens))
    assert number == 3 and same(rolled, masks.tokens)
    problems = given.problems()
    assert unpack_done(pack_done(2**31 - 1, problems)) == (2**31 - 1, problems)


def test_what_is_unpacked_cannot_be_written_and_is_aligned() -> None:
    for seed in range(20):
        for forward in unpack_step(pack_step(Random(seed).step())).forwards.values():
            for array in arrays(forward):
                assert not array.flags.writeable and array.flags.aligned and array.flags.c_contiguous
                if array.size:
                    with pytest.raises(ValueError, match="read-only"):
                        array.reshape(-1)[0] = array.reshape(-1)[0]


def test_nothing_of_it_is_pickled() -> None:
    """The words of equal steps are equal, whatever objects they were made of."""
    first, second = Random(5).step(), Random(5).step()
    assert pack_step(first).tobytes() == pack_step(second).tobytes()
    assert b"pagedec" not in pack_step(first).tobytes() and b"numpy" not in pack_step(first).tobytes()


@pytest.mark.parametrize("cut", [0, 1, 5, 6, 7, 40, -1])
def test_a_message_cut_short_is_refused(cut: int) -> None:
    words = pack_step(Random(1).step())
    with pytest.raises(InvariantError, match="words begins with|ends within"):
        unpack_step(words[:cut])
    shorter = words[:cut].copy()
    if len(shorter) > 6:
        shorter[3] = len(shorter)  # it says so itself
        with pytest.raises(InvariantError, match="ends within"):
            unpack_step(shorter)


@pytest.mark.parametrize(
    ("place", "value"), [(0, 7), (1, 99), (2, 9), (3, 1)], ids=["magic", "version", "kind", "length"]
)
def test_another_kind_of_message_is_refused(place: int, value: int) -> None:
    words = pack_step(Random(2).step())
    words[place] = value
    with pytest.raises(InvariantError, match="kind 1 was due"):
        unpack_step(words)
    with pytest.raises(InvariantError, match="kind 3 was due"):
        unpack_answers(pack_masks(1, of_words(np.zeros((1, 1), np.uint32))))
