"""How far a job is, as a bar and as lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedec import LLM
from pagedec.batch import progress, run_batch
from tests.batch.files import write_input
from tests.batch.test_job import good_lines


def test_a_report_is_a_line_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    told: list[str] = []
    counts = progress.Pace(200, 50, False, told.append)
    for now[0], num_done in ((110.0, 60), (131.0, 60), (140.0, 80), (162.0, 112)):
        counts.update(num_done, 3, 10 * num_done)
    assert told == [
        "60 of 200 lines (30%), 3 with errors; 0.32 lines/s, 19.4 tokens/s, 07:14 left",
        "112 of 200 lines (56%), 3 with errors; 1.00 lines/s, 18.1 tokens/s, 01:28 left",
    ]


def test_a_report_before_the_first_line() -> None:
    told: list[str] = []
    counts = progress.Pace(4, 0, False, told.append)
    counts.reported -= progress.REPORT_SECONDS
    counts.update(0, 0, 0)
    assert told == ["0 of 4 lines (0%), 0 with errors; 0.00 lines/s, 0.0 tokens/s, unknown time left"]


def test_progress_is_one_bar(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_input(tmp_path / "in", [*good_lines(2), "bad"])
    run_batch(llm, source, tmp_path / "out", defaults={"max_tokens": 2}, use_tqdm=True)
    out, err = capsys.readouterr()
    assert out == "" and "lines: 100%" in err and "3/3" in err and "tokens/s, 1 errors" in err
