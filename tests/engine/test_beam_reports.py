"""What beams report: something of every token of every answer, and nothing of what was never accepted."""

from __future__ import annotations

from typing import Any

import pytest

from pagedec import BeamSearchParams, TokenTrie
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
