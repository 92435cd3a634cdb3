"""A request's accepted tokens: an append-only trie in which a node names a whole sequence."""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

_KEY_BYTES = 16  # 128 bits: the chance that two of 2^40 blocks share a key is 2^-49


class History:
    """Append-only trie of accepted tokens. A tip is a node; it never dangles, so results are just tips.

    Equal continuations of a node are one node: what branches have in common is then found by comparing node ids. A run
    is a stretch of nodes with consecutive ids, each the parent of the next; walks jump from run to run, so that the
    usual history (a prompt, then one stream) costs one slice however long it is.
    """

    __slots__ = ("_child", "_key", "_run", "block_size", "depth", "notes", "parent", "token")

    def __init__(self, block_size: int, salt: str = "") -> None:
        self.block_size = block_size
        self.token: list[int] = [-1]  # node 0 stands before the first token
        self.parent: list[int] = [0]
        self.depth: list[int] = [0]
        self._run: list[int] = [0]  # the first node of the run that the node belongs to
        self.notes: dict[int, Any] = {}
        """What is kept with nodes: it lives as long as they do."""
        self._child: dict[int, int] = {}  # parent node << 32 | token
        self._key: dict[int, bytes] = {0: blake2b(salt.encode(), digest_size=_KEY_BYTES).digest()}

    @staticmethod
    def of(block_size: int, salt: str, tokens: Sequence[int]) -> tuple[History, int]:
        """A history that begins with these tokens, and the node of the last."""
        history = History(block_size, salt)
        return history, history.append(0, tokens)

    def __len__(self) -> int:
        """How many tokens are kept, the dead ones too."""
        return len(self.token) - 1

    @property
    def salted(self) -> bytes:
        """A key of the salt: who shares the blocks of prefixes has the same one."""
        return self._key[0]

    def append_one(self, tip: int, token: int) -> int:
        """The node that continues `tip` by `token`."""
        node = len(self.token)
        known = self._child.setdefault(tip << 32 | token, node)
        if known == node:
            self.token.append(token)
            self.parent.append(tip)
            self.depth.append(self.depth[tip] + 1)
            self._run.append(self._run[tip] if tip == node - 1 else node)
        return known

    def find(self, tip: int, token: int) -> int | None:
        """The node that continues `tip` by `token`, if there is one."""
        return self._child.get(tip << 32 | token)

    def append(self, tip: int, tokens: Sequence[int]) -> int:
        """The node that continues `tip` by `tokens`."""
        if len(tokens) > 8 and tip == len(self.token) - 1:
            return self._append_run(tip, tokens)
        for token in tokens:
            tip = self.append_one(tip, token)
        return tip

    def _append_run(self, tip: int, tokens: Sequence[int]) -> int:
        """Continue the newest node, which nothing continues yet: a prompt, without a lookup for each token."""
        first, count, depth = tip + 1, len(tokens), self.depth[tip]
        keys = [node << 32 | token for node, token in enumerate(tokens, tip)]
        self._child.update(zip(keys, range(first, first + count), strict=True))
        self.token += tokens
        self.parent += range(tip, tip + count)
        self.depth += range(depth + 1, depth + 1 + count)
        self._run += [self._run[tip]] * count
        return tip + count

    def ancestor(self, tip: int, length: int) -> int:
        """The node of the first `length` tokens of `tip`."""
        steps = self.depth[tip] - length
        while steps > 0:
            first = self._run[tip]
            if tip - first >= steps:
                return tip - steps
            steps -= tip - first + 1
            tip = self.parent[first]
        return tip

    def suffix(self, tip: int, count: int) -> list[int]:
        """The last `count` tokens of `tip`."""
        pieces = []
        while count > 0:
            first = max(self._run[tip], tip - count + 1)
            pieces.append(self.token[first : tip + 1])
            count -= tip + 1 - first
            tip = self.parent[first]
        if len(pieces) == 1:
            return pieces[0]
        return [token for piece in reversed(pieces) for token in piece]

    def tokens(self, tip: int) -> list[int]:
        """The whole sequence of `tip`."""
        return self.suffix(tip, self.depth[tip])

    def slice(self, tip: int, start: int, stop: int) -> list[int]:
        """Tokens `start` to `stop` of `tip`."""
        return self.suffix(self.ancestor(tip, stop), stop - start)

    def common_length(self, *tips: int) -> int:
        """How many leading tokens sequences share."""
        return self.depth[functools.reduce(self._common, tips)]

    def agree(self, tips: Iterable[int], length: int) -> bool:
        """Whether sequences share their first `length` tokens. Each node between their tips and where they meet is
        looked at once."""
        depth, parent, nodes = self.depth, self.parent, set(tips)
        while len(nodes) > 1:
            deepest = max([depth[node] for node in nodes])
            if deepest <= length:
                return False
            nodes = {parent[node] if depth[node] == deepest else node for node in nodes}
        return all(depth[node] >= length for node in nodes)

    def _common(self, a: int, b: int) -> int:
        """The last node that two sequences share."""
        while a != b:
            if a < b:
                a, b = b, a
            if self._run[a] <= b:  # b lies in a's run, before a
                return b
            a = self.parent[self._run[a]]
        return a

    def marks(self) -> Marks:
        """Nodes that somebody has marked: none so far."""
        return Marks(self._run, self.parent)

    def _reached(self, tips: Iterable[int]) -> dict[int, int]:
        """Of each run, by its first node, the last one that is one of these tips or before one."""
        reached = {0: 0}
        for tip in tips:
            while True:
                first = self._run[tip]
                last = reached.get(first, -1)
                reached[first] = max(last, tip)
                if last >= 0:  # what is before was looked at, or is nothing
                    break
                tip = self.parent[first]
        return reached

    def alive(self, tips: Iterable[int]) -> tuple[int, int]:
        """How many tokens are kept for these tips, and in how many runs: to say so takes as long as there are runs and
        tips."""
        reached = self._reached(tips)
        return sum(last - first + 1 for first, last in reached.items()) - 1, len(reached)

    def pruned(self, tips: Sequence[int]) -> tuple[History, Callable[[int], int]]:
        """A history of these tips and what is before them alone, and what says the number there of a node that is. What
        is behind the last fork before a tip is one run, whatever has grown beside it."""
        reached, new, begin = self._reached(tips), History(self.block_size), {0: 0}

        def number(node: int) -> int:
            first = self._run[node]
            return begin[first] + node - first

        def bring(first: int) -> None:
            if first:
                begin[first] = new.append_one(number(self.parent[first]), self.token[first])
            new._append_run(begin[first], self.token[first + 1 : reached[first] + 1])

        bring(0)
        for tip in tips:
            due, first = [], self._run[tip]
            while first not in begin:
                due.append(first)
                first = self._run[self.parent[first]]
            for first in reversed(due):
                bring(first)

        def alive(of: dict[int, Any]) -> dict[int, Any]:
            return {number(node): kept for node, kept in of.items() if node <= reached.get(self._run[node], -1)}

        new.notes, new._key = alive(self.notes), alive(self._key)
        return new, number

    def block_key(self, tip: int, end: int) -> bytes:
        """The chained key of the block that ends after `end` tokens: it vouches for everything before it as well."""
        node = self.ancestor(tip, end)
        missing = []
        while node not in self._key:
            missing.append(node)
            node = self.ancestor(node, self.depth[node] - self.block_size)
        key = self._key[node]
        for node in reversed(missing):
            content = array("i", self.suffix(node, self.block_size)).tobytes()
            key = self._key[node] = blake2b(key + content, digest_size=_KEY_BYTES).digest()
        return key


