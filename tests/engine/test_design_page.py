"""docs/design.md keeps its word: a token's way is the one that it lists, and the algorithm that it shows runs as it
stands."""

from __future__ import annotations

import importlib
import itertools
import math
import re
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from tests.engine.crowd import SMALL, Tiny, Tokens, assert_whole, workload

PAGE = (Path(__file__).parents[2] / "docs" / "design.md").read_text(encoding="utf-8")
MAX_FUNCTIONS, MAX_RECORDS, MAX_LINES = 15, 8, 120


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def listed() -> list[tuple[str, str]]:
    """File and qualified name of each function of the list."""
    return re.findall(r"^\| `([\w/]+\.py)` `([\w.]+)` \|", section("A token's way"), re.MULTILINE)


def test_a_token_goes_the_way_of_the_list(text_llm: LLM) -> None:
    wanted, called = listed(), list[tuple[str, str]]()
    places = {(str(Path("pagedec") / file), name) for file, name in wanted}

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        at = "pagedec/" + code.co_filename.rpartition("pagedec/")[2], code.co_qualname
        if event == "call" and at in places and at not in called:
            called.append(at)

    threading.setprofile(note)  # texts are made in another thread
    sys.setprofile(note)
    try:
        [output] = text_llm.generate("A token's way", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert output.outputs[0].text
    assert called == [(f"pagedec/{file}", name) for file, name in wanted]
    assert len(wanted) <= MAX_FUNCTIONS


def test_records_of_the_list_exist() -> None:
    rows = re.findall(r"^\| `([\w/]+)\.py` `[\w.]+` \| [^|]* \| (.*) \|$", section("A token's way"), re.MULTILINE)
    records = [(module, name) for module, cell in rows for name in re.findall(r"`(\w+)`", cell)]
    assert 0 < len(records) <= MAX_RECORDS
    for module, name in records:
        assert isinstance(getattr(importlib.import_module(f"pagedec.{module.replace('/', '.')}"), name), type), name


def test_files_that_the_page_names_exist() -> None:
    for name in set(
        re.findall(r"`((?:core|engine|runtime|executor|kernels|llm|text|models|decoders|formats)/\w+\.py)`", PAGE)
    ):
        assert (Path(__file__).parents[2] / "pagedec" / name).is_file(), name
    for name in set(re.findall(r"`((?:tests|csrc|docs|benchmarks)/[\w/.]+)`", PAGE)):
        assert (Path(__file__).parents[2] / name).exists(), name


@pytest.fixture(scope="module")
def code() -> str:
    """The page's algorithm."""
    [code] = re.findall(r"```python\n(.*?)```", section("A decoding algorithm of your own"), re.DOTALL)
    assert code.count("\n") < MAX_LINES
    return code


@pytest.fixture(scope="module")
def race(code: str) -> Any:
    """The same as a module of its own."""
    module = types.ModuleType("race_of_the_page")
    sys.modules[module.__name__] = module
    exec(compile(code, "docs/design.md", "exec"), module.__dict__)
    return module


def test_the_pages_algorithm_has_strict_types(code: str, tmp_path: Path) -> None:
    """It needs nothing of those that are skipped, which take ten seconds to read."""
    (tmp_path / "race.py").write_text(code)
    skipped = "[mypy-torch.*,transformers.*,ray.*,numpy.*,pagedec]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = True\ncache_dir = {tmp_path / 'cache'}\n{skipped}")
    command = [sys.executable, "-m", "mypy", "race.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_algorithm_runs(race: Any, tiny: Tiny, expected: list[Tokens]) -> None:
    """Alone, in a crowd of other decoders, in a pool that is too small: the same answers; and it prefers what is more
    probable."""
    params = [
        race.RaceParams(width=2 + i, stride=3, seed=i, max_tokens=14, logprobs=0, ignore_eos=i < 2) for i in range(4)
    ]
    prompts = [[7 + i, 9, 11, 13 * i + 3] for i in range(4)]
    roomy = tiny()
    alone = [roomy.generate([p], [own], use_tqdm=False)[0].outputs[0] for p, own in zip(prompts, params, strict=True)]
    assert all(0 < len(answer.token_ids) <= 14 for answer in alone)
    for llm in (roomy, tiny(**SMALL | {"num_blocks": 16, "max_num_seqs": 8})):
        others, theirs = workload()
        outputs = llm.generate([*prompts, *others], [*params, *theirs], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs[:4]] == [answer.token_ids for answer in alone]
        assert [[a.token_ids for a in output.outputs] for output in outputs[4:]] == expected
        assert_whole(llm, expected)
    plain = [
        roomy.generate(
            [p],
            [SamplingParams(temperature=1, top_k=20, seed=own.seed, max_tokens=14, logprobs=0, ignore_eos=True)],
            use_tqdm=False,
        )[0].outputs[0]
        for p, own in zip(prompts[:2], params[:2], strict=True)
    ]
    assert sum(a.cumulative_logprob or 0 for a in alone[:2]) > sum(a.cumulative_logprob or 0 for a in plain)


def test_the_pages_algorithm_ends_as_the_page_says(race: Any, tiny: Tiny) -> None:
    """With one answer where its time is over, and where rules leave nothing to go on with."""
    llm = tiny()
    params = race.RaceParams(width=3, stride=100, seed=1, max_tokens=200, ignore_eos=True, logprobs=0)
    ticks = itertools.count()
    llm.engine.clock = lambda: float(next(ticks))
    timed = params.clone(max_time=30)
    [answer] = llm.generate([[7, 9, 11]], timed, use_tqdm=False)[0].outputs
    assert answer.limited_by == "max_time" and 0 < len(answer.token_ids) < 200
    assert answer.score == pytest.approx(answer.cumulative_logprob)
    once = params.clone(allowed_token_ids=[*range(3, 33)], no_repeat_ngram_size=1)
    [answer] = llm.generate([[7, 9, 11]], once, use_tqdm=False)[0].outputs
    assert answer.limited_by == "rules" and sorted([7, 9, 11, *answer.token_ids]) == [*range(3, 33)]
    assert math.isfinite(answer.score or 0.0)
