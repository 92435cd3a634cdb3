"""From one generation of branches to the next: the only code that changes tables because of what a decoder said.

Check all (`checks.py`), then fork all children, then release all parents, then write. The last child of a dying parent
takes over its tables, so it writes in place; of several plain children the first is the parent itself. A gang's
children may come as arrays: `descend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedec.core.draft import Draft
from pagedec.core.history import History
from pagedec.core.protocol import Child, Children
from pagedec.core.request import Branch
from pagedec.core.table import BlockTable, CopyPlan


@dataclass(frozen=True, slots=True)
class Heir:
    """A child, and what becomes of its stops: the automaton's state, and up to where its tokens are given; and of its
    constraint."""

    child: Child
    stop_state: int
    given_length: int
    constraint_state: Any = None


def transition(
    history: History,
    live: Sequence[Branch],
    evaluated: Mapping[Branch, Draft],
    heirs: Sequence[Heir],
    dropped: Sequence[Branch],
    copies: Mapping[str, CopyPlan],
) -> list[Branch]:
    """The next generation, of children that were checked. `evaluated` maps each branch queried in this step to the
    draft that was run behind it.

    Touched are the branches queried, named as a parent, or dropped: only their children live on, at their parent's
    place. The untouched live on as they are.
    """
    children: dict[Branch, list[Heir]] = {branch: [] for branch in (*evaluated, *dropped)}
    for heir in heirs:
        children.setdefault(heir.child.parent, []).append(heir)
    families = [(parent, _fork(history, parent, children[parent], evaluated)) for parent in live if parent in children]
    for parent, family in families:
        if not family:
            parent.release()
    for parent, family in families:
        for branch, child in family:
            if branch is not parent or parent in evaluated:
                _settle_tables(history, branch, child, copies)
    born = dict(families)
    generation: list[Branch] = []
    for parent in live:
        if parent in born:
            generation += [branch for branch, _ in born[parent]]
        else:
            generation.append(parent)
    return generation


def _fork(
    history: History, parent: Branch, heirs: Sequence[Heir], evaluated: Mapping[Branch, Draft]
) -> list[tuple[Branch, Child]]:
    """One parent's children, with tables but without their own tokens' KV settled."""
    survivor = next((i for i, heir in enumerate(heirs) if heir.child.is_plain), None)
    last = len(heirs) - 1 if survivor is None else None
    family = []
    for i, heir in enumerate(heirs):
        child = heir.child
        if i == survivor:
            family.append((parent, child))
            continue
        keep = history.depth[parent.tip] if child.keep is None else child.keep
        tip = history.ancestor(parent.tip, keep)
        if child.path:
            tip = history.append(tip, evaluated[parent].along(child.path))
        branch = Branch(
            history.append(tip, child.tokens),
            parent.tables if i == last else {lane: table.fork() for lane, table in parent.tables.items()},
            parent.state if child.state is None else child.state,
            heir.stop_state,
            min(parent.prompt_length, keep),
            parent.score if child.score is None else child.score,
            heir.given_length,
            parent.planned_in,
            heir.constraint_state,
            parent.side if child.keep is None else 0,
        )
        family.append((branch, child))
    return family


def descend(
    history: History,
    live: Sequence[Branch],
    parents: Sequence[Branch],
    children: Children,
    stop_states: Sequence[int],
) -> list[Branch]:
    """The same for a gang on the target lane that was evaluated without drafts: entry i of `children` is of
    `parents[i]`. A parent's last child is the parent itself."""
    places: dict[Branch, list[int]] = {branch: [] for branch in live}
    for i, parent in enumerate(parents):
        places[parent].append(i)
    tokens, scores, states = children.tokens.tolist(), children.scores.tolist(), children.states
    generation: list[Branch] = []
    append = history.append_one
    for parent, own in places.items():
        if not own:
            parent.release()
            continue
        tip, state = parent.tip, parent.state
        for i in own[:-1]:
            new = None if states is None else states[i]
            branch = Branch(
                append(tip, tokens[i]),
                {"target": parent.tables["target"].fork()},
                state if new is None else new,
                stop_states[i],
                parent.prompt_length,
                scores[i],
                parent.given_length,
                parent.planned_in,
                side=parent.side,
            )
            generation.append(branch)
        i = own[-1]
        parent.tip, parent.score, parent.stop_state = append(tip, tokens[i]), scores[i], stop_states[i]
        if states is not None and states[i] is not None:
            parent.state = states[i]
        generation.append(parent)
    return generation


def _settle_tables(history: History, branch: Branch, child: Child, copies: Mapping[str, CopyPlan]) -> None:
    """Make the tables say what of the branch's tokens is cached. Never fails: what finds no block is recomputed."""
    for lane, table in branch.tables.items():
        if child.keep is not None:
            table.keep(child.keep)
        elif lane == "target":
            compact_path(table, child.path, copies[lane])
            table.truncate(table.length)
        elif table.tail:  # rolled tokens are good as far as they were accepted
            accepted = history.suffix(branch.tip, history.depth[branch.tip] - table.length)
            for rolled, token in zip(table.tail, accepted, strict=False):
                if rolled != token:
                    break
                table.length += 1
            table.truncate(table.length)


def compact_path(table: BlockTable, path: Sequence[int], copies: CopyPlan) -> None:
    """Move accepted nodes onto the chain: slot base + node goes to base + i, in increasing order, base being the root.

    Without a block for copy-on-write the rest of the path keeps its tokens and loses its KV.
    """
    base, size = table.length - 1, table.pool.block_size
    for i, node in enumerate(path, start=1):
        if node != i:
            if not table.make_writable((base + i) // size, size, copies):
                break
            copies.move_slot(table.slot(base + node), table.slot(base + i))
        table.length += 1
