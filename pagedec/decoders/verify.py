"""Sample and match: a draft is accepted as far as it says what the target's own draws say.

The target draws its own token at every node, so a draft, whatever its source, changes the number of steps and never a
token.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedec.core.draft import Draft


def match(draft: Draft, drawn: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The path down `draft` along the tokens drawn at its nodes (the root's first), and the token drawn at its end.

    Where tokens are drawn at fewer nodes than there are, the nodes behind them are not accepted. Of equal siblings the
    first is taken: what is accepted is a text, and theirs is the same.
    """
    path: list[int] = []
    node = 0
    for child, (token, parent) in enumerate(zip(draft.tokens[: len(drawn) - 1], draft.parents, strict=False), start=1):
        if parent == node and token == drawn[node]:  # children come after their parent: one pass is enough
            path.append(child)
            node = child
    return tuple(path), drawn[node]
