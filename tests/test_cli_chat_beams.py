"""`pagedec chat` with beams, and what it says of an answer that was cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedec import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from pagedec.cli import main
from pagedec.cli.chat import Chat, why_cut
from pagedec.text.conversation import Conversation
from tests.batch.tiny import make_tiny
from tests.test_cli_chat import flags, said, script


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    made = LLM(model=str(tiny), load_format="dummy", num_blocks=128, block_size=16)
    yield made
    made.close()


def test_beams_are_shown_as_they_settle_and_the_best_is_kept(llm: LLM) -> None:
    assert llm.tokenizer is not None
    written: list[str] = []
    params = BeamSearchParams(beam_width=3, num_return_sequences=1, max_tokens=12, ignore_eos=True)
    chat = Chat(llm, Conversation(llm.tokenizer), params, written.append)
    chat.answer("Hello there")
    [expected] = llm.chat([{"role": "user", "content": "Hello there"}], params, use_tqdm=False)
    text = expected.outputs[0].text
    assert "".join(written) == text and said(chat) == [("user", "Hello there"), ("assistant", text)]
    assert chat.last is not None and why_cut(chat.last, params, 4096) == "cut at 12 tokens: max_tokens is 12"
    assert chat.regenerate() and said(chat) == [("user", "Hello there"), ("assistant", text)]


def test_beams_of_a_chat_by_flags(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        script(monkeypatch, *flags(tiny), "--beam-width", "3", "--max-tokens", "5", "--ignore-eos", stdin=b"a\n") == 0
    )
    assert "cut at 5 tokens: max_tokens is 5" in capsys.readouterr().err
    several = ("--beam-width", "3", "--num-return-sequences", "2")
    assert script(monkeypatch, *flags(tiny), *several, stdin=b"a\n") == main.USER_ERROR
    message = "pagedec: error: num_return_sequences is 2: must be 1: a chat goes on with one answer\n"
    assert capsys.readouterr().err == message


def test_an_answer_whose_time_is_over_says_so() -> None:
    params = SamplingParams(max_time=1.5)
    answer = CompletionOutput(0, "ab", [1, 2], finish_reason="length", limited_by="max_time")
    output = RequestOutput("0", "a", [1], [answer], True)
    assert why_cut(output, params, 4096) == "cut at 2 tokens: max_time is 1.5 seconds"
