"""Patterns of modules' names in a stranger's file: those that take long are refused before any name is tried."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from pagedec.errors import ModelFileError
from pagedec.formats.lora import read_lora
from pagedec.formats.name_patterns import MAX_NAME, MAX_STEPS, compile_pattern
from tests.formats.lora_files import write_lora
from tests.formats.test_lora import Q, check, pairs


@pytest.mark.parametrize(
    "pattern",
    [
        "([a-z._0-9]+)+!", "(aa|[a-z])*!", "(.*)*!", "(?:.*.*)+!", ".*.*.*.*!", "x.*.*.*!", "(?:.?){0,40}!",
        ".?" * 40 + "!", r"(.*)\1!", "(?:.|..){30}!", "(?:){65000}.*.*!", r".*.*.*" + r"\B" * 40, "(?=(.*)+!)",
    ],
)  # fmt: skip
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_would_take_too_long(tmp_path: Path, field: str, pattern: str) -> None:
    own = re.escape(f"{field} is {pattern!r}" if len(pattern) < 60 else field)
    with pytest.raises(ModelFileError, match=f"adapter_config.json: {own}.* too many steps .* at most {MAX_STEPS}"):
        read_lora(write_lora(tmp_path, pairs(), **{field: {pattern: 8}}))


def test_patterns_that_take_too_long_together(tmp_path: Path) -> None:
    several = {f".*{i}.*[.]x": 8 for i in range(4000)}
    with pytest.raises(ModelFileError, match=f"rank_pattern is '.*with those before it, too many .* {MAX_STEPS}"):
        read_lora(write_lora(tmp_path, pairs(), rank_pattern=several))
    check(
        read_lora(write_lora(tmp_path, pairs(), rank_pattern=dict.fromkeys(map("{}.q".format, range(4096)), 4))),
        pairs(),
    )


@pytest.mark.parametrize(
    "pattern",
    [
        ".*.*.*!", ".*?.*?.*?!", r"[^!]*[^!]*!", "[a.]?" * 13 + "!", "(?:[a.]?)" * 13 + "!", r".*.*\d*\.!",
        ".*.*" + r"\B" * 30 + "!", r".*\b\w.*!", "^(?:[a.][a.]?){0,18}!", r"(.*\.)?(.*)!",
        r".*.*" + r"(?=\d*\.)" * 25 + "!",
    ],
)  # fmt: skip
def test_the_worst_patterns_end_soon(pattern: str) -> None:
    compiled, steps = compile_pattern(pattern)
    assert steps <= MAX_STEPS
    for unit in ("a", ".", "0", "a.", "0.", "aaa."):
        name = (unit * MAX_NAME)[:MAX_NAME]
        begun = time.process_time()
        assert not compiled.match(name)
        assert time.process_time() - begun < 1


def test_names_of_modules_have_an_end(tmp_path: Path) -> None:
    for length, name in ((MAX_NAME, "a"), (MAX_NAME + 1, "b")):
        module = Q + "q" * (length - len(Q))
        path = write_lora(tmp_path / name, {module: pairs()[Q]})
        if length == MAX_NAME:
            assert list(read_lora(path).pairs) == [module]
        else:
            with pytest.raises(ModelFileError, match=f"is of a module of {length} characters, must be at most 128"):
                read_lora(path)
