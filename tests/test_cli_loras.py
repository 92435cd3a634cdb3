"""--lora of generate and chat: the adapter of all prompts, with its mistakes."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, LoRARequest, SamplingParams
from pagedec.cli import main
from pagedec.cli.adapter_flags import given_lora, given_loras
from tests.batch.tiny import make_lora, make_tiny

ENGINE = ["--load-format", "dummy", "--num-blocks", "64"]
GREEDY = ["--temperature", "0", "--max-tokens", "8"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lora(tmp_path_factory.mktemp("adapters") / "verse", 24)


def answers(tiny: Path, lora: Path | None) -> tuple[str, str]:
    """To a prompt, and to a chat."""
    request = None if lora is None else LoRARequest("verse", 1, str(lora))
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(tiny), load_format="dummy", num_blocks=64, enable_lora=True, max_lora_rank=24) as llm:
        [plain] = llm.generate("Hello", params, use_tqdm=False, lora_request=request)
        [chat] = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False, lora_request=request)
    return plain.outputs[0].text, chat.outputs[0].text


@pytest.mark.parametrize("named", ["{}", "mine={}", "{}/"])
def test_generate(named: str, tiny: Path, lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answers(tiny, lora) != answers(tiny, None)
    flags = ["--model", str(tiny), *ENGINE, *GREEDY, "--json", "--max-lora-rank", "24"]
    given = named.format(lora)
    for i, chat in enumerate(([], ["--chat"])):
        assert main.main(["generate", "Hello", *chat, *flags, "--lora", given]) == 0
        record: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert record["outputs"][0]["text"] == answers(tiny, lora)[i] and "lora_request" not in record["outputs"][0]
        assert record["lora_request"] == {
            "lora_name": "mine" if "=" in named else "verse", "lora_int_id": 1, "lora_path": given.removeprefix("mine=")
        }  # fmt: skip
    assert main.main(["generate", "Hello", *flags]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["outputs"][0]["text"] == answers(tiny, None)[0] and record["lora_request"] is None


def test_chat(tiny: Path, lora: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    flags = ["--model", str(tiny), *ENGINE, *GREEDY, "--max-lora-rank", "24"]
    assert main.main(["chat", *flags, "--lora", str(lora)]) == 0
    assert capsys.readouterr().out == answers(tiny, lora)[1] + "\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora", ""], "lora is empty: must be the path of a directory that PEFT has written, or a .gguf file"),
        (["--lora", "a="], "lora is a=: must be the path of"),
        (["--lora", "/no/such=place"], "/no/such=place: does not exist"),
        (
            ["--lora", "a=p", "--lora", "b=q"],
            "lora is b=q: must be one, and a=p is given; `pagedec batch` takes several",
        ),
        (["--lora", "HERE"], "max_lora_rank is 16: must be at least 24, the rank of the adapter at"),
        (["--lora", "HERE", "--no-enable-lora"], "must not be given with --no-enable-lora"),
    ],
)
def test_mistakes(
    command: str, flags: list[str], message: str, tiny: Path, lora: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    prompt = ["Hello"] if command == "generate" else []
    given = [str(lora) if flag == "HERE" else flag for flag in flags]
    assert main.main([command, *prompt, "--model", str(tiny), *ENGINE, *given]) == main.USER_ERROR
    [told] = capsys.readouterr().err.splitlines()
    assert told.startswith("pagedec: error: ") and message in told


def test_it_wins_over_a_file(tiny: Path, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "engine.toml").write_text(f'model = "{tiny}"\nenable_lora = false\nmax_lora_rank = 24\n')
    flags = ["--config", str(tmp_path / "engine.toml"), *ENGINE, *GREEDY, "--json"]
    assert main.main(["generate", "Hello", *flags, "--lora", str(lora)]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["text"] == answers(tiny, lora)[0]


@pytest.mark.parametrize("command", ["generate x", "chat", "batch -i {tmp}/in -o {tmp}/out", "serve"])
def test_a_file_has_none(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it has no flag that one command alone has, or that commands take in different ways."""
    (tmp_path / "engine.toml").write_text('max_loras = 2\nlora = ["verse=/srv/verse"]\n')
    given = command.format(tmp=tmp_path).split()
    assert main.main([*given, "--config", str(tmp_path / "engine.toml")]) == main.USER_ERROR
    [told] = capsys.readouterr().err.splitlines()
    assert told.endswith(f"engine.toml; it is a flag of pagedec {given[0]}: --lora")


def test_names_may_have_slashes_where_they_must_be_given() -> None:
    """As a server's may; where a name need not be given, what has one is a path."""
    given = ["org/red=/srv/red=1", "blue=blue"]
    assert given_loras(argparse.Namespace(lora=given)) == {"org/red": "/srv/red=1", "blue": "blue"}
    assert given_lora(argparse.Namespace(lora=given[:1])) == LoRARequest("red=1", 1, "org/red=/srv/red=1")
