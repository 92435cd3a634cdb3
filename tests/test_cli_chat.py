"""`pagedec chat` with a real engine: what it shows, what it keeps, and what it can take back."""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.cli import main
from pagedec.cli.chat import Chat
from pagedec.cli.turns import read_turns
from pagedec.errors import InvalidArgument
from pagedec.formats.resolve import default_model_path
from pagedec.text.conversation import Conversation
from tests.batch.tiny import make_tiny

PARAMS = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
"""Greedily a random model repeats itself."""
BLOCK = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    made = LLM(model=str(tiny), load_format="dummy", num_blocks=128, block_size=BLOCK)
    yield made
    made.close()


@pytest.fixture
def written() -> list[str]:
    return []


@pytest.fixture
def chat(llm: LLM, written: list[str]) -> Chat:
    assert llm.tokenizer is not None
    return Chat(llm, Conversation(llm.tokenizer), PARAMS, written.append)


def flags(tiny: Path) -> list[str]:
    return ["chat", "--model", str(tiny), "--load-format", "dummy", "--num-blocks", "64", "--block-size", str(BLOCK)]


def script(monkeypatch: pytest.MonkeyPatch, *arguments: str, stdin: bytes) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    return main.main(list(arguments))


def said(chat: Chat) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in chat.conversation.messages]


# -------------------------------------------------------------------------------------------------------- conversations
def test_an_answer_is_written_in_pieces_and_kept(chat: Chat, llm: LLM, written: list[str]) -> None:
    chat.answer("Hello there")
    [expected] = llm.chat([{"role": "user", "content": "Hello there"}], PARAMS, use_tqdm=False)
    assert "".join(written) == expected.outputs[0].text
    assert len([piece for piece in written if piece]) > 5
    assert said(chat) == [("user", "Hello there"), ("assistant", expected.outputs[0].text)]
    assert chat.last is not None and chat.last.finished


def test_every_turn_finds_the_conversation_in_the_cache() -> None:
    """On the default model, because a random one writes special tokens, which a template cannot say again."""
    if default_model_path() is None:
        pytest.skip("the default model is not installed")
    with LLM(num_blocks=32, block_size=BLOCK) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        chat = Chat(llm, Conversation(llm.get_tokenizer()), params, lambda text: None)
        chat.answer("Name three animals.")
        for turn in ("And three plants?", "Thank you!"):
            assert chat.last is not None
            so_far = [*chat.last.prompt_token_ids, *chat.last.outputs[0].token_ids]
            chat.answer(turn)
            assert chat.last.prompt_token_ids[: len(so_far)] == so_far
            assert len(so_far) - BLOCK <= chat.last.num_cached_tokens <= len(so_far)


def test_undo_and_reset(chat: Chat) -> None:
    assert chat.undo() is None and chat.reset() == 0
    chat.answer("one")
    first = said(chat)
    chat.answer("two")
    chat.answer("three")
    assert chat.undo() == "three" and chat.undo() == "two"
    assert said(chat) == first
    chat.answer("two again")
    assert [content for role, content in said(chat) if role == "user"] == ["one", "two again"]
    assert chat.reset() == 2
    assert said(chat) == [] and not chat.undo()


def test_a_reset_keeps_the_system_prompt(llm: LLM, written: list[str]) -> None:
    assert llm.tokenizer is not None
    chat = Chat(llm, Conversation(llm.tokenizer, [{"role": "system", "content": "Be"}]), PARAMS, written.append)
    chat.answer("one")
    chat.reset()
    assert said(chat) == [("system", "Be")]


def test_regenerate_answers_the_same_turn_with_the_next_seed(llm: LLM, written: list[str]) -> None:
    assert llm.tokenizer is not None
    params = PARAMS.clone(seed=5)
    chat = Chat(llm, Conversation(llm.tokenizer), params, written.append)
    assert not chat.regenerate()
    chat.answer("one")
    answers = [said(chat)[1][1]]
    for _ in range(2):
        assert chat.regenerate()
        assert len(said(chat)) == 2
        answers.append(said(chat)[1][1])
    assert len(set(answers)) == 3
    prompt = [{"role": "user", "content": "one"}]
    for seed, answer in zip((5, 6, 7), answers, strict=True):
        [output] = llm.chat(prompt, params.clone(seed=seed), use_tqdm=False)
        assert output.outputs[0].text == answer


def test_an_interrupt_keeps_what_was_said(llm: LLM) -> None:
    assert llm.tokenizer is not None
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 6:
            raise KeyboardInterrupt

    chat = Chat(llm, Conversation(llm.tokenizer), PARAMS.clone(max_tokens=200), write)
    with pytest.raises(KeyboardInterrupt):
        chat.answer("A question whose answer is long")
    assert not llm.engine.scheduler.requests
    assert chat.last is not None and not chat.last.finished
    kept = len(chat.last.prompt_token_ids) + len(chat.last.outputs[0].token_ids)
    assert [role for role, _ in said(chat)] == ["user", "assistant"]
    assert said(chat)[1][1].startswith("".join(pieces))
    chat.write = pieces.append
    chat.answer("And then?")
    assert chat.last.num_cached_tokens >= kept - BLOCK
    assert chat.undo() and chat.undo() and said(chat) == []


