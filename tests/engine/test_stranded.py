"""Where rules leave nothing to draw an answer ends, and says so; one that ends early for another reason does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pagedec import BeamSearchParams, RequestParams, SamplingParams, TokenTrie
from pagedec.core.protocol import Answer, Child, Decoder, DecoderContext, Hypothesis, Query, Sample, Verdict
from pagedec.core.request import Branch
from pagedec.core.sampler import Sampler
from pagedec.decoders import decoder
from pagedec.engine.completion import answer_of
from pagedec.errors import RequestError
from tests.engine.crowd import Tiny
from tests.models.checkpoints import VOCAB

PROMPT = [5, 17, 40]
ONCE: dict[str, Any] = {"no_repeat_ngram_size": 1, "max_tokens": 200, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, **ONCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreeParams(RequestParams):
    """`gang`: it ends its branch itself."""

    gang: bool = False


@decoder("test-three", params=ThreeParams)
class Three(Decoder):
    """Three tokens are enough for it, a gang goes on."""

    width = 1
    initial_state = 0

    def __init__(self, params: ThreeParams, context: DecoderContext) -> None:
        self.context, self.gang, self.num_tokens = context, params.gang, 0

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        return [Query(branch, (Sample(Sampler(), (0,)),)) for branch in branches]

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        [branch], token = [query.branch for query in queries], int(answers[0].values[0][0, 0])
        self.num_tokens += 1
        cut = self.context.ending(branch, token)
        if cut is not None:
            return Verdict(done=(Hypothesis.ended(branch.tip, cut),))
        if self.num_tokens == 3 and not self.gang:
            return Verdict(done=(Hypothesis(branch.tip, (token,), reason="length"),))
        return Verdict((Child(branch, (token,)),))

    def rank(self, state: int) -> int:
        return 0


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "params",
    [
        GREEDY, GREEDY.clone(logprobs=1), SamplingParams(n=2, seed=1, **ONCE), BeamSearchParams(beam_width=2, **ONCE),
        GREEDY.clone(speculative={"method": "ngram"}), ThreeParams(gang=True, **ONCE),
    ],
    ids=["greedy", "reports", "samples", "beams", "drafts", "a gang of one's own"],
)  # fmt: skip
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_each_token_once(tiny: Tiny, params: RequestParams, async_scheduling: bool) -> None:
    llm = tiny(async_scheduling=async_scheduling)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.outputs
    for answer in output.outputs:
        assert sorted(answer.token_ids) == sorted(set(range(VOCAB)) - set(PROMPT))
        assert (answer.finish_reason, answer.limited_by) == ("length", "rules")


@pytest.mark.parametrize("params", [GREEDY, ThreeParams(gang=True)], ids=["greedy", "a gang of one's own"])
def test_what_a_constraint_allows_and_rules_forbid_is_an_error(tiny: Tiny, params: RequestParams) -> None:
    """Token 0 too, which is what is drawn where nothing is left."""
    params = params.clone(token_trie=TokenTrie([[0, 7], [5, 7]]), no_repeat_ngram_size=1)
    with pytest.raises(RequestError, match="nothing may follow behind 0 generated tokens: other rules"):
        tiny().generate([[0, 5]], params, use_tqdm=False)


@pytest.mark.parametrize(
    "rules",
    [{}, {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 3}, {"allowed_token_ids": range(3, VOCAB)}],
    ids=lambda rules: next(iter(rules), "none"),
)
def test_who_has_enough_is_not_limited_by_rules(tiny: Tiny, rules: dict[str, Any]) -> None:
    [output] = tiny().generate([PROMPT], ThreeParams(max_tokens=9, ignore_eos=True, **rules), use_tqdm=False)
    [answer] = output.outputs
    assert len(answer.token_ids) == 3 and (answer.finish_reason, answer.limited_by) == ("length", "max_tokens")


def test_a_request_whose_time_is_over_says_of_each_answer_what_ended_it(tiny: Tiny) -> None:
    request = tiny().engine.admit("a", PROMPT, GREEDY)
    request.concluded = True
    tip = request.branches[0].tip
    ended = [Hypothesis(tip, (7,), reason="length", is_stranded=stranded) for stranded in (True, False)]
    assert [answer_of(request, one).limited_by for one in ended] == ["rules", "max_time"]
