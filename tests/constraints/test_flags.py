"""What an answer may be, on the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from pagedec.cli.arguments import add_sampling_arguments, given_sampling
from pagedec.errors import InvalidArgument


def given(*flags: str) -> object:
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    return given_sampling(parser.parse_args(flags)).get("structured_outputs")


def test_each_kind_has_a_flag(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "person.json", tmp_path / "moves.lark"
    schema.write_text(json.dumps({"type": "integer"}))
    grammar.write_text('start: "a"+')
    assert given() is None
    assert given("--json-schema", str(schema)) == {"json": '{"type": "integer"}'}
    assert given("--json-object") == {"json_object": True}
    assert given("--regex", "[0-9]+") == {"regex": "[0-9]+"}
    assert given("--choice", "yes", "--choice", "no") == {"choice": ["yes", "no"]}
    assert given("--grammar", str(grammar)) == {"grammar": 'start: "a"+'}


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="^choice is .*: must not be given with regex$"):
        given("--choice", "yes", "--regex", "a")
    with pytest.raises(InvalidArgument, match="^json_schema is .*: cannot be read: No such file"):
        given("--json-schema", str(tmp_path / "absent"))
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(InvalidArgument, match="^structured_outputs.json is '{': must be JSON"):
        given("--json-schema", str(broken))
