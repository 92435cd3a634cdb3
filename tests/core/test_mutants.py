"""The checks of `test_protocol.py` must be able to fail: each of these mistakes has to be found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pagedec.core import table, transition
from pagedec.core.block import BlockPool
from pagedec.core.layout import LaneBuilder
from pagedec.core.table import BlockTable, CopyPlan
from pagedec.errors import InvariantError
from tests.core import fake
from tests.core.test_protocol import alone_and_mixed, streams


def skip_compaction(table: BlockTable, path: Sequence[int], copies: CopyPlan) -> None:
    table.length += len(path)


def compact_without_copy(table: BlockTable, path: Sequence[int], copies: CopyPlan) -> None:
    """In place of whatever the accepted path happens to overwrite, sharers or not."""
    base = table.length - 1
    for i, node in enumerate(path, start=1):
        copies.move_slot(table.slot(base + node), table.slot(base + i))
        table.length += 1


def draws_one_position_late(builder: Any, original: Callable[..., Any] = LaneBuilder._draws) -> Any:
    draws = original(builder)
    draws["position"] += 1
    return draws


Change = tuple[Any, str, Any]
MUTANTS: dict[str, list[Change]] = {
    "no copy-on-write": [
        (BlockTable, "make_writable", lambda *_: True), (table, "_num_copies", lambda *_: 0),
    ],
    "published blocks are written": [(BlockPool, "writable", lambda pool, block: pool.refs[block] == 1)],
    "no compaction": [(transition, "compact_path", skip_compaction)],
    "compaction without copy-on-write": [(transition, "compact_path", compact_without_copy)],
    "truncated ancestors": [(fake.FakeRunner, "ancestors", lambda _, parents, row: [row] if parents[row] >= 0 else [])],
    "noise without stream": [(fake, "noise", lambda seed, stream, position: fake.reference_noise(seed, 0, position))],
    "copies only the first slot": [
        (CopyPlan, "copy_block", lambda plan, source, target, count: plan.move_slot(source * 4, target * 4)),
    ],
    "draws one position late": [(LaneBuilder, "_draws", draws_one_position_late)],
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_dies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, mutant in MUTANTS[name]:
        assert hasattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, mutant)
    check = streams if name == "noise without stream" else alone_and_mixed
    with pytest.raises((AssertionError, InvariantError, IndexError)) as death:
        for seed in range(60):
            check(seed)
    assert str(death.value)