def test_a_turn_that_is_refused_changes_nothing(chat: Chat, llm: LLM) -> None:
    chat.answer("one")
    before = said(chat)
    with pytest.raises(InvalidArgument, match="must be at most"):
        chat.answer("x" * 600)
    assert said(chat) == before
    chat.answer("two")
    assert len(said(chat)) == 4 and not llm.engine.scheduler.requests


def test_a_stop_text_is_not_part_of_what_was_said(llm: LLM, written: list[str]) -> None:
    assert llm.tokenizer is not None
    [free] = llm.chat([{"role": "user", "content": "one"}], PARAMS, use_tqdm=False)
    stop = next(letter for letter in free.outputs[0].text[3:] if letter.isascii())
    chat = Chat(llm, Conversation(llm.tokenizer), PARAMS.clone(stop=stop), written.append)
    chat.answer("one")
    assert said(chat)[1][1] == "".join(written) == free.outputs[0].text.split(stop)[0]


# ---------------------------------------------------------------------------------------------------------- the command
def test_a_script_prints_answers_and_nothing_else(
    tiny: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--seed", "3", "--max-tokens", "8", "--ignore-eos", "--system", "Be"]
    assert script(monkeypatch, *flags(tiny), *arguments, stdin="Hallo\n\n//ü\n".encode()) == 0
    out, err = capsys.readouterr()
    assert llm.tokenizer is not None
    conversation = Conversation(llm.tokenizer, [{"role": "system", "content": "Be"}])
    expected = ""
    for turn in ("Hallo", "/ü"):
        prompt = {"prompt_token_ids": conversation.ask(turn)}
        [output] = llm.generate(prompt, SamplingParams(seed=3, max_tokens=8, ignore_eos=True), use_tqdm=False)
        expected += conversation.answer(output.outputs[0].token_ids) + "\n"
    assert (out, err) == (expected, "pagedec: cut at 8 tokens: max_tokens is 8\n" * 2)


def test_a_script_has_commands(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*flags(tiny), "--temperature", "0", "--max-tokens", "8", "-v"]
    lines = b"one\n/undo\none\n/regenerate\n/reset\none\n/undo\n/undo\n/help\n/exit\nnever\n"
    assert script(monkeypatch, *arguments, stdin=lines) == 0
    out, err = capsys.readouterr()
    length = len(out) // 4
    assert out == out[:length] * 4, "four times the same answer to the same conversation"
    told = [line for line in err.splitlines() if "tokens read" in line]
    assert len(told) == 4 and all(" of them from the cache; 8 written, the first after " in line for line in told)
    told = [line.removeprefix("pagedec: ") for line in err.splitlines() if " tokens" not in line]
    undone = 'took back "one"; 0 turns left'
    assert told[:-1] == [undone, "forgot 1 turn", undone, "there is no turn to take back"]
    assert told[-1].startswith("commands: /reset /undo")


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], b"/what\n", "/what is no command; known are /reset /undo /regenerate /help /exit"),
        ([], b"x" * 600 + b"\n", "prompt is "),
        ([], b"\xff\n", "standard input is bytes: is not UTF-8"),
        (["--no-detokenize"], b"", "detokenize is false: must be true: a chat is text"),
        (["--n", "2"], b"", "n is 2: must be 1: a chat goes on with one answer"),
        (["--skip-tokenizer-init"], b"", "skip_tokenizer_init is true: must be false: a chat is text"),
        (["--chat-template", "none"], b"", "chat_template is none: cannot be read: No such file"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    stdin: bytes,
    message: str,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script(monkeypatch, *flags(tiny), *arguments, stdin=stdin) == main.USER_ERROR
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"pagedec: error: {message}") and len(err.splitlines()) == 1


