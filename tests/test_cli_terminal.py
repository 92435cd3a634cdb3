"""What somebody at a terminal sees: answers that grow, lines that end between words, pastes, Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, CallInterrupted, SamplingParams
from pagedec.cli.generate import show_live
from pagedec.cli.screen import Screen
from tests.batch.tiny import make_tiny
from tests.terminal import CTRL_C, CTRL_D, ENTER, PAGEDEC, PASTE, PASTE_END, Terminal

COLUMNS = 60
LETTERS = "abcdefg   "
WITHOUT_READLINE = (
    "import sys; sys.modules['readline'] = None; from pagedec.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for answers of a minute."""
    made = make_tiny(tmp_path_factory.mktemp("tiny"))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100_000}))
    return made


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(model=str(tiny), load_format="dummy", num_blocks=256) as made:
        yield made


@pytest.fixture(scope="module")
def words(llm: LLM) -> SamplingParams:
    """Draws words of some letters."""
    letters = sorted(set(llm.get_tokenizer().encode(LETTERS)))
    space = llm.get_tokenizer().encode(" ")[0]
    return SamplingParams(seed=5, max_tokens=300, ignore_eos=True, allowed_token_ids=letters, logit_bias={space: 1.0})


def flags(tiny: Path, params: SamplingParams, **changes: Any) -> list[str]:
    given = {"--model": str(tiny), "--load-format": "dummy", "--num-blocks": "7000"}
    for name, value in (dataclasses.asdict(params) | changes).items():
        if value != getattr(SamplingParams(), name) and name != "ignore_eos":
            shown = json.dumps(value) if isinstance(value, dict) else value
            given[f"--{name.replace('_', '-')}"] = ",".join(map(str, shown)) if isinstance(shown, tuple) else str(shown)
    return [part for pair in given.items() for part in pair] + ["--ignore-eos"]


def answer(llm: LLM, prompt: str, params: SamplingParams) -> str:
    [output] = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].text


def check_wrapped(shown: str, text: str, columns: int) -> None:
    """The text as it was, but for line ends where the next word had no place."""
    assert len(shown) > columns and shown.replace("\n", " ").split() == text.split()
    assert all(len(line) <= columns for line in shown.split("\n"))


# ------------------------------------------------------------------------------------------------------------ generate
def test_the_only_answer_grows_on_the_screen(tiny: Path, llm: LLM, words: SamplingParams) -> None:
    with Terminal([*PAGEDEC, "generate", "x", *flags(tiny, words)], COLUMNS) as terminal:
        assert terminal.wait() == 0
        before, shown, ending = re.split(r"=== x\n|\n(?=--- )", terminal.shown)
    check_wrapped(shown, answer(llm, "x", words), COLUMNS)
    assert before == "" and ending.splitlines()[0] == "--- 300 tokens, length"
    assert "loaded in" in ending and "1 answer of 300 tokens" in ending and "%" not in ending


@pytest.mark.long
def test_it_grows_before_it_is_complete_and_ctrl_c_keeps_it(tiny: Path, llm: LLM, words: SamplingParams) -> None:
    with Terminal([*PAGEDEC, "generate", "x", *flags(tiny, words, max_tokens=90_000)], COLUMNS) as terminal:
        terminal.until("=== x\n")
        text = answer(llm, "x", words)
        for word in text.split()[:40]:
            terminal.until(word)
        terminal.send(CTRL_C)
        assert terminal.wait() == 130
        shown, ending = terminal.shown.removeprefix("=== x\n").split("\n--- ")
    lines = ending.splitlines()
    count = int(lines[0].removesuffix(" tokens, interrupted"))
    assert 90 < count < 90_000 and lines[-1] == "pagedec: interrupted"
    assert any(f"1 answer of {count} tokens in " in line for line in lines)
    shown = shown.replace("^C", "")
    assert shown.split()[:40] == text.split()[:40]
    assert len(shown.replace("\n", " ")) >= count - 2 * shown.count("\n") - 2, "all that came is shown"


@pytest.mark.long
def test_a_chat_of_one_turn_and_an_answer_of_several(tiny: Path, llm: LLM, words: SamplingParams) -> None:
    [output] = llm.chat([{"role": "user", "content": "Hi"}], words, use_tqdm=False)
    with Terminal([*PAGEDEC, "generate", "--chat", "Hi", *flags(tiny, words)], COLUMNS) as terminal:
        assert terminal.wait() == 0
        shown = re.split(r"=== Hi\n|\n--- ", terminal.shown)[1]
    check_wrapped(shown, output.outputs[0].text, COLUMNS)
    with Terminal([*PAGEDEC, "generate", "x", *flags(tiny, words, n=2)], COLUMNS) as terminal:
        assert terminal.wait() == 0
    [one] = llm.generate("x", words.clone(n=2), use_tqdm=False)
    parts = re.split(r"--- answer \d: 300 tokens, length\n|\npagedec: ", terminal.shown)
    check_wrapped(parts[1].removesuffix("\n"), one.outputs[0].text, COLUMNS)
    check_wrapped(parts[2], one.outputs[1].text, COLUMNS)
    assert "prompts: 100%" in parts[0], "they come at the end, after a bar"


