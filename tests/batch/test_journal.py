"""The output file: only whole records, only one writer, nothing of anybody else's."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from pagedec.batch.journal import Done, Journal, OutputError
from pagedec.batch.lines import Line
from pagedec.batch.replies import answer_record, as_line, record_id
from pagedec.errors import InvalidArgument

RECORDS = [
    answer_record(record_id(Line(i, b"", f"{i:016x}"), "0" * 8), f"ü{i}", {"text": "x\n" * i}) for i in (3, 1, 2)
]


def write(path: Path) -> bytes:
    journal = Journal(path)
    for record in RECORDS:
        journal.append(record)
    journal.close()
    return path.read_bytes()


def test_what_was_written_is_done(tmp_path: Path) -> None:
    data = write(tmp_path / "out")
    assert [json.loads(line) for line in data.splitlines()] == RECORDS
    journal = Journal(tmp_path / "out")
    assert journal.done == {i: Done(f"{i:016x}", "0" * 8, False) for i in (3, 1, 2)}
    journal.close()
    journal.close()


def test_a_record_is_json_whatever_its_numbers() -> None:
    body = {"a": [1.5, float("nan"), {"b": -float("inf")}], "c": True}
    assert as_line(answer_record("n", "é", body)).endswith(
        b'{"a": [1.5, null, {"b": null}], "c": true}}, "error": null}\n'
    )


def test_a_torn_line_is_cut_off_wherever_it_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "out"
    data = write(path)
    ends = [0, *(i + 1 for i, byte in enumerate(data) if byte == ord("\n"))]
    for size in {*range(0, len(data), 7), *(end + i for end in ends for i in (-1, 0, 1) if 0 <= end + i <= len(data))}:
        path.write_bytes(data[:size])
        journal = Journal(path)
        whole = max(end for end in ends if end <= size)
        assert path.read_bytes() == data[:whole]
        assert list(journal.done) == [3, 1, 2][: ends.index(whole)]
        journal.append(RECORDS[0] | {"id": RECORDS[0]["id"].replace("-3-", "-9-")})
        journal.close()
        assert path.read_bytes()[:whole] == data[:whole] and path.read_bytes().endswith(b"\n")


def test_zeros_behind_the_records_are_what_a_power_failure_left(tmp_path: Path) -> None:
    data = write(tmp_path / "out")
    (tmp_path / "out").write_bytes(data + bytes(4096))
    Journal(tmp_path / "out").close()
    assert (tmp_path / "out").read_bytes() == data
    (tmp_path / "out").write_bytes(bytes(4096))
    with pytest.raises(InvalidArgument, match="line 1 is no record of a batch"):
        Journal(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == bytes(4096)


def test_restart_forgets(tmp_path: Path) -> None:
    data = write(tmp_path / "out")
    journal = Journal(tmp_path / "out", restart=True)
    assert journal.done == {} and (tmp_path / "out").read_bytes() == data, "nothing has begun yet"
    journal.begin()
    assert (tmp_path / "out").read_bytes() == b""
    journal.close()


@pytest.mark.parametrize(
    "tail", [b"", as_line(RECORDS[0])[:20], as_line(RECORDS[0]), bytes(64)], ids=["", "torn", "twice", "zeros"]
)
def test_restart_takes_what_batches_have_written(tail: bytes, tmp_path: Path) -> None:
    """Of whatever settings: also what no job could go on with."""
    write(tmp_path / "out")
    with open(tmp_path / "out", "ab") as file:
        file.write(tail)
    for begun in (False, True):  # the second time it is empty
        journal = Journal(tmp_path / "out", restart=True)
        journal.append(RECORDS[1])
        journal.close()
        assert (tmp_path / "out").read_bytes() == as_line(RECORDS[1]), begun
        (tmp_path / "out").write_bytes(b"")


@pytest.mark.parametrize(
    "content",
    [b"my notes", b"my notes\n", b'{"a": 1}\n', b"[]\n", b'{"id": 3}\n', b'{"id": "x"}\n', b"\x00\n", b"{" * 20,
     b'{"id": "line-' + b"9" * 5000 + b'-0123456789abcdef-01234567", "response": null, "error": {}}\n'],
    ids=range(9),
)  # fmt: skip
@pytest.mark.parametrize("mode", [{}, {"restart": True}, {"retry_failed": True}], ids=str)
def test_somebody_else_s_file_is_left_alone(content: bytes, mode: dict[str, bool], tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    message = "^output is .*: line 1 is no record of a batch; name another file, this one stays as it is$"
    with pytest.raises(InvalidArgument, match=message):
        Journal(path, **mode)
    assert path.read_bytes() == content
    path.write_bytes(as_line(RECORDS[0]) + content)
    with pytest.raises(InvalidArgument, match="line 2 is no record of a batch"):
        Journal(path, **mode)
    assert path.read_bytes() == as_line(RECORDS[0]) + content


def test_two_records_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(as_line(RECORDS[0]) * 2)
    with pytest.raises(InvalidArgument, match="line 2 is a second record of input line 3"):
        Journal(tmp_path / "out")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first = Journal(tmp_path / "out")
    first.append(RECORDS[0])
    for restart in (False, True):
        with pytest.raises(InvalidArgument, match="^output is .*: another job is writing it"):
            Journal(tmp_path / "out", restart)
    first.close()
    second = Journal(tmp_path / "out")
    assert list(second.done) == [3]
    second.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/such/out", "cannot be written: No such file"), ("folder", "cannot be written: Is a directory")],
)
def test_places_where_nothing_can_be_written(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidArgument, match=f"^output is .*: {message}"):
        Journal(tmp_path / name)


def test_the_output_is_a_plain_file() -> None:
    with pytest.raises(InvalidArgument, match="^output is '/dev/null': must be a plain file"):
        Journal(Path("/dev/null"))


def test_a_full_disk_leaves_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "out"
    journal = Journal(path)
    journal.append(RECORDS[0])
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))  # the next write stops after 20 bytes
    try:
        with pytest.raises(OutputError, match="cannot be written: File too large"):
            journal.append(RECORDS[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == as_line(RECORDS[0])
    journal.append(RECORDS[1])
    journal.close()
    assert path.read_bytes() == as_line(RECORDS[0]) + as_line(RECORDS[1])


def test_a_disk_that_fails_at_the_end_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    journal = Journal(tmp_path / "out")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        journal.close()
    monkeypatch.undo()
    Journal(tmp_path / "out").close()