def answers_of(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> list[str]:
    """What two runs of the same script answer, and what they answer again."""
    outs = []
    for _ in range(2):
        given = [*flags(tiny), "--max-tokens", "12", "--ignore-eos", *arguments]
        assert script(monkeypatch, *given, stdin=b"one\n/regenerate\n/reset\none\n") == 0
        outs.append(capsys.readouterr().out)
    return outs


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "same"),
    [([], False), (["--seed", "none"], False), (["--seed", "3"], True), (["--engine-seed", "0"], True),
     (["--config", "seeded.toml"], True)],
)  # fmt: skip
def test_no_two_chats_are_alike_without_a_seed(
    arguments: list[str],
    same: bool,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seeded.toml").write_text("seed = 0\n")
    first, second = answers_of(tiny, monkeypatch, capsys, *arguments)
    assert (first == second) == same


def test_every_answer_has_another_seed(llm: LLM, written: list[str]) -> None:
    assert llm.tokenizer is not None
    chat = Chat(llm, Conversation(llm.tokenizer), PARAMS.clone(seed=None), written.append, fresh_seeds=True)
    chat.answer("one")
    answers = [said(chat)[1][1]]
    assert chat.regenerate()
    answers.append(said(chat)[1][1])
    chat.reset()
    chat.answer("one")
    assert len({*answers, said(chat)[1][1]}) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "8"], "cut at 8 tokens: max_tokens is 8"),
        (["--max-model-len", "40"], "cut at 34 tokens: the context of 40 tokens is full; /undo and /reset make room"),
        (["--num-blocks", "3"], "cut at 26 tokens: the KV pool is full with 32; --kv-cache-memory and --num-blocks "
         "size it, /undo and /reset make room"),
        (["--stop-token-ids", "64", "--allowed-token-ids", "64"], None),
    ],
)  # fmt: skip
def test_an_answer_that_is_cut_says_why(
    arguments: list[str],
    message: str | None,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert script(monkeypatch, *flags(tiny), "--ignore-eos", *arguments, stdin=b"one\n") == 0
    assert capsys.readouterr().err == ("" if message is None else f"pagedec: {message}\n")


@pytest.mark.parametrize(
    ("typed", "turns"),
    [
        (b'"""one\n  two\r\n\nthree"""\nnext\n', ["one\n  two\n\nthree", "next"]),
        (b'"""\n/exit\n"""\n', ["//exit"]),
        (b'  """one"""\n""""""\ntwo', ["one", "two"]),
        (b'a """\nb\n"""c\nd', ['a """', "b", "c\nd"]),
    ],
)
def test_turns_of_several_lines(typed: bytes, turns: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
    assert list(read_turns(interactive=False)) == turns


def test_on_a_terminal_nothing_that_is_typed_ends_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [
        '"""a',
        KeyboardInterrupt(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        '"""b',
        'c"""',
    ]
    Terminal(monkeypatch, *typed)
    assert list(read_turns(interactive=True)) == ["b\nc"]
    out, err = capsys.readouterr()
    assert "(Ctrl-D or /exit leaves)" in out and err.endswith("is not UTF-8: invalid start byte\n")


def test_a_conversation_that_is_full_says_how_to_go_on(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Terminal(monkeypatch, "x" * 300, "x" * 300, "/undo", "x" * 300)
    assert main.main([*flags(tiny), "--temperature", "0", "--max-tokens", "4", "--ignore-eos"]) == 0
    faults = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(faults) == 1 and faults[0].endswith("one must be new; /undo and /reset make room")


def test_a_model_without_a_template_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = make_tiny(tmp_path)
    (bare / "tokenizer_config.json").write_text("{}")
    assert script(monkeypatch, *flags(bare), stdin=b"Hi\n") == main.USER_ERROR
    assert "chat_template is none: must be given: " in capsys.readouterr().err
    (tmp_path / "template").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    arguments = [*flags(bare), "--chat-template", str(tmp_path / "template"), "-v", "--max-tokens", "2"]
    assert script(monkeypatch, *arguments, stdin=b"Hi\n") == 0
    assert "pagedec: 4 tokens read, " in capsys.readouterr().err


class Terminal:
    """A terminal with somebody at it: `input()` gives what is typed, an exception for a key that is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *typed: str | BaseException) -> None:
        keys = iter(typed)

        def take(prompt: str) -> str:
            assert prompt in ("> ", "... ")
            key = next(keys, EOFError())
            if isinstance(key, BaseException):
                raise key
            return key

        monkeypatch.setattr(builtins, "input", take)
        for stream in (sys.stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)


def test_on_a_terminal_mistakes_and_ctrl_c_end_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show: Any = Chat._show
    answers = []

    def interrupted(chat: Chat, stream: Any, parts: Any) -> None:
        answers.append(1)
        if len(answers) == 2:
            chat.last = next(stream)
            raise KeyboardInterrupt
        show(chat, stream, parts)

    monkeypatch.setattr(Chat, "_show", interrupted)
    Terminal(monkeypatch, "one", "/what", "x" * 600, KeyboardInterrupt(), "two", "  ", "three")
    assert main.main([*flags(tiny), "--temperature", "0", "--max-tokens", "4", "--ignore-eos"]) == 0
    out, err = capsys.readouterr()
    assert len(answers) == 3 and "(Ctrl-D or /exit leaves)" in out and out.endswith("\n")
    told = [line.removeprefix("pagedec: ") for line in err.splitlines() if "cut at 4 tokens" not in line]
    assert told[1] == "/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves"
    assert told[2].startswith("error: /what is no command")
    assert told[3].startswith("error: prompt is ") and len(told) == 4