class Marks:
    """Nodes of a history that somebody has marked, each with all before it. To mark and to find one takes as long as
    there are runs before it."""

    __slots__ = ("_marked", "_parent", "_run")

    def __init__(self, run: list[int], parent: list[int]) -> None:
        self._run, self._parent = run, parent
        self._marked: dict[int, tuple[list[int], list[Any]]] = {}  # of each run: up to which node, ascending, by whom

    def mark(self, node: int, who: Any) -> tuple[int, Any]:
        """Mark a node and all before it, where nobody has. The last one that was marked already, and by whom; 0 and
        None: none was."""
        while node:
            first = self._run[node]
            known = self._marked.get(first)
            if known is None:
                self._marked[first] = [node], [who]
                node = self._parent[first]
                continue
            nodes, owners = known
            if node <= nodes[-1]:
                return node, owners[bisect_left(nodes, node)]
            nodes.append(node)
            owners.append(who)
            return nodes[-2], owners[-2]
        return 0, None

    def find(self, node: int) -> tuple[int, Any]:
        """The last marked one of a node and those before it, and by whom; 0 and None: none is."""
        while node:
            first = self._run[node]
            if (known := self._marked.get(first)) is not None:
                nodes, owners = known
                node = min(node, nodes[-1])
                return node, owners[bisect_left(nodes, node)]
            node = self._parent[first]
        return 0, None
