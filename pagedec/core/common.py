"""How much the branches of a gang have in common, at the price of one set a step."""

from __future__ import annotations

from pagedec.core.request import Request


def note_common(request: Request, block_size: int) -> None:
    """Bring `request.common_length` up to date, as far as whole blocks go: what all branches of a gang share.

    Branches know on which side they are: their node at the end of the next block. Children are on their parents' side,
    so while there are two sides nothing more is shared. Only when a block more is, the tips are walked back.
    """
    branches, history = request.branches, request.history
    if len(branches) == 1:
        branches[0].side, request.common_length = 0, history.depth[branches[0].tip]
        return
    end = request.common_length // block_size * block_size + block_size
    sides = set()
    for branch in branches:
        if not branch.side:
            if history.depth[branch.tip] < end:
                return
            branch.side = history.ancestor(branch.tip, end)
        sides.add(branch.side)
    if len(sides) == 1:
        request.common_length = history.common_length(*(branch.tip for branch in branches))
        forget_sides(request)


def forget_sides(request: Request) -> None:
    """Have all branches looked at anew."""
    for branch in request.branches:
        branch.side = 0
