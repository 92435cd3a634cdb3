"""`pagedec tokenize`: what it reads, what it shows; no weights and no torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedec.cli import main
from pagedec.formats.resolve import default_model_path
from pagedec.text.tokenizer import Tokenizer
from tests.batch.tiny import make_tiny

SOURCES = Path(__file__).resolve().parent.parent
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tiny(tmp_path_factory.mktemp("tiny"))
    assert not list(directory.glob("*.safetensors"))
    return directory


@pytest.fixture
def shown(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command on the tiny tokenizer; return what it prints."""

    def run(*arguments: str, stdin: bytes = b"") -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        assert main.main(["tokenize", "--model", str(tiny), *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_ids_and_back(shown: Any, tiny: Path) -> None:
    text = "naïve 😀\n x"
    ids = Tokenizer.from_path(tiny).encode(text)
    assert shown(text) == ",".join(map(str, ids)) + "\n"
    for spelled in (shown(text), str(ids), " ".join(map(str, ids)), "\n".join(map(str, ids))):
        assert shown("--decode", spelled) == text + "\n"


def test_several_texts_from_several_places(shown: Any, tmp_path: Path) -> None:
    file = tmp_path / "book"
    file.write_bytes(b"\xef\xbb\xbfab\r\n\ncde\n")
    assert shown("--count", "a", "abc") == "1\n3\n"
    assert shown("--count", "-f", str(file)) == "9\n"
    assert shown("--count", "--lines", "-f", str(file)) == "2\n0\n3\n"
    assert shown("--count", stdin=b"one text\n") == "9\n"
    assert shown("--count", "x", "-", "-f", str(file), stdin=b"four") == "1\n4\n9\n"


def test_pieces_are_text_or_bytes(shown: Any) -> None:
    lines = shown("--pieces", "aé").splitlines()
    assert [json.loads(line.split(maxsplit=1)[1]) for line in lines] == ["a", [0xC3], [0xA9]]
    record = json.loads(shown("--json", "--pieces", "aé"))
    assert (record["text"], record["count"], record["pieces"]) == ("aé", 3, ["a", [0xC3], [0xA9]])
    assert [int(line.split()[0]) for line in lines] == record["token_ids"]
    assert "pieces" not in json.loads(shown("--json", "a"))


def test_special_tokens_can_be_left_out(shown: Any) -> None:
    ids = shown("a<|end|>b").strip()
    assert shown("--decode", ids) == "a<|end|>b\n"
    assert shown("--decode", "--no-special-tokens", ids) == "ab\n"


def test_the_chat_template(shown: Any) -> None:
    record = json.loads(shown("--chat", "--json", json.dumps(HELLO)))
    assert record["text"] == "<|user|>Hi<|end|><|assistant|>"
    assert record["count"] == 5
    assert shown("--decode", str(record["token_ids"])) == record["text"] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode", "1,x"], "token_ids is 1,x: must be a sequence of token ids"),
        (["--decode", "3,9999"], "token_ids is 9999: must be less than 261, the size of the vocabulary"),
        (["--decode", "--chat", "x"], "argument --chat: not allowed with argument --decode"),
        (["--chat", "{"], "messages is '{': is not JSON"),
        (["--chat", "[" + "9" * 5000 + "]"], "messages is '[9"),
        (["--chat", "{}"], "messages is '{}': must be a list such as"),
        (["--chat", '[{"role": "user"}]'], "messages[0].content is none: must be text"),
        (["-f", "none"], "file is none: cannot be read: No such file or directory"),
        (["a", "--model", ""], "model is empty: must be a text that is not empty"),
        (["a", "--model", "~nobody-here/m"], "model is '~nobody-here/m': must be a path, a hub id or"),
        (["a", "--model", "m" * 5000], "model is mmmmm"),
        (["a", "--model", "o/m", "--download-dir", "~nobody-here"], "download_dir is '~nobody-here': must be a"),
        (["a", "--model", "none.gguf"], "model is none.gguf: does not exist"),
        (["a", "--tokenizer", "none.json"], "tokenizer is none.json: tokenizer.json: does not exist; "),
        (["--count", "--pieces", "a"], "argument --pieces: not allowed with argument --count"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["tokenize", "--model", str(tiny), *arguments]) == main.USER_ERROR
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"pagedec: error: {message}") and len(err.splitlines()) == 1


def test_a_file_that_is_not_text(shown: Any, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    assert main.main(["tokenize", "--model", str(tiny), "-f", str(tmp_path / "bytes")]) == main.USER_ERROR
    assert "is not UTF-8: invalid start byte at byte 2" in capsys.readouterr().err


def test_arguments_are_utf_8_in_any_locale(shown: Any, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python keeps bytes that its locale has no character for as halves of surrogate pairs, which are no text."""
    assert shown("na\udcc3\udcafve") == shown("naïve")
    for command in (["tokenize", "--model", str(tiny)], ["generate"]):
        assert main.main([*command, "caf\udce9"]) == 2
        assert capsys.readouterr().err.endswith(
            r"is 'caf\udce9': is not UTF-8: unexpected end of data at byte 3" + "\n"
        )


def test_the_tokenizer_from_a_file_of_engine_arguments(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "engine.toml"
    config.write_text(f'model = "none"\ntokenizer = "{tiny}"\nblock_size = 32\n')
    assert main.main(["tokenize", "--config", str(config), "--count", "abc"]) == 0
    assert capsys.readouterr().out == "3\n"


def test_the_default_model_without_torch() -> None:
    if default_model_path() is None:
        pytest.skip("the default model is not installed")
    program = (
        "import sys\nfrom pagedec.cli.main import main\n"
        "status = main(['tokenize', 'The capital of France is'])\n"
        "sys.exit(1 if 'torch' in sys.modules else status)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=SOURCES, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "504,3575,282,4649,314\n"), done.stderr
