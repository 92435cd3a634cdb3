"""Beam search and trees on the command line. What the engine does is a stand-in's, but for the last tests."""

from __future__ import annotations

import io
import json
import re
import sys
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from pagedec import BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from pagedec.cli import active, main
from tests.batch.tiny import make_tiny
from tests.terminal import PAGEDEC, Terminal


class StandIn:
    """An LLM that notes its parameters. Its answers are known: the prompt's letters and a number."""

    calls: list[Any] = []
    recommended: dict[str, Any] = {}

    def __init__(self, **_: Any) -> None: ...

    def close(self) -> None: ...

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.recommended)

    def generate(self, prompts: list[str], params: Any, **options: Any) -> list[RequestOutput]:
        StandIn.calls.append(params)
        outputs = []
        for i, prompt in enumerate(prompts):
            answers = [
                CompletionOutput(n, f"{prompt}{n}", [*prompt.encode(), 48 + n], finish_reason="length", score=-1.0 - n)
                for n in range(params.num_answers)
            ]
            output = RequestOutput(str(i), prompt, list(prompt.encode()), answers, True, block_size=2)
            outputs.append(output.spelled(bytes))
        return outputs


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    module = types.ModuleType("pagedec.llm")
    module.LLM = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pagedec.llm", module)
    monkeypatch.setattr(active, "active_line", lambda llm: "stand-in")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(StandIn, "calls", [])
    monkeypatch.setattr(StandIn, "recommended", {})
    return StandIn


def params_of(*flags: str) -> Any:
    assert main.main(["generate", "ab", *flags]) == 0
    return StandIn.calls[-1]


def test_flags_are_the_parameters(stand_in: type[StandIn]) -> None:
    flags = (
        "--beam-width 6 --num-return-sequences 2 --length-penalty -0.5 --early-stopping never --num-beam-groups 3 "
        "--diversity-penalty 0.25 --hf-semantics 4.38 --max-tokens 9 --min-tokens 2 --ignore-eos --stop-token-ids 3 "
        "--repetition-penalty 1.5 --logprobs 2 --max-time 7.5"
    )
    assert params_of(*flags.split(), "--stop", "END") == BeamSearchParams(
        beam_width=6,
        num_return_sequences=2,
        length_penalty=-0.5,
        early_stopping="never",
        num_beam_groups=3,
        diversity_penalty=0.25,
        hf_semantics="4.38",
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[3],
        repetition_penalty=1.5,
        logprobs=2,
        max_time=7.5,
        stop=["END"],
    )
    assert params_of("--beam-width", "4", "--early-stopping", "true") == BeamSearchParams(
        beam_width=4, early_stopping=True, max_tokens=128
    )
    assert type(params_of("--max-tokens", "3")) is SamplingParams


def test_drawing_is_recommended_where_something_is_drawn(stand_in: type[StandIn], tmp_path: Path) -> None:
    stand_in.recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 50}
    plain = BeamSearchParams(beam_width=2, repetition_penalty=1.1, max_tokens=50)
    assert params_of("--beam-width", "2") == plain == params_of("--beam-width", "2", "--temperature", "0")
    drafted = params_of("--beam-width", "2", "--speculative", '{"method": "ngram"}')
    assert drafted == plain.clone(speculative={"method": "ngram"})
    drawn = params_of("--beam-width", "2", "--do-sample", "--top-k", "5", "--min-p", "0.1", "--seed", "3")
    assert drawn == plain.clone(do_sample=True, temperature=0.6, top_k=5, top_p=0.9, min_p=0.1, seed=3)
    (tmp_path / "engine.toml").write_text("[sampling]\nn = 3\ntemperature = 0.7\nmax_tokens = 8\n")
    assert params_of("--config", str(tmp_path / "engine.toml"), "--beam-width", "2") == plain.clone(max_tokens=8)


def test_what_an_answer_may_be_is_kept_under_beams(stand_in: type[StandIn]) -> None:
    params = params_of("--beam-width", "2", "--choice", "yes", "--choice", "no")
    assert params.structured_outputs == StructuredOutputsParams(choice=("yes", "no"))
    assert params_of("--beam-width", "2", "--regex", "a+").structured_outputs == StructuredOutputsParams(regex="a+")


