"""What users of searches do wrong, and a context that ends in the middle of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagedec import LLM
from pagedec.errors import InvalidArgument
from pagedec.llm.session import SessionBranch
from pagedec.search import ModelJudge, best_of_n, mcts, self_consistency, step_beam_search

PROMPT = "One two three four five six seven eight nine ten eleven twelve"
FEW: Any = {"max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM("smollm2", num_blocks=60, max_model_len=32)
    yield made
    made.engine.scheduler.check()
    made.close()


def length(branch: SessionBranch) -> float:
    return float(branch.num_tokens)


def test_what_is_refused(llm: LLM) -> None:
    session: Any = llm.session(PROMPT, seed=1)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: best_of_n(llm, length, 2), "branch is <LLM smollm2: "),  # type: ignore[arg-type]
        (lambda: best_of_n(session, None, 2), "scorer is None: must be a function of a branch that returns a number"),
        (
            lambda: best_of_n(session, lambda _: None, 2, **FEW),
            "scorer(<SessionBranch 0.0: 20 tokens>) is None: must be a",
        ),
        (
            lambda: best_of_n(session, lambda _: math.nan, 2, **FEW),
            "scorer(<SessionBranch 0.2: 20 tokens>) is nan: must",
        ),
        (
            lambda: best_of_n(session, lambda _: "9", 2, **FEW),
            "scorer(<SessionBranch 0.4: 20 tokens>) is '9': must be a",
        ),
        (lambda: best_of_n(session, ModelJudge, 2, **FEW), "scorer(<SessionBranch 0.6: 20 tokens>) is ModelJudge("),
        (lambda: self_consistency(session, None, 2), "answer_of is None: must be a function of a text"),
        (lambda: self_consistency(session, str.split, 2, **FEW), "answer_of is ['"),  # type: ignore[arg-type]
        (lambda: self_consistency(PROMPT, len, 2), f"branch is '{PROMPT}': must be a branch of a session of `LLM`"),
        (lambda: step_beam_search(session, None), "judge is None: must be a function of a branch"),
        (lambda: step_beam_search(session, length, width=0), "width is 0: must be a whole number from 1"),
        (lambda: step_beam_search(session, length, samples=0), "samples is 0: must be a whole number from 1"),
        (lambda: step_beam_search(session, length, steps=-1), "steps is -1: must be a whole number from 1"),
        (lambda: step_beam_search(session, length, delimiter=""), "delimiter is '': must be a text that is not empty"),
        (lambda: mcts(session, length, simulations=0), "simulations is 0: must be a whole number from 1"),
        (lambda: mcts(session, length, samples="4"), "samples is '4': must be a whole number from 1"),
        (lambda: mcts(session, length, exploration=-1), "exploration is -1: must be a finite number at least 0"),
        (lambda: mcts(session, length, delimiter=["."]), "delimiter is ['.']: must be a text that is not empty"),
        (
            lambda: mcts(session, lambda _: -math.inf, **FEW),
            "scorer(<SessionBranch 0.8.0: 20 tokens>) is -inf: must be a",
        ),
    ]
    for act, message in cases:
        with pytest.raises(InvalidArgument) as caught:
            act()
        assert str(caught.value).startswith(message)
    assert session.text == PROMPT


def test_an_answer_that_has_ended_is_found_once(llm: LLM) -> None:
    with llm.session(PROMPT, seed=1) as session:
        end = list(llm.get_tokenizer().eos_token_ids)
        found = step_beam_search(session, length, width=3, samples=4, steps=2, allowed_token_ids=end, max_tokens=8)
        assert [beam.branch.token_ids[-1] for beam in found] == end and found[0].ended


def test_a_context_that_ends(llm: LLM) -> None:
    """What has no room to go on has ended; the others, and the search, go on."""
    with llm.session(PROMPT, seed=1) as session:
        assert session.room == 32 - 12
        found = step_beam_search(session, length, width=2, samples=2, steps=5, **FEW)
        assert [(beam.ended, beam.branch.num_tokens, beam.branch.room) for beam in found] == [(True, 32, 0)] * 2
        root = mcts(session, length, simulations=12, samples=2, **FEW)
        assert root.line()[-1].ended and root.line()[-1].branch.room == 0 and root.visits >= 12
        best = best_of_n(session, length, 2, max_tokens=30, ignore_eos=True)
        assert best.ended and best.branch.room == 0


def test_a_judge_at_the_end_of_a_context(llm: LLM) -> None:
    """Before, a search that had come so far ended with its question's length."""
    judge = ModelJudge("\nGood?", " Yes", " No")
    with llm.session(PROMPT, seed=1) as session:
        found = step_beam_search(session, judge, width=2, samples=2, steps=5, **FEW)
        assert [(beam.ended, beam.branch.num_tokens) for beam in found] == [(True, 32)] * 2
        assert mcts(session, judge, simulations=8, samples=2, **FEW).line()[-1].branch.room == 0
        full, short = found[0].branch, found[0].branch.fork()
        short.rollback(2 + len("\nGood? Yes"))
        assert judge(full) == judge(short) == found[0].score and full.num_tokens == 32
