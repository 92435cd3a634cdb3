"""The example scripts run, and the one for vLLM is a script for vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_script_for_vllm_runs_but_for_its_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example is taken as its vLLM self, and nothing but the import's module is changed back."""
    ours = (EXAMPLES / "vllm_script.py").read_text()
    theirs = ours.replace("\nfrom pagedec import LLM, SamplingParams\n", "\nfrom vllm import LLM, SamplingParams\n")
    assert theirs != ours and "pagedec" not in theirs
    script = tmp_path / "script.py"
    script.write_text(re.sub(r"^from vllm import", "from pagedec import", theirs, flags=re.MULTILINE))
    with contextlib.redirect_stderr(io.StringIO()):
        runpy.run_path(str(script))["main"]("smollm2")
    shown = capsys.readouterr().out
    assert shown.count("'The capital of France is' -> ") == 4
    assert "(stop, '.')" in shown or "(stop, '\\n')" in shown
    assert "Paris" not in shown.split("== rules")[1].split("\n")[1]
    assert "rank 1: " in shown and shown.count("The capital of Italy") >= 1
    assert [line for line in shown.splitlines() if line.startswith("== ")] == [
        "== one set of parameters for all prompts", "== the model's own parameters, changed",
        "== parameters for each prompt",
        "== rules",
        next(line for line in shown.splitlines() if line.startswith("== logprobs")), "== chat", "== several chats",
        "== the answer goes on",
    ]  # fmt: skip


@pytest.mark.long
def test_the_offline_example(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        runpy.run_path(str(EXAMPLES / "offline.py"))["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("'My three favourite colours are' -> ") for line in lines) == 3
    cached = [int(found) for found in re.findall(r"\((\d+) of \d+ prompt tokens were cached\)", "\n".join(lines))]
    assert len(cached) == 2 and cached[1] > cached[0]


def test_the_example_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        runpy.run_path(str(EXAMPLES / "json_output.py"))["main"]()
    person, choice, moves, year, age = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"'A made-up person as JSON: ' -> '\{.*\}'", person)
    assert choice.split(" -> ")[1] in ("' yes'", "' no'")
    assert re.fullmatch(r".* -> '[a-h][1-8]-[a-h][1-8]( [a-h][1-8]-[a-h][1-8]){0,3}'", moves)
    assert re.fullmatch(r".* -> '1\d{3}'", year) and re.fullmatch(r"age: \d+", age)


def test_the_example_of_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        runpy.run_path(str(EXAMPLES / "recommendation.py"))["main"]()
    lines = capsys.readouterr().out.splitlines()
    drawn = lines.pop()
    assert re.fullmatch(r"drawn:( 100[1-6]){4}", drawn) and len(lines) == 8
    for answers in (lines[1:4], lines[5:8]):
        found = [re.fullmatch(r"  +(-\d+\.\d{4}) item (100[1-6]), [A-Z].*", line) for line in answers]
        assert all(found) and len({match[2] for match in found if match}) == 3, "each item once"
        scores = [float(match[1]) for match in found if match]
        assert scores == sorted(scores, reverse=True)


def test_the_example_of_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "lora.py"))["main"]([])
    *batch, session, known = capsys.readouterr().out.splitlines()
    answers = {}
    for line in batch:
        name, _, rest = line.partition(": ")
        answers.setdefault(name, []).append(rest)
    assert [*answers] == ["no adapter", "red", "blue"] and len({*map(tuple, answers.values())}) == 3
    assert re.fullmatch(r"a session with blue: '.*', and -\d+\.\d\d for ' The end\.'", session)
    assert session.split(": ")[1].split(", and")[0] in answers["blue"][0] and known == "known are now [1]"


@pytest.mark.long
def test_the_example_of_coroutines(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(runpy.run_path(str(EXAMPLES / "async_llm.py"))["main"]())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    [paris] = [line for line in lines if line.startswith("'The capital of France is' -> ' Paris.")]
    assert int(paris.split()[-2]) > 4, "in pieces"
    assert "'What is the capital of Japan?' -> 'The capital of Japan is Tokyo.'" in lines
    assert [
        line for line in lines if re.fullmatch(r"'Once upon a time' was given up after 0.5 s and \d+ characters", line)
    ]


@pytest.mark.long
def test_the_example_of_beams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tree.svg"
    runpy.run_path(str(EXAMPLES / "beams.py"))["main"](str(path))
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    scores = [float(line.split()[0]) for line in lines[:4]]
    assert scores == sorted(scores, reverse=True) and "4 answers to a prompt of 8 tokens; " in shown
    assert f"#1 score {scores[0]:.4f}" in shown and path.read_text().startswith("<svg ")
    [best] = [line for line in lines if line.startswith("best: ")]
    assert best.startswith("best: The three most important things in life are")
    assert repr(best.removeprefix("best: The three most important things in life are"))[1:-1] in lines[0]
    assert re.search(r"after half a second: \d+ tokens, limited by max_time\n", shown)
    beams, greedy = (float(found) for found in re.findall(r"log-probability by \w+: (-[\d.]+)", shown))
    assert beams > greedy
    assert int(re.findall(r"\(in (\d+) pieces\)", lines[-1])[0]) > 1


@pytest.mark.long
def test_the_example_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "beam_groups.py"))["main"]()
    found = re.findall(r"== ([a-z ]+): (\d) beginnings", capsys.readouterr().out)
    numbers = {name: int(number) for name, number in found}
    assert list(numbers) == ["one search", "three groups", "drawn"]
    assert numbers["three groups"] > numbers["one search"]


@pytest.mark.long
def test_the_example_of_a_tree_search(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "tree_search.py"))["main"]()
    lines = capsys.readouterr().out.splitlines()
    first, second = (line.split(": ", 1)[1].strip() for line in lines if re.match(r"(first|second):", line))
    start = "Once upon a time there was a lighthouse keeper who"
    assert first != second and first.startswith(start) and second.startswith(start)
    assert any(line.startswith("3 branches behind 10 tokens") for line in lines)
    calm, crashed = (float(line.split()[0]) for line in lines if line.endswith((" calm.", " crashed.")))
    assert calm > crashed
    found = [line.split(maxsplit=1) for line in lines if re.match(r" *-?\d+\.\d\d '", line)]
    assert len(found) == 2 and float(found[0][0]) >= float(found[1][0]) and found[0][1] != found[1][1]
    assert "18 visits: " in "\n".join(lines)


@pytest.mark.long
def test_the_example_of_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "speculation.py"))["main"]()
    lines = capsys.readouterr().out.splitlines()
    steps = {
        line[:30].strip(): int(line.split(" in ")[1].split()[0]) for line in lines if " drafted tokens accepted" in line
    }
    assert steps["plain"] == 40 and steps["n-grams, always 8 wide"] < 20 and len(steps) == 6
    assert any(line.startswith("1 text: ") for line in lines) and "beams: the same with drafts" in lines
    assert any(line.startswith("ngram: accepted by place ") for line in lines)
