"""The scheduler does what the golden transcripts say, and plain sampling settled as arrays does the same as through
objects.

After a change that is meant: `python -m tests.engine.transcripts --rewrite`, and read the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.transcripts import TESTDATA, Driver, replay

PATHS = sorted(TESTDATA.glob("*.txt"))


@pytest.mark.parametrize("array_settle", [True, False], ids=["arrays", "objects"])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_transcript(path: Path, array_settle: bool) -> None:
    text = path.read_text(encoding="utf-8")
    assert replay(text, array_settle) == text


def test_there_are_transcripts() -> None:
    assert len(PATHS) >= 8


def test_both_paths_are_taken() -> None:
    """The flag does switch: arrays plan draws without queries."""
    for array_settle in (True, False):
        driver = Driver(array_settle)
        driver.run("add a prompt=1-3 n=1 max_tokens=3")
        driver.run("step")
        plan = driver.engine.scheduler.plan()
        assert [work.query is None for work in plan.works] == [array_settle]
