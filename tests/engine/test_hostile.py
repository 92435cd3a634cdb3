"""What one request does wrong is its own: its decoder, its callback. Neighbours keep their steps, their blocks and
their bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagedec import SamplingParams
from pagedec.core.protocol import DecoderContext, Verdict
from pagedec.decoders import Sampling, decoder
from pagedec.errors import RequestError, RequestsFailed
from pagedec.outputs import RequestOutput
from pagedec.params import BeamSearchParams, RequestOutputKind
from tests.engine.crowd import NUM_PROMPTS, SMALL, Tiny, Tokens, assert_whole, right_answers, workload


class MoodyParams(SamplingParams):
    """A decoder that fails in `where` when its answer has three tokens."""

    where = "propose"


class MoodyAdvanceParams(MoodyParams):
    where = "advance"


class MoodyRankParams(MoodyParams):
    where = "rank"


@decoder("test-moody", params=MoodyParams)
class Moody(Sampling):
    def __init__(self, params: MoodyParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.where = params.where
        self.depth = 0

    def propose(self, branches: Any, room: int) -> Any:
        self._fail("propose", branches)
        return super().propose(branches, room)

    def advance(self, queries: Any, answers: Any) -> Verdict:
        self._fail("advance", [query.branch for query in queries])
        return super().advance(queries, answers)

    def rank(self, state: Any) -> int:
        if self.where == "rank" and self.depth >= 3:
            raise ZeroDivisionError("a user's mistake")
        return super().rank(state)

    def _fail(self, where: str, branches: Any) -> None:
        self.depth = self.context.history.depth[branches[0].tip] - self.context.prompt_length
        if where == self.where and self.depth >= 3:
            raise ZeroDivisionError("a user's mistake")


@pytest.mark.parametrize("kind", [MoodyParams, MoodyAdvanceParams, MoodyRankParams])
@pytest.mark.parametrize("roomy", [False, True], ids=["small", "roomy"])
def test_a_decoder_fails(tiny: Tiny, expected: list[Tokens], kind: type[MoodyParams], roomy: bool) -> None:
    """It is named, it ends, and nobody else has lost a token, nor a block where there is room for all."""
    llm = tiny() if roomy else tiny(**SMALL)
    prompts, params = workload()
    params[2] = kind(seed=2, n=2, max_tokens=9)
    with pytest.raises(RequestsFailed, match=r"^outputs\[\d\], request '\d+': .*a user's mistake") as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert caught.value.request_id == "2" and isinstance(caught.value.errors[0].__cause__, ZeroDivisionError)
    assert caught.value.__cause__ is caught.value.errors[0]
    outputs: list[RequestOutput] = caught.value.outputs  # type: ignore[assignment]
    got = [[answer.token_ids for answer in output.outputs] for output in outputs]
    assert got == [want if i != 2 else [] for i, want in enumerate(expected)]
    preemptions = [output.metrics.num_preemptions for output in outputs if output.metrics is not None]
    assert len(preemptions) == NUM_PROMPTS - 1 and (not roomy or not any(preemptions))
    assert_whole(llm, expected)


class Tearing:
    """A sink that cannot take what it is given."""

    def __init__(self, what: str) -> None:
        self.what, self.error = what, None

    def tokens(self, *_: Any) -> None:
        self._tear("tokens")

    def settled(self, *_: Any) -> None:
        self._tear("settled")

    def ended(self, *_: Any) -> None:
        self._tear("ended")

    def finished(self, *_: Any) -> None:
        self._tear("finished")

    def failed(self, error: Any) -> None:
        self.error = error

    def _tear(self, what: str) -> None:
        if what == self.what:
            raise ZeroDivisionError("a user's callback")


@pytest.mark.parametrize("what", ["tokens", "settled", "ended", "finished"])
def test_a_callback_fails(tiny: Tiny, expected: list[Tokens], what: str) -> None:
    """Its own request fails with it, and no other."""
    llm, sink = tiny(**SMALL), Tearing(what)
    prompts, params = workload()
    beam = BeamSearchParams(beam_width=1, max_tokens=9, ignore_eos=True)
    [(_, request)] = llm.prepare([prompts[0]], beam if what == "settled" else params[0])
    llm.loop.submit(request, sink)  # type: ignore[arg-type]
    assert right_answers(llm) == expected
    llm.loop.drive(lambda: sink.error is not None)
    assert "a user's callback" in str(sink.error)
    assert_whole(llm, expected)


class FickleParams(SamplingParams):
    """Three answers start. When they have three tokens, `turn` says what becomes of the next generation."""

    turn: Any = staticmethod(lambda live: live)


class DroppingParams(FickleParams):
    turn: Any = staticmethod(lambda live: live[1:])


class RenamingParams(FickleParams):
    turn: Any = staticmethod(lambda live: tuple(replace(child, state=(i,)) for i, child in enumerate(live[1:])))


class RenamingBackParams(FickleParams):
    turn: Any = staticmethod(lambda live: (*live, replace(live[0], state=(2,))))


@decoder("test-fickle", params=FickleParams)
class Fickle(Sampling):
    def __init__(self, params: FickleParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.turn = params.turn
        self.revises = params.top_k == 7

    def advance(self, queries: Any, answers: Any) -> Verdict:
        verdict = super().advance(queries, answers)
        length = self.context.history.depth[queries[0].branch.tip] - self.context.prompt_length
        return Verdict(self.turn(verdict.live)) if length == 3 else verdict


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (DroppingParams, "live is without a child of rank 0: must have one, of a branch of that rank, or be done: "),
        (RenamingParams, "live is without a child of rank 0: must have one, of a branch of that rank, or be done: "),
        (RenamingBackParams, "live is with a child of rank 2: must go on from a branch of that rank: what was told"),
    ],
)
def test_what_was_told_stands(tiny: Tiny, kind: type[FickleParams], problem: str) -> None:
    """Else a stream's reader had one answer's beginning and another one's end. Who says that it revises is told of when
    it has ended."""
    llm, params = tiny(), kind(n=3, seed=1, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    with pytest.raises(RequestError, match=problem):
        list(llm.stream([5, 17, 40], params))
    if kind is RenamingBackParams:
        return
    [whole] = llm.generate([[5, 17, 40]], params.clone(top_k=7), use_tqdm=False)
    told = [answer for output in llm.stream([5, 17, 40], params.clone(top_k=7)) for answer in output.outputs]
    for answer in whole.outputs:
        assert [t for part in told if part.index == answer.index for t in part.token_ids] == answer.token_ids