def test_a_table_of_the_file_asks_for_beams_and_flags_win_over_it(stand_in: type[StandIn], tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(
        "[sampling]\nmax_tokens = 8\nseed = 3\ntemperature = 0.7\n"
        '[beams]\nbeam_width = 3\nnum_return_sequences = 2\nearly_stopping = "never"\nmax_tokens = 6\n'
    )
    own = BeamSearchParams(beam_width=3, num_return_sequences=2, early_stopping="never", max_tokens=6, seed=3)
    config = ("--config", str(file))
    assert params_of(*config) == own
    assert params_of(*config, "--beam-width", "5", "--max-tokens", "9") == own.clone(beam_width=5, max_tokens=9)
    assert params_of(*config, "--length-penalty", "0", "--early-stopping", "true") == own.clone(
        length_penalty=0.0, early_stopping=True
    )
    assert params_of(*config, "--beam-width", "none") == SamplingParams(max_tokens=8, seed=3, temperature=0.7)
    file.write_text("[beams]\nlength_penalty = 0.5\n")
    assert type(params_of(*config)) is SamplingParams, "nothing asks for a search"
    assert params_of(*config, "--beam-width", "2") == BeamSearchParams(beam_width=2, length_penalty=0.5, max_tokens=128)


def test_a_wrong_value_in_the_table_is_named(
    stand_in: type[StandIn], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine.toml").write_text("[beams]\nlength_penalty = 9\n")
    assert main.main(["generate", "a", "--config", str(tmp_path / "engine.toml")]) == main.USER_ERROR
    message = "pagedec: error: length_penalty is 9: must be a finite number at least -5 and at most 5\n"
    assert capsys.readouterr().err == message and not StandIn.calls


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--beam-width 0", "beam_width is 0: must be a whole number from 1 to 512"),
        ("--beam-width 4 --num-return-sequences 5", "num_return_sequences is 5: must be at most beam_width, 4"),
        ("--beam-width 4 --num-beam-groups 3", "num_beam_groups is 3: must divide beam_width, which is 4"),
        ("--beam-width 4 --diversity-penalty 1", "diversity_penalty is 1.0: must be 0 where there is one group"),
        ("--beam-width 4 --num-beam-groups 2 --do-sample", "do_sample is true: must be false where there are groups"),
        ("--beam-width 4 --early-stopping maybe", 'early_stopping is maybe: must be true, false or "never"'),
        ("--beam-width 4 --n 2", "n is 2: must not be given with --beam-width: --num-return-sequences says how many"),
        ("--beam-width 4 --top-p 0.9", "top_p is 0.9: must be given with --do-sample: a beam search draws nothing"),
        ("--length-penalty 1", "length_penalty is 1.0: must be given with --beam-width"),
        ("--do-sample", "do_sample is true: must be given with --beam-width"),
        ("--show-tree --json", "show_tree is true: must not be given with --json"),
        ("--save-tree tree.png", "save_tree is tree.png: must end in .svg or .html"),
        ("--save-tree /nowhere/a.svg", "save_tree is /nowhere/a.svg: must be in a directory: /nowhere is none"),
    ],
)
def test_what_makes_no_sense(
    stand_in: type[StandIn], capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert main.main(["generate", "a", *flags.split()]) == main.USER_ERROR
    err = capsys.readouterr().err
    assert err.startswith(f"pagedec: error: {message}") and err.count("\n") == 1 and not StandIn.calls


def test_answers_have_scores_and_the_tree_follows_them(
    stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["generate", "abc", "x", "--beam-width", "2", "--show-tree"]) == 0
    assert capsys.readouterr().out == (
        "=== abc\n"
        "--- answer 1: 4 tokens, length, score -1.0000\n"
        "abc0\n"
        "--- answer 2: 4 tokens, length, score -2.0000\n"
        "abc1\n"
        "\n"
        "2 answers to a prompt of 3 tokens; 1 fork; 3 KV blocks of 2 tokens, 6 without sharing\n"
        '"abc"  block 0 for 2\n'
        '└─ "abc"  blocks 1-2 for 2\n'
        '   ├─ "0"  #1 score -1.0000, 4 tokens, length\n'
        '   └─ "1"  #2 score -2.0000, 4 tokens, length\n'
        "\n"
        "=== x\n"
        "--- answer 1: 2 tokens, length, score -1.0000\n"
        "x0\n"
        "--- answer 2: 2 tokens, length, score -2.0000\n"
        "x1\n"
        "\n"
        "2 answers to a prompt of 1 token; 1 fork; 1 KV block of 2 tokens, 2 without sharing\n"
        '"x"\n'
        '└─ "x"  block 0 for 2\n'
        '   ├─ "0"  #1 score -1.0000, 2 tokens, length\n'
        '   └─ "1"  #2 score -2.0000, 2 tokens, length\n'
        "\n"
    )
    assert main.main(["generate", "abc", "--beam-width", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [answer["score"] for answer in record["outputs"]] == [-1.0, -2.0] and record["block_size"] == 2


def test_trees_are_saved(stand_in: type[StandIn], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["generate", "abc", "--beam-width", "2", "--save-tree", str(tmp_path / "one.svg")]) == 0
    assert main.main(["generate", "a", "b", "--n", "2", "--save-tree", str(tmp_path / "two.HTML")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.svg", "two-1.HTML", "two-2.HTML"]
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert (tmp_path / "two-2.HTML").read_text().startswith("<!DOCTYPE html>")
    capsys.readouterr()
    (tmp_path / "taken.svg").mkdir()
    (tmp_path / "full.svg").symlink_to("/dev/full")
    for name, why in (("taken.svg", "Is a directory"), ("full.svg", "No space left on device")):
        assert main.main(["generate", "a", "--save-tree", str(tmp_path / name)]) == main.FAILED
        shown = capsys.readouterr()
        assert f"{name}: cannot be written: {why}\n" in shown.err and "=== a\n" in shown.out
        assert shown.err.splitlines()[-1].startswith("pagedec: 1 prompt of ")


# ----------------------------------------------------------------------------------------------------- a real engine
@pytest.mark.long
def test_on_a_terminal(tmp_path: Path) -> None:
    """The best answer of a search grows as it settles; a tree is as wide as the terminal."""
    model = [*"--load-format dummy --num-blocks 99 --max-tokens 40 --ignore-eos --allowed-token-ids 64,65,66".split()]
    model += ["--model", str(make_tiny(tmp_path)), "--beam-width", "3"]
    with Terminal([*PAGEDEC, "generate", "x", "--num-return-sequences", "1", *model], 60) as terminal:
        assert terminal.wait() == 0
    [_, text, score] = re.findall(r"(=== x)\n([abc\n]+)\n--- 40 tokens, length, score (-\d\.\d{4})\n", terminal.shown)[
        0
    ]
    with Terminal([*PAGEDEC, "generate", "x", "--show-tree", *model, "--no-progress"], 60) as terminal:
        assert terminal.wait() == 0
    assert text in terminal.shown and f"score {score}" in terminal.shown
    tree = terminal.shown[terminal.shown.index("3 answers to") : terminal.shown.index("pagedec: ")].splitlines()
    assert all(len(line) <= 60 for line in tree[1:]) and tree[1].startswith('"x"')
