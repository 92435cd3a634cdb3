"""What fails while a step's answers are carried in: one request does, and nothing is left half done."""

from __future__ import annotations

from typing import Any

import pytest

from pagedec.constraints.trie import TokenTrie, TrieConstraint
from pagedec.core.request import Request
from pagedec.core.settling import Settler
from pagedec.core.stopping import Stopping
from pagedec.errors import InvariantError, RequestError
from pagedec.params import BeamSearchParams, SamplingParams
from tests.core.fake import VOCABULARY, FakeEngine
from tests.core.test_constraints import Rules, request_of
from tests.core.world import Case, World, limits, results


@pytest.mark.parametrize("speculative", [None, {"method": "ngram"}], ids=["arrays", "objects"])
def test_a_gang_whose_generation_cannot_be_finished(
    speculative: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables were changed by then, so all KV is given up; it was no mistake of its decoder."""
    finish, left = Settler._finish_generation, [5]

    def failing(self: Settler, request: Request, *others: Any) -> None:
        left[0] -= request.id == "beams"
        if not left[0]:
            left[0] = -1
            raise InvariantError("made up")
        finish(self, request, *others)

    monkeypatch.setattr(Settler, "_finish_generation", failing)
    engine = FakeEngine(World(0).models, limits(60))
    beams = BeamSearchParams(beam_width=4, max_tokens=12, seed=0, speculative=speculative)
    plain = Case("plain", SamplingParams(n=2, seed=1), [5, 6], None, Stopping(max_tokens=12))
    alone = FakeEngine(World(0).models, limits(60))
    wanted = plain.add(alone.scheduler)
    alone.run()
    request = plain.add(engine.scheduler)
    Case("beams", beams, [1, 2, 3], None, Stopping(max_tokens=12), 15).add(engine.scheduler)
    while not engine.scheduler.idle:
        engine.step()
        if left[0] == -1:
            left[0] = -2
            engine.runner.kv = {lane: [None] * len(kv) for lane, kv in engine.runner.kv.items()}
            engine._published.clear()
    assert str(engine.failed["beams"]) == "request 'beams': its answers cannot be carried in: InvariantError('made up')"
    assert results(request) == results(wanted) and request.num_preemptions == 1
    engine.check_whole()


def test_who_has_failed_is_not_asked_again_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some branches the next tokens have no choice: they are laid out behind all others, apart from their
    siblings."""
    advance_plain, advance = Settler._advance_plain, Settler._advance

    def failing(self: Settler, request: Request, works: Any) -> None:
        if len(works) < len(request.branches):
            raise RequestError(request.id, "made up")
        advance_plain(self, request, works)

    def watched(self: Settler, request: Request, works: Any) -> None:
        assert request not in self.failed
        advance(self, request, works)

    monkeypatch.setattr(Settler, "_advance_plain", failing)
    monkeypatch.setattr(Settler, "_advance", watched)
    engine = FakeEngine(World(0).models, limits(200))
    without = [(first, 1, 2, 3) for first in range(4)]
    some = [(first, second, 1, 2) for first in range(4, VOCABULARY) for second in range(VOCABULARY)]
    rules = Rules(TrieConstraint(TokenTrie([*without, *some]), ()), lambda prompt, generated: None)
    request_of(engine, "forced", SamplingParams(n=8, seed=1), [1, 2], rules)
    Case("other", SamplingParams(n=2, seed=1), [5, 6], None, Stopping(max_tokens=12)).add(engine.scheduler)
    engine.run()
    assert str(engine.failed["forced"]) == "request 'forced': made up" and len(engine.failed) == 1
    engine.check_whole()
