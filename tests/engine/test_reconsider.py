"""A decoder of a newcomer's: rollback, forks, drafts, scores and stops, against the same algorithm over plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.core.protocol import Answer, Child, Decoder, DecoderContext, Query, TopK, Verdict
from pagedec.core.request import Branch
from pagedec.decoders import decoder
from pagedec.errors import InvalidArgument
from pagedec.params import RequestOutputKind, RequestParams
from tests.algorithms.reconsider import TOP, Reconsider, ReconsiderParams
from tests.engine.crowd import SMALL, Tiny, Tokens, assert_whole, workload

EOS = 2
PROMPTS = [[7 + i, 9, 11, 13 * i + 3] for i in range(4)]


def params(i: int, **changes: Any) -> ReconsiderParams:
    own: dict[str, Any] = {"n": 1 + i % 3, "piece": 2 + i, "retries": 1 + i, "threshold": -1.2 - 0.3 * i, "seed": i}
    return ReconsiderParams(**own | {"max_tokens": 14, "logprobs": 0, "ignore_eos": i < 2} | changes)


def plain_lists(llm: LLM, prompt: list[int], own: ReconsiderParams) -> list[list[int]]:
    """The algorithm without branches, drafts or rollback: each token is a request of its own."""

    def draw(tokens: list[int], stream: int) -> tuple[int, float]:
        sampling = SamplingParams(n=stream + 1, top_k=TOP, seed=own.seed, max_tokens=1, logprobs=0, ignore_eos=True)
        answer = llm.generate([tokens], sampling, use_tqdm=False)[0].outputs[stream]
        return answer.token_ids[0], answer.cumulative_logprob

    def ends(tokens: list[int]) -> bool:
        last = tokens[-1] in (own.stop_token_ids or ()) or (tokens[-1] == EOS and not own.ignore_eos)
        return last or len(tokens) == own.max_tokens

    def piece(tokens: list[int], stream: int) -> tuple[list[int], float]:
        """Tokens behind `tokens`, fewer where the answer ends, and their mean log-probability."""
        new, total = list[int](), 0.0
        while len(new) < own.piece and not (new and ends(tokens + new)):
            token, logprob = draw(prompt + tokens + new, stream)
            new, total = [*new, token], total + logprob
        return new, total / own.piece

    answers = []
    for answer in range(own.n):
        tokens = list[int]()
        while not (tokens and ends(tokens)):
            trials = list[tuple[list[int], float]]()
            for trial in range(own.retries + 1):
                new, mean = piece(tokens, trial * own.n + answer)
                if len(new) < own.piece or mean >= own.threshold:
                    break
                trials.append((new, mean))
            else:
                new, mean = max(trials, key=lambda trial: trial[1])
            tokens += new
        answers.append(tokens)
    return answers


def run(llm: LLM, prompts: list[list[int]], own: list[Any]) -> list[Tokens]:
    outputs = llm.generate(prompts, own, use_tqdm=False)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def test_the_answers_of_plain_lists_in_any_company(tiny: Tiny, expected: list[Tokens], monkeypatch: Any) -> None:
    made = list[Reconsider]()
    begin = Reconsider.__init__
    monkeypatch.setattr(Reconsider, "__init__", lambda self, *given: (begin(self, *given), made.append(self))[0])
    roomy, own = tiny(), [params(i) for i in range(4)]
    alone = [run(roomy, [p], [o])[0] for p, o in zip(PROMPTS, own, strict=True)]
    assert sum(d.num_taken_back for d in made) > 10 and sum(d.num_accepted for d in made) > 0
    assert alone == [plain_lists(roomy, p, o) for p, o in zip(PROMPTS, own, strict=True)]
    for llm in (roomy, tiny(**SMALL | {"num_blocks": 16, "max_num_seqs": 8})):
        others, theirs = workload()
        assert run(llm, [*PROMPTS, *others], [*own, *theirs]) == alone + expected
        assert_whole(llm, expected)


def test_drafting_changes_no_token(tiny: Tiny) -> None:
    llm = tiny()
    with_draft, without = (run(llm, PROMPTS, [params(i, drafting=d) for i in range(4)]) for d in (True, False))
    assert with_draft == without


def test_stop_tokens_and_reasons(tiny: Tiny) -> None:
    llm, own = tiny(), params(2)
    free = llm.generate([PROMPTS[2]], own.clone(ignore_eos=True), use_tqdm=False)[0].outputs
    stops = [free[0].token_ids[5], free[1].token_ids[9]]
    own = own.clone(stop_token_ids=stops)
    answers = llm.generate([PROMPTS[2]], own, use_tqdm=False)[0].outputs
    assert [a.token_ids for a in answers] == plain_lists(llm, PROMPTS[2], own)
    assert "stop" in {a.finish_reason for a in answers}
    for answer in answers:
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] in (*stops, EOS) else "length")
        assert len(answer.logprobs) == len(answer.token_ids)


def test_rules_that_leave_nothing(tiny: Tiny) -> None:
    own = ReconsiderParams(seed=1, piece=1, retries=1, allowed_token_ids=[3, 5, 8], no_repeat_ngram_size=1)
    [answer] = tiny().generate([[7, 9]], own, use_tqdm=False)[0].outputs
    assert sorted(answer.token_ids) == [3, 5, 8] and answer.limited_by == "rules"


def test_seeds(tiny: Tiny) -> None:
    answers = [str(run(tiny(), PROMPTS, [params(i, seed=seed) for i in range(4)])) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]
    unseeded = [str(run(tiny(), PROMPTS * 2, [params(1, seed=None)] * 8)) for _ in range(2)]
    assert unseeded[0] == unseeded[1]
    llm = tiny()
    first, second = run(llm, PROMPTS[:1] * 2, [params(0, seed=None)] * 2)
    assert first != second


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_stream_never_shows_what_is_taken_back(tiny: Tiny, kind: RequestOutputKind) -> None:
    llm, own = tiny(), params(2, n=2, threshold=-0.5)
    [final] = run(llm, PROMPTS[2:3], [own])
    seen = list(llm.stream(PROMPTS[2], own.clone(output_kind=kind)))
    shown: dict[int, list[int]] = {}
    for output in seen:
        for answer in output.outputs:
            before = shown.get(answer.index, []) if kind is RequestOutputKind.DELTA else []
            shown[answer.index] = before + answer.token_ids
            assert shown[answer.index] == final[answer.index][: len(shown[answer.index])]
    assert [shown[i] for i in range(2)] == final


@dataclass(frozen=True, slots=True, kw_only=True)
class BuddingParams(RequestParams):
    says_keep: bool = False

    @property
    def num_answers(self) -> int:
        return 3


@decoder("budding", params=BuddingParams)
class Budding(Decoder):
    """After every fourth token another answer begins as the first one's continuation with the second-best token."""

    def __init__(self, params: BuddingParams, context: DecoderContext) -> None:
        self.width, self.initial_state, self.num_answers, self.context = 3, 0, 1, context
        self.says_keep = params.says_keep

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        return [Query(branch, (TopK(2),)) for branch in branches]

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        live = list[Child]()
        for query, answer in zip(queries, answers, strict=True):
            best, second = answer.values[0][0][0].tolist()
            whole = self.context.history.depth[query.branch.tip]
            live.append(Child(query.branch, (best,), keep=whole if self.says_keep and whole % 3 else None))
            length = whole - self.context.prompt_length
            if query.branch.state == 0 and length % 4 == 3 and self.num_answers < 3:
                live.append(Child(query.branch, (second,), state=self.num_answers))
                self.num_answers += 1
        return Verdict(tuple(live))

    def rank(self, state: int) -> int:
        return state


