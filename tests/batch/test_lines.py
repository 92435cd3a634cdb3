"""The lines of an input, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedec.batch import lines
from pagedec.batch.lines import Line, LineError, parse_line, read_lines
from pagedec.errors import InvalidArgument
from tests.batch.files import request

GOOD = request("a", prompt="x")


def parse(data: bytes) -> lines.LineRequest:
    return parse_line(Line(1, data, ""))


def test_numbers_count_every_line_and_blank_ones_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  \t\r\nfour\n\xff\nlast")
    found = list(read_lines(path))
    assert [(line.number, line.data.strip()) for line in found] == [
        (1, b"one"),
        (4, b"four"),
        (5, b"\xff"),
        (6, b"last"),
    ]


def test_a_digest_names_the_content_and_not_the_line_end(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"same\nsame\r\nother\nsame")
    one, two, three, four = (line.digest for line in read_lines(path))
    assert one == two == four != three


def test_of_a_line_without_an_end_only_the_beginning_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 10)
    path = tmp_path / "in"
    path.write_bytes(b"x" * 35 + b"\n" + b"x" * 35 + b"y\n" + b"z" * 10 + b"\n")
    long, other, exact = read_lines(path)
    assert [line.number for line in (long, other, exact)] == [1, 2, 3]
    assert len(long.data) == 11 and long.digest != other.digest
    with pytest.raises(LineError, match="must be at most 10 bytes long"):
        parse_line(long)
    with pytest.raises(LineError, match="is not JSON"):
        parse_line(exact)


def test_a_missing_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="^input is '.*none': cannot be read: No such file"):
        next(read_lines(tmp_path / "none"))


def test_a_request() -> None:
    assert parse(json.dumps(GOOD).encode()) == lines.LineRequest("a", False, {"prompt": "x"})
    assert parse(json.dumps(request("ü", chat=True, messages=[])).encode()) == lines.LineRequest(
        "ü", True, {"messages": []}
    )


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"nonsense", "invalid_json", "is not JSON: Expecting value at character 0"),
        (b'{"custom_id": "a"', "invalid_json", "is not JSON: Expecting ',' delimiter at character 17"),
        (b'{"custom_id": "a", "body": {"temperature": NaN}}', "invalid_json", "is not JSON: NaN is not JSON"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "invalid_json", "is not JSON: Exceeds the limit"),
        (b"[" * 100_000, "invalid_json", "is not JSON that can be read: it is nested too deeply"),
        (b'{"custom_id": "\xff"}', "invalid_utf8", "is not UTF-8: invalid start byte at byte 15"),
        (b'{"custom_id": "\\ud800"}', "invalid_json", "has half a surrogate pair"),
        (b"\x00\x00", "invalid_json", "is not JSON"),
        (b"[1]", "invalid_request", "is list: must be a JSON object with custom_id, method, url, body"),
        (b"{}", "missing_custom_id", "custom_id is None: must be a text that is not empty"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_lines_that_name_nobody(data: bytes, kind: str, message: str) -> None:
    with pytest.raises(LineError, match=f"^{message}") as caught:
        parse(data)
    assert (caught.value.kind, caught.value.custom_id) == (kind, None)


def test_a_line_that_is_no_text_is_named_where_its_name_is_one() -> None:
    with pytest.raises(LineError, match="has half a surrogate pair") as caught:
        parse(b'{"custom_id": "caf\xc3\xa9", "body": {"prompt": "\\ud800"}}')
    assert caught.value.custom_id == "café"


@pytest.mark.parametrize("custom_id", ["", None, 3, ["a"]])
def test_what_is_no_custom_id(custom_id: object) -> None:
    with pytest.raises(LineError, match="^custom_id is .*: must be a text that is not empty") as caught:
        parse(json.dumps(GOOD | {"custom_id": custom_id}).encode())
    assert (caught.value.kind, caught.value.param, caught.value.custom_id) == ("invalid_request", "custom_id", None)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"method": "GET"}, "invalid_request", "method is 'GET': must be POST"),
        ({"method": None}, "invalid_request", "method is None: must be POST"),
        ({"url": "/v1/embeddings"}, "invalid_url", "url is '/v1/embeddings': must be one of /v1/completions, /v1/chat"),
        ({"url": ["/v1/completions"]}, "invalid_url", "url is .*: must be one of"),
        ({"body": "x"}, "invalid_request", "body is 'x': must be a JSON object"),
        ({"bodi": {}}, "invalid_request", "bodi is {}: not a field of a batch line; known are custom_id, method"),
    ],
)  # fmt: skip
def test_lines_that_ask_for_nothing(changed: dict[str, object], kind: str, message: str) -> None:
    with pytest.raises(LineError, match=f"^{message}") as caught:
        parse(json.dumps(GOOD | changed).encode())
    assert (caught.value.kind, caught.value.custom_id) == (kind, "a")
    assert caught.value.param == next(iter(changed))


def test_pairs_of_surrogates_are_text() -> None:
    assert parse(json.dumps(request("😀", prompt="😀")).encode()).custom_id == "😀"
