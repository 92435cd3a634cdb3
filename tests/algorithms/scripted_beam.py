"""Beams that are drafted from a script: what a plain search found, told before, all of it or in part, and lies among
it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedec.core.draft import Draft
from pagedec.core.protocol import DecoderContext, Query
from pagedec.core.request import Branch
from pagedec.decoders import decoder
from pagedec.decoders.beam import Beam
from pagedec.decoders.drafted_beam import DraftedBeam
from pagedec.decoders.guesses import Tree
from pagedec.fields import field_names
from pagedec.params import BeamSearchParams

Text = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBeamParams(BeamSearchParams):
    """A plain search. `script` receives the generated texts of all beams of all levels."""

    script: set[Text] = field(default_factory=set, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedBeamParams(BeamSearchParams):
    """Drafts `depth` levels from `script`. Each of its tokens is left out with probability `gaps`; `lies` more are
    drafted, tokens of `alphabet`, at places of the draft that are drawn with `name`."""

    script: set[Text] = field(default_factory=set, repr=False)
    depth: int = 3
    gaps: float = 0.0
    lies: int = 0
    alphabet: Sequence[int] = ()
    name: int = 0


def recorded(params: BeamSearchParams) -> RecordedBeamParams:
    return RecordedBeamParams(**_own(params))


def scripted(params: BeamSearchParams, script: set[Text], **how: Any) -> ScriptedBeamParams:
    return ScriptedBeamParams(**_own(params), script=script, **how)


def _own(params: BeamSearchParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in field_names(BeamSearchParams)}


@decoder("test-recorded-beam", params=RecordedBeamParams)
class RecordedBeam(Beam):
    def propose(self, branches: Sequence[Branch], room: int) -> Sequence[Query]:
        for branch in branches:
            self.params.script.add(tuple(self.context.history.tokens(branch.tip)[self.context.prompt_length :]))
        return super().propose(branches, room)


@decoder("test-scripted-beam", params=ScriptedBeamParams)
class ScriptedBeam(DraftedBeam):
    def __init__(self, params: ScriptedBeamParams, context: DecoderContext) -> None:
        super().__init__(params, context)
        self.how = params
        self.following: dict[Text, list[int]] = {}
        for text in sorted(filter(None, params.script)):
            self.following.setdefault(text[:-1], []).append(text[-1])

    def draft(self, beams: Sequence[Branch], room: int) -> Sequence[Draft]:
        how, rng = self.how, random.Random(f"{self.how.name} {self.length}")
        left = min(how.depth, self.context.left(beams[0]))
        trees = [Tree(1 << 30) for _ in beams]
        level = [
            (tree, 0, tuple(self.context.history.tokens(beam.tip)[self.context.prompt_length :]))
            for tree, beam in zip(trees, beams, strict=True)
        ]
        for _ in range(left):
            below = []
            for tree, node, text in level:
                tokens = [token for token in self.following.get(text, ()) if rng.random() >= how.gaps]
                tokens += rng.choices(how.alphabet, k=rng.randrange(how.lies + 1)) if how.lies else []
                for token in dict.fromkeys(tokens):
                    if room > 0:
                        room -= 1
                        below.append((tree, tree.add(token, node), (*text, token)))
            level = below
        return [tree.draft() for tree in trees]
