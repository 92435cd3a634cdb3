"""`pagedec chat` with answers in parts, as gpt-oss': thoughts beside what the user is told."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from pagedec import LLM, SamplingParams, TokenTrie
from pagedec.cli import main
from pagedec.cli.chat import Chat
from pagedec.cli.screen import DIM, PLAIN, Screen
from pagedec.text.conversation import Conversation
from pagedec.text.harmony import MARKS
from tests.batch.tiny import CONFIG, make_tiny
from tests.test_cli_chat import Terminal, flags, said, script
from tests.text import templates
from tests.text.test_harmony import CALLING, ENDS, FINAL, HM, RESULT

BLOCK = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with gpt-oss' marks and template."""
    place = make_tiny(tmp_path_factory.mktemp("tiny"))
    inner = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    inner.add_special_tokens([*MARKS, "<|constrain|>", *ENDS])
    inner.save(str(place / "tokenizer.json"))
    ends = [inner.token_to_id(name) for name in ENDS]
    named = {"eos_token": ENDS[0], "chat_template": templates.HARMONY_CALLS}
    (place / "tokenizer_config.json").write_text(json.dumps(named))
    config = {**CONFIG, "vocab_size": inner.get_vocab_size(), "eos_token_id": ends}
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(model=str(tiny), load_format="dummy", num_blocks=128, block_size=BLOCK) as made:
        yield made


def saying(llm: LLM, answer: str, **fields: object) -> SamplingParams:
    """Parameters of which this is the answer."""
    trie = TokenTrie([llm.get_tokenizer().encode(answer)])
    return SamplingParams(token_trie=trie, max_tokens=len(answer), temperature=0).clone(**fields)


def answer(llm: LLM, chat: Chat, text: str, **fields: object) -> str:
    chat.params = saying(llm, text, **fields)
    chat.answer("Hi")
    return said(chat)[-1][1]


def test_thoughts_are_no_part_of_the_answer(llm: LLM) -> None:
    written, beside = list[str](), list[str]()
    chat = Chat(llm, Conversation(llm.get_tokenizer()), SamplingParams(), written.append, aside=beside.append)
    assert answer(llm, chat, HM + FINAL + "Yes, größer.<|return|>") == "Yes, größer." == "".join(written)
    assert "".join(beside) == "Hm." and len(written) > 5, "it comes in pieces"
    so_far = chat.conversation.prompt_ids[: len(llm.get_tokenizer().encode("<|start|>user<|message|>Hi<|end|>"))]
    assert answer(llm, chat, HM + CALLING + "<|call|>") == ""
    assert chat.last is not None and chat.last.prompt_token_ids[: len(so_far)] == so_far
    assert "".join(beside).endswith('functions.weather {"city":"Ulm",  "days": 2}')
    assert chat.conversation.messages[-1]["tool_calls"][0]["function"]["name"] == "weather"
    written.clear()
    chat.aside = None
    assert answer(llm, chat, HM + FINAL + "Yes.<|return|>") == "Yes." == "".join(written)


def test_a_session_goes_on_behind_a_call(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    with llm.session(messages=[{"role": "user", "content": "Hi"}]) as chat:
        prompt = chat.token_ids
        output = chat.generate(saying(llm, HM + CALLING + "<|call|>"))
        kept = [*prompt, *output.outputs[0].token_ids[: len(tokenizer.encode(HM))]]
        chat.append(RESULT)
        assert chat.token_ids[: len(kept) - 1] == kept[:-1], "up to what follows the thoughts"
        text = tokenizer.decode(chat.token_ids, skip_special_tokens=False)
        assert 'json<|message|>{"city": "Ulm", "days": 2}<|call|><|start|>functions.weather to=assistant' in text
        chat.generate(saying(llm, HM + FINAL + "Sun.<|return|>"))
        chat.append({"role": "user", "content": "And now?"})
        assert tokenizer.decode(chat.token_ids, skip_special_tokens=False).endswith(
            "final<|message|>Sun.<|end|><|start|>user<|message|>And now?<|end|><|start|>assistant"
        )


def test_a_stop_string_leaves_what_was_told(llm: LLM) -> None:
    """All of it, thoughts and the names of channels too, was taken for what was said."""
    for fields in ({}, {"skip_special_tokens": False}):
        written = list[str]()
        chat = Chat(llm, Conversation(llm.get_tokenizer()), SamplingParams(), written.append)
        assert answer(llm, chat, HM + FINAL + "one, two", stop=", t", **fields) == "one"
        assert "".join(written) == (HM + FINAL + "one" if fields else "one")
        assert answer(llm, chat, HM + FINAL + "Yes.<|return|>", **fields) == "Yes."
        assert chat.last is not None
        prompt = llm.get_tokenizer().decode(chat.last.prompt_token_ids, skip_special_tokens=False)
        assert f"assistant{FINAL}one<|end|>" in prompt and "Hm." not in prompt


def test_thoughts_are_dim_on_lines_of_their_own(llm: LLM) -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    chat = Chat(llm, Conversation(llm.get_tokenizer()), SamplingParams(), screen.write, aside=screen.aside)
    answer(llm, chat, HM + FINAL + "Yes.<|return|>")
    screen.end()
    assert stream.getvalue() == f"{DIM}Hm.{PLAIN}\nYes.\n"
    answer(llm, chat, HM)
    screen.end()
    assert stream.getvalue().endswith(f"Yes.\n{DIM}Hm.{PLAIN}\n") and not screen.begun


@pytest.mark.parametrize(("term", "is_shown"), [("xterm", True), ("dumb", False)])
def test_a_terminal_shows_thoughts_and_a_script_does_not(
    term: str,
    is_shown: bool,
    tiny: Path,
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    params = saying(llm, HM + FINAL + "Yes.<|return|>")
    monkeypatch.setattr(LLM, "get_default_sampling_params", lambda llm: params)
    assert script(monkeypatch, *flags(tiny), stdin=b"one\ntwo\n") == 0
    assert capsys.readouterr().out == "Yes.\nYes.\n"
    monkeypatch.setenv("TERM", term)
    Terminal(monkeypatch, "one")
    assert main.main(flags(tiny)) == 0
    out = capsys.readouterr().out
    assert "Yes.\n" in out and (f"{DIM}Hm.{PLAIN}\n" in out) == ("Hm." in out) == is_shown
