"""The tree in lines of text, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedec.errors import counted
from pagedec.tree.widths import end_of, lines_of, visible, width

if TYPE_CHECKING:
    from pagedec.tree.nodes import AnswerTree, TreeNode

MIN_TEXT = 24
"""Columns that a text gets however far to the right it stands."""
PROMPT_LINES = 2
"""A prompt's end is shown in so many lines at most."""


def outline(tree: AnswerTree, columns: int) -> str:
    """Draw a tree in lines: each node's text in quotes, then its log-probability and blocks, and of an answer's end its
    place, score and reason."""
    lines = [summary(tree)]
    waiting: list[tuple[TreeNode, str, str]] = [(tree.root, "", "")]
    while waiting:
        node, head, rest = waiting.pop()
        below = rest + ("│  " if node.children else "   ")
        body = _body(tree, node, max(MIN_TEXT, columns - width(below)))
        lines.append(head + body[0])
        lines += [(below + line).rstrip() for line in body[1:]]
        for i, child in reversed(list(enumerate(node.children))):
            is_last = i == len(node.children) - 1
            own, below = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
            waiting.append((child, rest + own, rest + below))
    return "\n".join(lines)


def summary(tree: AnswerTree) -> str:
    """How many answers there are, and what they share."""
    num, tokens = len(tree.outputs), len(tree.root.token_ids)
    if tree.names is None:
        parts = [f"{counted(num, 'answer')} to a prompt of {counted(tokens, 'token')}"]
    else:
        parts = [f"{counted(num, 'branch')} behind {counted(tokens, 'token')}"]
    parts.append(counted(tree.num_forks, "fork"))
    if tree.block_size is not None:
        blocks, apart = tree.num_blocks, tree.num_blocks_unshared
        parts.append(f"{counted(blocks, 'KV block')} of {counted(tree.block_size, 'token')}, {apart} without sharing")
    return "; ".join(parts)


def ending(tree: AnswerTree, answer: int) -> str:
    """Of one answer: its place, its score where it has one, its length, and why it ended. Of a branch: its name, and
    its length behind the root."""
    output = tree.outputs[answer]
    if tree.names is not None:
        return f"branch {tree.names[answer]}, {counted(len(output.token_ids), 'token')}"
    score = [] if output.score is None else [f"score {output.score:.4f}"]
    parts = [*score, counted(len(output.token_ids), "token"), output.finish_reason or "unfinished"]
    return f"#{output.index + 1} {', '.join(parts)}"


def blocks_of(node: TreeNode) -> str:
    """Which blocks stand at a node, and for how many answers; empty where there are none."""
    if not node.blocks:
        return ""
    first, last = node.blocks[0], node.blocks[-1]
    which = f"block {first}" if first == last else f"blocks {first}-{last}"
    return which if len(node.answers) < 2 else f"{which} for {len(node.answers)}"


def _body(tree: AnswerTree, node: TreeNode, columns: int) -> list[str]:
    """A node's lines: its text, and what is known of it."""
    text = f'"{visible(tree.label(node))}"'
    if node is tree.root:
        text = end_of(text, PROMPT_LINES * columns)
    logprob = "" if node.cumulative_logprob is None or node is tree.root else f"{node.cumulative_logprob:.4f}"
    facts = [fact for fact in (logprob, blocks_of(node), *(ending(tree, i) for i in node.ended)) if fact]
    lines = lines_of(text, columns)
    told = "  ".join(facts)
    if not told:
        return lines
    if width(lines[-1]) + 2 + width(told) <= columns:
        return [*lines[:-1], f"{lines[-1]}  {told}"]
    return [*lines, *("  " + line for line in lines_of(told, max(columns - 2, MIN_TEXT)))]