@pytest.mark.parametrize("says_keep", [False, True])
def test_an_answer_that_begins_as_anothers_is_streamed_whole(tiny: Tiny, says_keep: bool) -> None:
    """Also where a child says that it keeps all that its parent has."""
    llm, own = tiny(), BuddingParams(max_tokens=12, logprobs=1, ignore_eos=True, says_keep=says_keep)
    [final] = llm.generate([PROMPTS[0]], own, use_tqdm=False)
    assert len({tuple(answer.token_ids) for answer in final.outputs}) == 3
    shown = {i: (list[int](), list[Any]()) for i in range(3)}
    for output in llm.stream(PROMPTS[0], own.clone(output_kind=RequestOutputKind.DELTA)):
        for answer in output.outputs:
            shown[answer.index][0].extend(answer.token_ids)
            shown[answer.index][1].extend(answer.logprobs or ())
    assert shown == {answer.index: (answer.token_ids, answer.logprobs) for answer in final.outputs}
    for output in llm.stream(PROMPTS[0], own):
        for answer in output.outputs:
            assert answer.token_ids == final.outputs[answer.index].token_ids[: len(answer.token_ids)]


def test_a_decoder_may_say_that_it_scores_where_nobody_asks_for_reports(tiny: Tiny, monkeypatch: Any) -> None:
    llm, own = tiny(), [BuddingParams(max_tokens=12, prompt_logprobs=asked) for asked in (None, 0)]
    want = run(llm, PROMPTS[:2], own)
    monkeypatch.setattr(Budding, "scores_given", True)
    assert run(llm, PROMPTS[:2], own) == want


def test_fields_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="piece"):
        ReconsiderParams(piece=0)
