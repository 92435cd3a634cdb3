"""The open branches of a session as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagedec.core.history import History
from pagedec.engine.open_branches import OpenBranch
from pagedec.outputs import CompletionOutput
from pagedec.tree import AnswerTree

if TYPE_CHECKING:
    from pagedec.llm.front import Front


def branch_tree(front: Front, branches: Sequence[OpenBranch], prompt_length: int) -> AnswerTree:
    """What `branches` share, and where they part. What all of them share of the first `prompt_length` tokens is the
    root."""
    places = [branch.place for branch in branches]
    rows = [history.tokens(tip) for history, tip in places]
    length = min(len(shared(rows)), prompt_length)
    outputs = []
    for i, ((history, tip), row) in enumerate(zip(places, rows, strict=True)):
        text = "" if front.tokenizer is None else front.tokenizer.decode(row[length:])
        notes = [history.notes.get(node) for node in path(history, tip, length)]
        tables = front.writer.logprobs(notes) if any(notes) else None
        outputs.append(CompletionOutput(i, text, row[length:], logprobs=tables))
    size = front.engine.scheduler.limits.block_size
    spell = None if front.tokenizer is None else front.tokenizer.byte_table.join
    return AnswerTree(None, rows[0][:length], outputs, size, spell, [branch.name for branch in branches])


def path(history: History, tip: int, start: int) -> list[int]:
    """The nodes of tokens from `start` on."""
    nodes = []
    for _ in range(history.depth[tip] - start):
        nodes.append(tip)
        tip = history.parent[tip]
    return nodes[::-1]


def shared(rows: Sequence[list[int]]) -> list[int]:
    """The longest common beginning: of the first and the last in order."""
    low, high = min(rows), max(rows)
    for i, token in enumerate(low):
        if i == len(high) or high[i] != token:
            return low[:i]
    return low
