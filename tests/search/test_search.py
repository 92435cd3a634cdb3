"""Searches on sessions find what the same searches on plain lists find."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedec import LLM
from pagedec.llm.session import SessionBranch
from pagedec.search import ModelJudge, best_of_n, mcts, self_consistency, step_beam_search

PROMPT = "Question: What do you need to bake bread?\nAnswer:"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM("smollm2", num_blocks=200, max_model_len=512)
    yield made
    made.engine.scheduler.check()
    assert len(made.engine.scheduler.parking) == 0
    made.close()


def vowels(branch: SessionBranch) -> float:
    return float(sum(letter in "aeiou" for letter in branch.text))


def test_best_of_n(llm: LLM) -> None:
    with llm.session(PROMPT, seed=1) as session:
        found = best_of_n(session, vowels, n=4, max_tokens=8, temperature=1.0)
        with llm.session(PROMPT, seed=1) as other:
            output = other.generate(n=4, max_tokens=8, temperature=1.0, keep="none")
        texts = [PROMPT + answer.text for answer in output.outputs]
        assert found.branch.text == max(texts, key=lambda text: sum(letter in "aeiou" for letter in text))
        assert session.text == PROMPT and found.score == vowels(found.branch)


def test_self_consistency(llm: LLM) -> None:
    with llm.session(PROMPT, seed=1) as session:
        vote = self_consistency(session, lambda text: len(text.split()), n=6, max_tokens=6, temperature=1.0)
        assert sum(vote.counts.values()) == 6 == len(vote.texts)
        assert vote.counts[vote.winner] == max(vote.counts.values())
        again = self_consistency(session, lambda text: None, n=2, max_tokens=6, temperature=1.0)
        assert again.winner is None and again.counts == {} and again.texts != vote.texts[:2]
        assert session.text == PROMPT


def test_step_beam_search(llm: LLM) -> None:
    with llm.session(PROMPT, seed=1) as session:
        found = step_beam_search(
            session, vowels, width=2, samples=3, steps=2, delimiter=",", max_tokens=8, temperature=1.0
        )
        assert len(found) == 2 and found[0].score >= found[1].score
        assert [beam.score for beam in found] == [vowels(beam.branch) for beam in found]
        with llm.session(PROMPT, seed=1) as other:  # the same by hand
            live = [other.fork()]
            for _ in range(2):
                outputs = other.generate_all(
                    live, keep="all", n=3, stop=[","], include_stop_str_in_output=True, max_tokens=8, temperature=1.0
                )
                live = sorted([b for output in outputs for b in output.branches], key=lambda b: -vowels(b))[:2]
            assert [branch.text for branch in live] == [beam.branch.text for beam in found]


def test_mcts(llm: LLM) -> None:
    with llm.session(PROMPT, seed=1) as session:
        root = mcts(session, vowels, simulations=5, samples=2, delimiter=",", max_tokens=6, temperature=1.0)
        assert root.visits == 10 and len(root.children) == 2
        line = root.line()
        assert line[0].visits >= max(child.visits for child in root.children)
        assert all(child.branch.text.startswith(PROMPT) for child in line)
        assert all(low.branch.text.startswith(high.branch.text) for high, low in zip(line, line[1:], strict=False))
        root.close()
        assert session.text == PROMPT and [branch.name for branch in session._owner.branches.values()] == ["0"]


def test_the_model_as_a_judge(llm: LLM) -> None:
    judge = ModelJudge("\nIs this about food?", " Yes", " No")
    with llm.session(PROMPT, seed=1) as session:
        forks = session.fork(2)
        forks[0].append(" Flour and water.")
        forks[1].append(" A hammer.")
        together, alone = judge.all(forks), [judge(fork) for fork in forks]
        assert together == alone
        text = forks[0].text + judge.question
        tokenizer = llm.get_tokenizer()
        with llm.session(text) as other:
            good, bad = other.score([" Yes", " No"])
        assert tokenizer.encode(text) == [*forks[0].token_ids, *tokenizer.encode(judge.question)]
        assert together[0] == good.logprob - bad.logprob
        assert judge.all([]) == []
