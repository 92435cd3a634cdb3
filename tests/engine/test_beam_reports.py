"""What beams report: something of every token of every answer, and nothing of what was never accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pagedec import BeamSearchParams, RequestParams, SamplingParams, TokenTrie
from pagedec.core.draft import EMPTY, Draft
from pagedec.core.logprobs import FEWEST_EDGES
from pagedec.core.protocol import Answer, Child, Children, Decoder, DecoderContext, Hypothesis, Query, RowBest, Verdict
from pagedec.core.request import Branch
from pagedec.decoders import decoder
from pagedec.engine.engine import FinishedRequest
from tests.algorithms.beam import Beam, BeamParams
from tests.engine.crowd import Tiny

PROMPT = [5, 17, 40, 99, 3]
TRIE = TokenTrie([[7, 8], [7, 9, 10], [7, 9, 11, 12], [30], [31, 32], [31, 33, 34, 35, 36]])
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "trie": {"token_trie": TRIE},
    "groups": {"num_beam_groups": 2, "diversity_penalty": 0.5},
    "groups in a trie": {"num_beam_groups": 2, "diversity_penalty": 0.5, "token_trie": TRIE},
    "drawn": {"do_sample": True, "seed": 3},
    "an end before its time": {"allowed_tokens_fn": lambda tokens: [2] if len(tokens) == 7 else None, "min_tokens": 9},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("semantics", ["5", "4.38"])
def test_every_token_of_every_answer_is_reported(tiny: Tiny, name: str, semantics: str) -> None:
    """Also of answers that ended long before they were returned, where a constraint lets nothing follow."""
    params = BeamSearchParams(beam_width=4, max_tokens=12, hf_semantics=semantics, **ASKED[name])
    [plain] = tiny().generate([PROMPT], params, use_tqdm=False)
    [output] = tiny().generate([PROMPT], params.clone(logprobs=2), use_tqdm=False)
    assert [answer.token_ids for answer in output.outputs] == [answer.token_ids for answer in plain.outputs]
    for answer in output.outputs:
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        for token, table in zip(answer.token_ids, answer.logprobs, strict=True):
            assert table is not None and token in table and len(table) in (2, 3)
        total = sum(table[token].logprob for token, table in zip(answer.token_ids, answer.logprobs, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("width", [4, 24])
def test_reports_grow_with_what_is_held_and_not_with_steps(tiny: Tiny, width: int) -> None:
    """Beams that died are forgotten."""
    llm = tiny(num_blocks=400)
    params = BeamSearchParams(beam_width=width, max_tokens=150, logprobs=3, ignore_eos=True)
    request = llm.engine.admit("one", PROMPT, params)
    llm.engine.add(request)
    assert request.reports is not None
    most, told = 0, 0
    while not llm.engine.idle:
        llm.engine.step()
        tips = [branch.tip for branch in request.branches]
        lengths = [request.history.depth[tip] - len(PROMPT) for tip in tips]
        most, told = max(most, len(request.reports.edges)), max(told, sum(lengths))
        held = {edge >> 32 for edge in request.reports.edges}
        assert all(request.history.parent[tip] in held for tip in tips)
    living = most / (width * 150)
    assert living < 0.5, "no more than twice what the last generation stands on, and a little"


@dataclass(frozen=True, slots=True)
class WaitingParams(BeamParams):
    """Beams by their rows' top tokens, that say which answers wait."""


@decoder("test-waiting", params=WaitingParams)
class WaitingBeam(Beam):
    def waiting(self) -> Sequence[Hypothesis]:
        return [hypothesis for _, hypothesis in self.pool.best]


