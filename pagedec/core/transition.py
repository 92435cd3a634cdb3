"""From one generation of branches to the next: the only code that changes tables because of what a decoder said.

Validate all, then fork all children, then release all parents, then write. The last child of a dying parent takes over its
tables, so it writes in place; of several plain children the first is the parent itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedec.core.branch import Branch
from pagedec.core.copies import CopyPlan
from pagedec.core.draft import Draft
from pagedec.core.history import History
from pagedec.core.protocol import Child, Verdict
from pagedec.core.table import BlockTable
from pagedec.errors import InvalidArgument


def validate(history: History, live: Sequence[Branch], evaluated: Mapping[Branch, Draft], verdict: Verdict) -> None:
    """Find everything that can be wrong with a verdict before anything changes."""
    alive, dropped = set(live), set(verdict.drop)
    if not dropped <= alive:
        raise InvalidArgument("drop", len(dropped - alive), "of the branches dropped are not alive")
    for i, child in enumerate(verdict.live):
        field = f"live[{i}]"
        if child.parent not in alive or child.parent in dropped:
            raise InvalidArgument(f"{field}.parent", child.parent.tip, "must be the tip of a branch that is alive")
        if child.keep is not None:
            length = history.depth[child.parent.tip]
            if child.path:
                raise InvalidArgument(f"{field}.path", child.path, "must be empty where keep is given")
            if not 1 <= child.keep <= length:
                raise InvalidArgument(f"{field}.keep", child.keep, f"must be from 1 to the branch's length, {length}")
        if child.path:
            draft = evaluated.get(child.parent)
            size = len(draft.tokens) if draft is not None else 0
            if draft is None or not 1 <= child.path[-1] <= size or draft.path(child.path[-1]) != child.path:
                raise InvalidArgument(f"{field}.path", child.path, "must be a way down the draft of this step's query")


def transition(
    history: History,
    live: Sequence[Branch],
    evaluated: Mapping[Branch, Draft],
    verdict: Verdict,
    copies: Mapping[str, CopyPlan],
) -> list[Branch]:
    """The next generation. `evaluated` maps each branch queried in this step to the draft that was run behind it.

    Touched are the branches queried, named as a parent, or dropped: only their children live on, at their parent's place.
    The untouched live on as they are.
    """
    validate(history, live, evaluated, verdict)
    children: dict[Branch, list[Child]] = {branch: [] for branch in (*evaluated, *verdict.drop)}
    for child in verdict.live:
        children.setdefault(child.parent, []).append(child)
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
    history: History, parent: Branch, children: Sequence[Child], evaluated: Mapping[Branch, Draft]
) -> list[tuple[Branch, Child]]:
    """One parent's children, with tables but without their own tokens' KV settled."""
    survivor = next((i for i, child in enumerate(children) if child.is_plain), None)
    heir = len(children) - 1 if survivor is None else None
    family = []
    for i, child in enumerate(children):
        if i == survivor:
            family.append((parent, child))
            continue
        keep = history.depth[parent.tip] if child.keep is None else child.keep
        tip = history.ancestor(parent.tip, keep)
        if child.path:
            tokens = evaluated[parent].tokens
            tip = history.append(tip, [tokens[node - 1] for node in child.path])
        branch = Branch(
            history.append(tip, child.tokens),
            parent.tables if i == heir else {lane: table.fork() for lane, table in parent.tables.items()},
            parent.state if child.state is None else child.state,
            parent.stop_state if child.stop_state is None else child.stop_state,
            min(parent.prompt_length, keep),
            parent.score if child.score is None else child.score,
        )
        family.append((branch, child))
    return family


def _settle_tables(history: History, branch: Branch, child: Child, copies: Mapping[str, CopyPlan]) -> None:
    """Make the tables say what of the branch's tokens is cached. Never fails: what finds no block is recomputed."""
    for lane, table in branch.tables.items():
        if child.keep is not None:
            table.truncate(child.keep)
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
