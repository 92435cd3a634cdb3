"""The default model's vocabulary, and grammars over it."""

from __future__ import annotations

from functools import lru_cache

from pagedec.constraints.grammar import Grammars
from pagedec.engine.options import Vocabulary
from tests.equivalence.conftest import vocabulary

VOCAB = 49152
STOPS = (2,)


def words() -> Vocabulary:
    return vocabulary()


def new_grammars() -> Grammars:
    own = words()
    return Grammars(VOCAB, own.pieces, own.special_ids, own.encode)


@lru_cache(maxsize=1)
def grammars() -> Grammars:
    return new_grammars()
