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


@lru_cache(maxsize=1)
def grammars() -> Grammars:
    return Grammars(VOCAB, *words().words)