def test_a_gang_that_says_what_waits_has_other_reports_forgotten(tiny: Tiny) -> None:
    """Also one that asks for top tokens, of which few ever live."""
    llm, asked = tiny(), {"max_tokens": 80, "stop_token_ids": [7, 30], "length_penalty": 3.0, "early_stopping": False}
    [plain] = llm.generate([PROMPT], BeamParams(4, logprobs=1, **asked), use_tqdm=False)
    request = llm.engine.admit("one", PROMPT, WaitingParams(4, logprobs=1, **asked))
    llm.engine.add(request)
    assert request.reports is not None
    finished, most = list[FinishedRequest](), 0
    while not finished:
        finished = [event for event in llm.engine.step() if isinstance(event, FinishedRequest)]
        most = max(most, len(request.reports.edges))
    longest = max(len(answer.token_ids) for answer in plain.outputs)
    assert longest > 30 and most <= FEWEST_EDGES + 2 * 4 * 8 < 4 * 8 * longest
    for answer, same in zip(finished[0].answers, plain.outputs, strict=True):
        assert answer.token_ids == same.token_ids and answer.cumulative_logprob == same.cumulative_logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsParams(RequestParams):
    """`gang`: it ends its branches itself. `guess`: what to draft, token by token. `arrays`: children come as such."""

    gang: bool = False
    guess: tuple[int, ...] = ()
    arrays: bool = False

    @property
    def num_answers(self) -> int:
        return 2


@decoder("test-rows", params=RowsParams)
class Rows(Decoder):
    """Two branches, each of which goes on with the best of its own row: nothing is ranked together. A branch's state is
    its number; the root, whose own is -1, has both behind it."""

    width = 2
    initial_state = -1
    num_accepted = 0

    def __init__(self, params: RowsParams, context: DecoderContext) -> None:
        self.params, self.context, self.gang = params, context, params.gang
        self.done: list[Hypothesis] = []

    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        drafts = [self._draft(branch) for branch in branches]
        asks = [(RowBest(2, (1, 0) if draft.num_nodes else (0,)),) for draft in drafts]
        return [Query(b, ask, draft) for b, ask, draft in zip(branches, asks, drafts, strict=True)]

    def _draft(self, branch: Branch) -> Draft:
        done = self.context.history.depth[branch.tip] - self.context.prompt_length
        return Draft.chain(self.params.guess[done : done + 1]) if 0 < done < len(self.params.guess) - 1 else EMPTY

    def advance(self, queries: Sequence[Query], answers: Sequence[Answer]) -> Verdict:
        live = list[Child]()
        for query, answer in zip(queries, answers, strict=True):
            *behind, root = answer.values[0]
            path = (1,) if answer.draft.tokens == (int(root.tokens[0]),) else ()
            best, state = (behind[0] if path else root).tokens.tolist(), query.branch.state
            Rows.num_accepted += len(path)
            for token, own in zip(best, (0, 1) if state < 0 else (state,), strict=False):
                cut = self.context.ending(query.branch, token) if self.gang else None
                if cut is None:
                    live.append(Child(query.branch, (token,), path, state=own))
                else:
                    self.done.append(Hypothesis.ended(query.branch.tip, cut, own))
        if not live:
            return Verdict(done=tuple(self.done))
        if not self.params.arrays:
            return Verdict(tuple(live))
        places = [[query.branch for query in queries].index(child.parent) for child in live]
        arrays = np.array(places), np.array([child.tokens[0] for child in live]), np.zeros(len(live))
        return Verdict(children=Children(*arrays, [child.state for child in live]))

    def rank(self, state: int) -> int:
        return state


@pytest.mark.parametrize("own", ["alone", "drafted", "gang", "arrays"])
def test_what_ranks_rows_by_themselves_is_reported(tiny: Tiny, own: str) -> None:
    """As a prompt's tokens are, bit for bit."""
    llm, params = tiny(), RowsParams(max_tokens=9, logprobs=2, gang=own in ("gang", "arrays"), arrays=own == "arrays")
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    if own == "drafted":
        Rows.num_accepted = 0
        params = params.clone(guess=tuple(output.outputs[1].token_ids))
        plain, [output] = output, llm.generate([PROMPT], params, use_tqdm=False)
        assert Rows.num_accepted and [a.token_ids for a in output.outputs] == [a.token_ids for a in plain.outputs]
    assert len(output.outputs) == 2
    texts, again = [[*PROMPT, *answer.token_ids] for answer in output.outputs], SamplingParams(prompt_logprobs=2)
    for given, answer in zip(
        llm.generate(texts, again.clone(max_tokens=1), use_tqdm=False), output.outputs, strict=True
    ):
        assert given.prompt_logprobs is not None and answer.logprobs == given.prompt_logprobs[len(PROMPT) :]