@pytest.mark.long
def test_a_log_has_no_bar(tiny: Path, words: SamplingParams, tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        command = [*PAGEDEC, "generate", "x", "y", *flags(tiny, words, max_tokens=5)]
        with Terminal(command, COLUMNS, stderr=log.fileno()) as terminal:
            assert terminal.wait() == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 2 and all(line.startswith("pagedec: ") for line in lines)


@pytest.mark.long
def test_what_is_piped_is_as_it_was(tiny: Path, llm: LLM, words: SamplingParams, tmp_path: Path) -> None:
    with open(tmp_path / "out", "w") as out:
        command = [*PAGEDEC, "generate", "x", *flags(tiny, words)]
        with Terminal(command, COLUMNS, stdout=out.fileno()) as terminal:
            assert terminal.wait() == 0
    assert (tmp_path / "out").read_text() == f"=== x\n--- 300 tokens, length\n{answer(llm, 'x', words)}\n"
    assert "prompts: 100%" in terminal.shown


def test_an_interrupt_leaves_nothing_in_the_pool(
    llm: LLM, words: SamplingParams, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, pieces = Screen.write, []

    def interrupted(screen: Screen, text: str) -> None:
        write(screen, text)
        pieces.append(text)
        if len(pieces) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "write", interrupted)
    used = llm.engine.scheduler.pools["target"].num_available
    [output], is_interrupted = show_live(llm, "x", [], words)
    assert is_interrupted and not llm.engine.scheduler.requests
    assert llm.engine.scheduler.pools["target"].num_available == used
    expected = f"=== x\n{''.join(pieces)}\n--- {len(output.outputs[0].token_ids)} tokens, interrupted\n"
    assert capsys.readouterr().out == expected


@pytest.mark.long
def test_ctrl_c_keeps_the_answers_that_are_finished(
    tiny: Path, llm: LLM, words: SamplingParams, tmp_path: Path
) -> None:
    prompts = [f"prompt {i}" for i in range(6)]
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    one_by_one = ["--max-num-seqs", "1", "-f", str(tmp_path / "prompts.txt")]
    long = words.clone(max_tokens=400)
    with open(tmp_path / "out", "w") as out:
        command = [*PAGEDEC, "generate", *one_by_one, *flags(tiny, long)]
        with Terminal(command, 120, stdout=out.fileno()) as terminal:
            terminal.until("| 2/6 ")
            terminal.send(CTRL_C)
            assert terminal.wait() == 130
    count = int(re.findall(r"pagedec: interrupted: (\d) of 6 prompts answered\n$", terminal.shown)[0])
    assert 2 <= count < 6 and f"{count} answers of {400 * count} tokens in " in terminal.shown
    texts = [answer(llm, prompt, long) for prompt in prompts[:2]]
    expected = "".join(f"=== {p}\n--- 400 tokens, length\n{text}\n" for p, text in zip(prompts, texts, strict=False))
    shown = (tmp_path / "out").read_text()
    assert shown.startswith(expected) and shown.count("=== ") == count


def test_an_interrupted_call_has_what_is_finished(llm: LLM, words: SamplingParams) -> None:
    class Bar:
        """Presses Ctrl-C when the second prompt is answered."""

        num_done = 0

        def __init__(self, **_: object) -> None: ...

        def update(self) -> None:
            self.num_done += 1
            if self.num_done == 2:
                signal.raise_signal(signal.SIGINT)

        def set_postfix_str(self, text: str) -> None: ...

        def close(self) -> None: ...

    params = [words.clone(max_tokens=number) for number in (40, 3, 50, 5)]
    before = llm.engine.scheduler.pools["target"].num_available
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate(["a", "b", "c", "d"], params, use_tqdm=Bar)
    assert isinstance(caught.value, CallInterrupted)
    outputs = caught.value.outputs
    assert [output and output.prompt for output in outputs] == [None, "b", None, "d"]
    assert [outputs[1], outputs[3]] == [
        dataclasses.replace(llm.generate(p, own, use_tqdm=False)[0], request_id=o.request_id, metrics=o.metrics)
        for p, own, o in (("b", params[1], outputs[1]), ("d", params[3], outputs[3]))
    ]
    assert not llm.engine.scheduler.requests and llm.engine.scheduler.pools["target"].num_available == before


# ---------------------------------------------------------------------------------------------------------------- chat
def chat(tiny: Path, params: SamplingParams, *more: str) -> list[str]:
    return ["chat", "-v", *flags(tiny, params, max_tokens=5), *more]


def turn(terminal: Terminal) -> int:
    """Wait for an answer; how many tokens the prompt had that the user is behind."""
    shown = terminal.until(" tokens read, ")
    return int(shown.rpartition("pagedec: ")[2].split()[0])


AROUND = 3
"""Tokens of the tiny model's template around what a user says first; the rest are bytes."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", [PAGEDEC, (sys.executable, "-c", WITHOUT_READLINE)], ids=["readline", "plain"])
def test_a_paste_is_one_turn(command: tuple[str, ...], tiny: Path, words: SamplingParams) -> None:
    pasted = [
        "one\n  two\n\nthree",
        "/reset\nis the first line",
        "// a comment\nint x;",
        '"""A module."""\nimport os',
        "  indented\nby two",
    ]
    with Terminal([*command, *chat(tiny, words)]) as terminal:
        for text in pasted:
            terminal.until("> ")
            terminal.send(PASTE + text.replace("\n", "\r") + PASTE_END + ENTER)
            assert turn(terminal) == AROUND + len(text)
            terminal.until("> ")
            terminal.send("/undo" + ENTER)
            terminal.until(f'took back "{" ".join(text.split())}"; 0 turns left')
        terminal.until("> ")
        terminal.send(PASTE + "a\rb" + PASTE_END + "c" + ENTER)
        assert turn(terminal) == AROUND + len("a\nbc"), "and it can be gone on with"
        terminal.until("> ")
        terminal.send(CTRL_D)
        assert terminal.wait() == 0
    assert terminal.shown.rindex("\x1b[?2004l") > terminal.shown.rindex("\x1b[?2004h"), "the terminal is left as it was"


@pytest.mark.long
def test_pastes_and_quotes(tiny: Path, words: SamplingParams) -> None:
    cases = [
        (['"""', PASTE + "one\rtwo" + PASTE_END, '"""'], "one\ntwo"),
        (['"""' + PASTE + "one\rtwo" + PASTE_END + '"""'], "one\ntwo"),
        (['"""' + PASTE + "one\rtwo" + PASTE_END, "three", '"""'], "one\ntwo\nthree"),
        ([PASTE + "/undo" + PASTE_END + " is no command", "//undo is none"], "/undo is none"),
    ]
    with Terminal([*PAGEDEC, *chat(tiny, words)]) as terminal:
        for typed, text in cases:
            terminal.until("> ")
            for line in typed:
                terminal.send(line + ENTER)
            assert turn(terminal) == AROUND + len(text)
            terminal.until("> ")
            terminal.send("/reset" + ENTER)
            terminal.until("forgot 1 turn")
        assert "/undo is no command is no command; known are /reset" in terminal.shown


@pytest.mark.long
def test_a_dumb_terminal_gets_no_escapes(tiny: Path, words: SamplingParams) -> None:
    for command in (PAGEDEC, (sys.executable, "-c", WITHOUT_READLINE)):
        with Terminal([*command, *chat(tiny, words)], term="dumb") as terminal:
            terminal.until("> ")
            terminal.send("one" + ENTER)
            assert turn(terminal) == AROUND + 3
            terminal.until("> ")
            terminal.send(CTRL_D)
            assert terminal.wait() == 0 and "\x1b" not in terminal.shown


def test_a_conversation_on_the_screen(tiny: Path, llm: LLM, words: SamplingParams) -> None:
    [output] = llm.chat([{"role": "user", "content": "one"}], words, use_tqdm=False)
    with Terminal([*PAGEDEC, "chat", *flags(tiny, words)], COLUMNS) as terminal:
        terminal.until("> ")
        terminal.send("one" + ENTER)
        terminal.until("one\n")
        shown = terminal.until("\npagedec: cut at 300 tokens: max_tokens is 300\n")
        check_wrapped(re.sub("\x1b.*?[a-z]\r?", "", shown.split("\npagedec")[0]), output.outputs[0].text, COLUMNS)
        for command, told in (("/undo", 'took back "one"; 0 turns left'), ("/undo", "there is no turn to take back"),
                              ("/reset", "there is no turn to forget")):  # fmt: skip
            terminal.until("> ")
            terminal.send(command + ENTER)
            terminal.until(f"pagedec: {told}\n")
        terminal.send("/exit" + ENTER)
        assert terminal.wait() == 0


def test_ctrl_c_stops_an_answer_on_the_screen(tiny: Path, words: SamplingParams) -> None:
    with Terminal([*PAGEDEC, "chat", *flags(tiny, words, max_tokens=90_000)], COLUMNS) as terminal:
        terminal.until("> ")
        terminal.send("one" + ENTER)
        terminal.until("one\n")
        terminal.until(" ")
        terminal.send(CTRL_C)
        terminal.until("> ")
        terminal.send("/undo" + ENTER)
        terminal.until('took back "one"; 0 turns left')
        terminal.until("> ")
        time.sleep(0.5)  # one that comes just before readline waits for a key waits for one too
        terminal.send(CTRL_C)
        terminal.until("(Ctrl-D or /exit leaves)")
        terminal.until("> ")
        terminal.send("/exit" + ENTER)
        assert terminal.wait() == 0
