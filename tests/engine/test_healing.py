"""Answers that begin within the prompt: a decoder takes its last tokens back, or a client does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.core.protocol import Answer, Child, Decoder, DecoderContext, Hypothesis, Query, Sample, Verdict
from pagedec.core.request import Branch
from pagedec.decoders import decoder, registry
from pagedec.params import RequestParams
from tests.engine.crowd import Tiny

PROMPT, TAKEN = [3, 4, 5, 6, 7, 8], 2
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealParams(RequestParams):
    concludes: bool = False


class Heal(Decoder):
    """Token healing: the prompt's last tokens are generated anew."""

    width, initial_state, revises = 1, 0, True

    def __init__(self, params: HealParams, context: DecoderContext) -> None:
        self.params, self.context, self.is_healed = params, context, False

    def propose(self, branches: Sequence[Branch], room: int) -> list[Query]:
        return [Query(branch, (Sample(),)) for branch in branches]

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        branch, token = queries[0].branch, int(answers[0].values[0][0, 0])
        if not self.is_healed:
            self.is_healed = True
            return Verdict((Child(branch, keep=self.context.prompt_length - TAKEN),))
        if self.params.concludes and self.context.history.depth[branch.tip] == len(PROMPT) + 1:
            return Verdict(done=(Hypothesis(branch.tip, (token,), prompt_length=branch.prompt_length),))
        return Verdict((Child(branch, (token,)),))

    def rank(self, state: Any) -> int:
        return 0


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_by_params", dict(registry._by_params))
    decoder("heal", params=HealParams)(Heal)


@pytest.mark.parametrize("concludes", [False, True], ids=["ends at its length", "says what is done"])
def test_a_decoder_generates_the_end_of_the_prompt_anew(tiny: Tiny, concludes: bool) -> None:
    llm = tiny()
    [want] = llm.generate([PROMPT[:-TAKEN]], GREEDY.clone(logprobs=0), use_tqdm=False)
    params = HealParams(max_tokens=5, ignore_eos=True, logprobs=0, concludes=concludes)
    [found] = llm.generate([PROMPT], params, use_tqdm=False)
    count = 4 if concludes else 5
    assert found.outputs[0].token_ids == want.outputs[0].token_ids[:count]
    assert [dict(row) for row in found.outputs[0].logprobs] == [dict(row) for row in want.outputs[0].logprobs[:count]]
    with llm.session(PROMPT) as session:
        answer = session.generate(HealParams(max_tokens=5, ignore_eos=True)).outputs[0].token_ids
        assert session.token_ids == PROMPT[:-TAKEN] + answer and answer == want.outputs[0].token_ids


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_client_rolls_back_into_the_prompt(tiny: Tiny, is_stopped: bool) -> None:
    engine = tiny().engine
    request = engine.admit("edited", PROMPT, GREEDY)
    engine.add(request)
    engine.step()
    engine.edit("edited", Verdict((Child(request.branches[0], keep=4),)))
    for _ in range(3 if is_stopped else 9):
        engine.step()
    if is_stopped:
        engine.scheduler.conclude("edited")
    [answer] = request.done
    whole = [*request.history.tokens(answer.tip), *answer.tokens]
    assert request.output(answer) == whole[4:] and len(whole) == 4 + (3 if is_stopped else 5)
