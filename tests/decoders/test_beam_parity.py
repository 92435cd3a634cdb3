"""Beam search returns what transformers returns: on a model whose logits are a table, where nothing is rounded
differently, every token, score and beam index is equal. transformers 5.x is asked here; 4.38.2's answers are recorded
(tests/data/beam_438.json), and asked again in a long run where TRANSFORMERS_438_PYTHON names a Python that has it.

python -m tests.decoders.test_beam_parity      # records them anew
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation import logits_process

from pagedec.core.stop_strings import StopStrings
from pagedec.core.stopping import Stopping
from pagedec.params import BeamSearchParams
from tests.decoders.beam_driver import Search
from tests.decoders.beam_reference import VOCAB, Case, search, table_of

RECORDED = Path(__file__).parents[1] / "data" / "beam_438.json"
OTHER_PYTHON = "TRANSFORMERS_438_PYTHON"
FIRST = ord("0")
LETTERS = [bytes([FIRST + token]) for token in range(VOCAB)]
LENGTH_PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)


def draw(rng: random.Random, groups: bool = False) -> Case:
    """A case at random."""
    width = rng.choice((2, 4, 6, 8)) if groups else rng.randint(2, 8)
    max_tokens = rng.randint(1, 16)
    case: Case = {
        "seed": rng.randrange(4), "lift": rng.choice((0.0, 1.0, 2.0, 3.0)), "width": width,
        "eos": sorted(rng.sample(range(VOCAB), rng.choice((0, 1, 1, 2, 3)))), "answers": rng.randint(1, width),
        "prompt": [rng.randrange(VOCAB) for _ in range(rng.randint(2, 6))],
        "length_penalty": rng.choice(LENGTH_PENALTIES), "early_stopping": rng.choice((True, False, "never")),
        "max_tokens": max_tokens, "min_tokens": rng.choice((0, 0, rng.randint(0, max_tokens))),
    }  # fmt: skip
    if groups:  # a group that is done goes on with end tokens
        case["eos"] = case["eos"] or [rng.randrange(VOCAB)]
    if rng.random() < 0.4:
        case["repetition_penalty"] = rng.choice((0.8, 1.2, 2.0))
    if rng.random() < 0.3:
        case["no_repeat_ngram_size"] = rng.choice((1, 2, 3))
    if rng.random() < 0.3:
        ends = set(case["eos"])  # transformers takes end tokens out of bad words
        words = [[t for t in rng.sample(range(VOCAB), rng.randint(1, 2)) if t not in ends] for _ in range(3)]
        case["bad_words_ids"] = [word for word in words if word] or None
    if rng.random() < 0.3:
        case["sequence_bias"] = [[[token], rng.uniform(-3, 3)] for token in rng.sample(range(VOCAB), 3)]
    if groups:
        divisors = [count for count in range(2, width + 1) if width % count == 0]
        case |= {"groups": rng.choice(divisors), "diversity_penalty": rng.choice((0.3, 1.0, 3.0))}
    return case


def processors(case: Case) -> Any:
    """transformers' own, in its order."""
    out = transformers.LogitsProcessorList()
    if case.get("sequence_bias"):
        out.append(logits_process.SequenceBiasLogitsProcessor({tuple(i): x for i, x in case["sequence_bias"]}))
    if case.get("repetition_penalty"):
        out.append(logits_process.RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    if case.get("no_repeat_ngram_size"):
        out.append(logits_process.NoRepeatNGramLogitsProcessor(case["no_repeat_ngram_size"]))
    if case.get("bad_words_ids"):
        out.append(logits_process.NoBadWordsLogitsProcessor(case["bad_words_ids"], None))
    return out


def ours(case: Case, semantics: str, **sampling: Any) -> Search:
    """The case, searched by the decoder with the same log-probabilities."""
    logits, rules = torch.from_numpy(table_of(case)), processors(case)

    def logprobs(text: Sequence[int]) -> np.ndarray:
        row = torch.log_softmax(logits[text[-2], text[-1]][None], dim=-1)
        return np.asarray(rules(torch.tensor([text]), row)[0].numpy())

    params = BeamSearchParams(
        beam_width=case["width"],
        num_return_sequences=case["answers"],
        max_tokens=case["max_tokens"],
        min_tokens=case["min_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        num_beam_groups=case.get("groups", 1),
        diversity_penalty=case.get("diversity_penalty", 0.0),
        repetition_penalty=case.get("repetition_penalty") or 1.0,
        hf_semantics=semantics,
        **sampling,
    )
    eos, stopping = tuple(case["eos"]), None
    if case.get("stop"):
        strings = StopStrings(["".join(chr(FIRST + token) for token in end) for end in case["stop"]])
        stopping = Stopping(eos, (), case["min_tokens"], case["max_tokens"], strings=strings, pieces=LETTERS)
    return Search(params, case["prompt"], logprobs, VOCAB, eos, stopping).run()


def padded(case: Case, found: Search, length: int, first_end: bool) -> list[list[int]]:
    """Our answers as transformers writes them. `first_end`: it writes the first end token for whichever came."""
    eos = case["eos"]
    out = []
    for text in found.texts():
        if first_end and text[-1] in eos and len(text) > 0:
            text = [*text[:-1], eos[0]]
        out.append(text + [eos[0] if eos else -1] * (length - len(text)))
    return out


def assert_equal(case: Case, want: dict[str, Any], semantics: str) -> Search:
    """What we find, which is what transformers finds."""
    found = ours(case, semantics)
    sequences, grouped = want["sequences"], case.get("groups", 1) > 1
    old = semantics == "4.38"
    got = padded(case, found, len(sequences[0]), old)
    assert got == sequences, case
    scores = [np.float32(answer.score).item() for answer in found.done]
    # torch rounds a log_softmax by the processor's vectors, a bit a token; what is taken for diversity, elsewhere
    near = 1e-5 if grouped and case.get("repetition_penalty") else 1e-6
    assert scores == pytest.approx(want["scores"], rel=near, abs=near), case
    if not grouped:  # 4.38.2 mixes up the beam indices of groups
        indices = [[index for index in row if index >= 0] for row in want["beam_indices"]]
        assert [list(answer.ancestry) for answer in found.done] == indices, case
    assert_settled(found)
    return found


def assert_settled(found: Search) -> None:
    """What was said to be settled never fell, and all answers begin with it."""
    assert found.settled == sorted(found.settled)
    if found.settled:
        common = len(os.path.commonprefix([*found.texts()]))
        longest = max(map(len, found.texts()))
        assert found.settled[-1] <= len(found.prompt) + min(common, longest)


def cases(count: int, seed: int, groups: bool = False) -> list[Case]:
    rng = random.Random(seed)
    return [draw(rng, groups) for _ in range(count)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small arrays: torch's threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_five() -> None:
    """Every token, every bit of every score, every beam index."""
    for case in cases(60, seed=5):
        assert_equal(case, search(case), "5")


def test_five_with_stop_strings() -> None:
    """As candidates that end. A text that the prompt begins and the answer ends is none."""
    rng, ended = random.Random(6), 0
    for case in cases(40, seed=66):
        case["min_tokens"], end = 0, rng.randrange(VOCAB)
        texts = ours(case, "5").texts()
        pairs = [[*pair] for text in texts for pair in itertools.pairwise(text) if rng.random() < 0.3]
        case["stop"] = [pair for pair in pairs if pair[0] != case["prompt"][-1]] + [[end]] * (end not in case["eos"])
        found = assert_equal(case, search(case), "5")
        ended += sum(len(answer.stop_string or "") == 2 for answer in found.done)
    assert ended > 5


@pytest.mark.long
def test_five_at_length() -> None:
    for case in cases(2000, seed=55):
        assert_equal(case, search(case), "5")


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["beams", "groups"])
def test_four_as_recorded(kind: str, first: int) -> None:
    """Every second case."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert recorded["transformers"] == "4.38.2"
    for case, want in recorded[kind][first::2]:
        assert_equal(case, want, "4.38")


def ask_other(python: str, asked: list[Case]) -> dict[str, Any]:
    """What 4.38.2 answers."""
    file = Path(__file__).with_name("beam_reference.py")
    done = subprocess.run([python, str(file)], input=json.dumps(asked), capture_output=True, text=True, check=True)
    answers: dict[str, Any] = json.loads(done.stdout)
    assert answers["transformers"] == "4.38.2"
    return answers


@pytest.mark.long
@pytest.mark.skipif(OTHER_PYTHON not in os.environ, reason=f"{OTHER_PYTHON} names no Python with transformers 4.38.2")
@pytest.mark.parametrize("groups", [False, True])
def test_four_at_length(groups: bool) -> None:
    asked = cases(1000, seed=438 + groups, groups=groups)
    for case, want in zip(asked, ask_other(os.environ[OTHER_PYTHON], asked)["answers"], strict=True):
        assert_equal(case, want, "4.38")


def record() -> None:
    """Write what 4.38.2 answers."""
    out: dict[str, Any] = {"transformers": "4.38.2"}
    for kind, groups, count in (("beams", False, 120), ("groups", True, 80)):
        asked = cases(count, seed=40 + groups, groups=groups)
        out[kind] = list(zip(asked, ask_other(os.environ[OTHER_PYTHON], asked)["answers"], strict=True))
    RECORDED.write_text(json.dumps(out, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
