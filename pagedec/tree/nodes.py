"""The tree itself: runs of tokens that all answers below have in common, and the KV blocks that hold them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedec.outputs import CompletionOutput

Spell = Callable[[Sequence[int]], bytes]


@dataclass(slots=True, eq=False)
class TreeNode:
    """A run of tokens, as long as the same answers go the same way.

    `start` is the place of its first token, the prompt's counted; `answers` are those that run through it, by their
    places among the outputs, and `ended` those that end here. `cumulative_logprob` is the sum over all tokens from the
    root's end to its own, None where one of them has no report, as what was appended to a branch has none. `blocks` are
    the numbers of the KV blocks, counted from the sequence's beginning, that stand here: each is held once for all
    `answers`. A block in whose middle a fork stands belongs to the branches behind it, for each of them has one.
    """

    token_ids: tuple[int, ...]
    text: str
    start: int
    answers: tuple[int, ...]
    ended: tuple[int, ...] = ()
    cumulative_logprob: float | None = None
    blocks: range = range(0)
    children: list[TreeNode] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The place behind its last token."""
        return self.start + len(self.token_ids)

    def __repr__(self) -> str:
        what = f"{len(self.token_ids)} tokens from {self.start}, {self.text!r}"
        return f"<TreeNode: {what}, answers {self.answers}, {len(self.children)} children>"


class AnswerTree:
    """The answers to one prompt, their common beginnings merged. `root` is the prompt; children come in the order of
    their best answers.

    `str` draws it for a terminal, `svg` and `html` as one file that needs no other. `block_size` None: nothing is known
    of KV blocks. The last token of an answer was never evaluated, so it is in no block.
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        outputs: Sequence[CompletionOutput],
        block_size: int | None = None,
        spell: Spell | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """`names`: of answers that are branches of a session, which go on. `spell`: the bytes of tokens."""
        self.names = None if names is None else tuple(names)
        self.outputs, self.block_size, self._spell = list(outputs), block_size, spell
        if prompt is None:
            prompt = "" if spell is None else spell(prompt_token_ids).decode("utf-8", "replace")
        everyone = tuple(range(len(self.outputs)))
        ended = tuple(i for i in everyone if not self.outputs[i].token_ids)
        first = 0.0 if any(output.logprobs is not None for output in self.outputs) else None
        self.root = TreeNode(tuple(prompt_token_ids), prompt, 0, everyone, ended, first)
        self._grow()
        if block_size is not None:
            self._lay(block_size)

    @classmethod
    def of(
        cls,
        root: TreeNode,
        outputs: Sequence[CompletionOutput],
        block_size: int | None,
        has_text: bool,
        names: Sequence[str],
    ) -> AnswerTree:
        """A tree of branches whose nodes were made before, by somebody who has the vocabulary."""
        made = cls(root.text, root.token_ids, (), None, (lambda tokens: b"") if has_text else None, names)
        made.root, made.outputs, made.block_size = root, list(outputs), block_size
        return made

    # ---- what it says
    def nodes(self) -> Iterator[TreeNode]:
        """All nodes, each before its children, in the order in which they are drawn."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)

    def label(self, node: TreeNode) -> str:
        """A node's text, or its token ids where no text was made."""
        return node.text if node.text or self.has_text else ",".join(map(str, node.token_ids))

    @property
    def has_text(self) -> bool:
        """Whether the text of tokens is known."""
        return self._spell is not None

    @property
    def num_blocks(self) -> int:
        """How many KV blocks hold the prompt and all answers."""
        return sum(len(node.blocks) for node in self.nodes())

    @property
    def num_blocks_unshared(self) -> int:
        """How many it would be if each answer had its own."""
        size = self.block_size or 1
        lengths = (self.root.end + len(output.token_ids) - 1 for output in self.outputs)
        return 0 if self.block_size is None else sum(-(-length // size) for length in lengths)

    @property
    def num_forks(self) -> int:
        """In how many places answers part."""
        return sum(len(node.children) + len(node.ended) > 1 and len(node.children) > 0 for node in self.nodes())

    # ---- how it looks
    def __repr__(self) -> str:
        from pagedec.tree.outline import summary

        return f"<AnswerTree: {summary(self)}>"

    def __str__(self) -> str:
        return self.draw()

    def draw(self, columns: int = 100) -> str:
        """The tree in lines for a terminal of so many columns, control characters as in C."""
        from pagedec.tree.outline import outline

        return outline(self, columns)

    def svg(self) -> str:
        """The tree as an SVG picture: a file of its own, without scripts, fonts or links."""
        from pagedec.tree.svg import picture

        return picture(self)

    def html(self) -> str:
        """The picture and all answers in full as an HTML page: a file of its own."""
        from pagedec.tree.page import page

        return page(self)

    # ---- how it is made
    def _grow(self) -> None:
        order = sorted(self.root.answers, key=lambda i: self.outputs[i].token_ids)
        waiting = [(self.root, order, 0, b"", 0)]
        while waiting:
            parent, group, at, pending, num_characters = waiting.pop()
            going = [i for i in group if len(self.outputs[i].token_ids) > at]
            for _, members in groupby(going, key=lambda i: self.outputs[i].token_ids[at]):
                below = list(members)
                node, left, characters = self._node(parent, below, at, pending, num_characters)
                parent.children.append(node)
                waiting.append((node, below, node.end - self.root.end, left, characters))
            parent.children.sort(key=lambda node: node.answers[0])

    def _node(
        self, parent: TreeNode, group: Sequence[int], at: int, pending: bytes, num_characters: int
    ) -> tuple[TreeNode, bytes, int]:
        """What a group of answers, sorted by their tokens, has in common from token `at` on; the bytes of a character
        that is not whole at its end, and how many characters there are up to there."""
        outputs = self.outputs
        first, last = outputs[group[0]].token_ids, outputs[group[-1]].token_ids
        end = at + 1
        while end < len(first) and end < len(last) and first[end] == last[end]:
            end += 1
        token_ids = tuple(first[at:end])
        answers = tuple(sorted(group))
        ended = tuple(i for i in answers if len(outputs[i].token_ids) == end)
        data = pending + (b"" if self._spell is None else self._spell(token_ids))
        text, used = codecs.utf_8_decode(data, "replace", False)
        total = num_characters + len(text)
        if len(ended) == len(answers) and (self.has_text or not at):  # all of it, and nothing behind a stop string
            text = outputs[ended[0]].text[num_characters:]
        logprob = self._logprob(parent.cumulative_logprob, answers[0], at, end)
        node = TreeNode(token_ids, text, self.root.end + at, answers, ended, logprob)
        return node, data[used:], total

    def _logprob(self, before: float | None, answer: int, at: int, end: int) -> float | None:
        output = self.outputs[answer]
        if before is None or output.logprobs is None:
            return None
        for token, table in zip(output.token_ids[at:end], output.logprobs[at:end], strict=True):
            if table is None:
                return None
            before += table[token].logprob
        return before

    def _lay(self, size: int) -> None:
        """Give each node the blocks that are whole in it, and those of its end that nobody behind it writes to."""
        for node in self.nodes():
            cached = node.end if node.children else max(node.end - 1, 0)
            writes_on = any(child.children or len(child.token_ids) > 1 for child in node.children)
            whole, begun = cached // size, -(-cached // size)
            last = whole if node.children and writes_on else begun
            first = node.start // size if cached > node.start else last
            node.blocks = range(min(first, last), last)
