"""What users of sessions do wrong, and what they are told."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedec import LLM, AsyncLLM, SamplingParams
from pagedec.errors import BranchBusy, InvalidArgument, SessionLimit
from pagedec.inputs import as_conversations
from pagedec.text.chat_template import check_messages, render_chat
from pagedec.text.conversation import Conversation
from tests.engine.crowd import Tiny

PROMPT = list(range(3, 40))
Cases = list[tuple[Callable[[], Any], str]]


def assert_told(cases: Cases) -> None:
    for act, message in cases:
        with pytest.raises(InvalidArgument) as caught:
            act()
        assert str(caught.value).startswith(message)


def test_a_prompt_s_mistakes(tiny: Tiny) -> None:
    llm: Any = tiny()
    session = llm.session(PROMPT, seed=3)
    assert_told([
        (lambda: llm.session(PROMPT, priority="low"), "priority is 'low': must be a whole number"),
        (lambda: llm.stream({"prompt_token_ids": PROMPT}, priority=[1]), "priority is [1]: must be a whole number"),
        (lambda: session.score([[5]], logprobs=None), "logprobs is None: must be a whole number from -1"),
        (lambda: session.append(5), "append is 5: must be text, a chat's next message, or token ids: whole"),
        (lambda: session.score([[5], 5]), "continuations[1] is 5: must be text, or token ids: whole numbers"),
        (lambda: session.rollback("0"), "rollback is '0': must be a whole number from 0 to 2147483647, or a mark"),
    ])  # fmt: skip
    assert session.token_ids == PROMPT


def test_of_several_calls_the_wrong_params_are_named(tiny: Tiny) -> None:
    llm: Any = tiny()
    session = llm.session(PROMPT, seed=3)
    both, good = [session, *session.fork(1)], SamplingParams(max_tokens=2, min_tokens=2)
    wrong = good.clone(stop_token_ids=[999])
    assert_told([
        (lambda: session.generate_all(both, [good, wrong]), "sampling_params[1].stop_token_ids is 999: "),
        (lambda: session.generate_all(both, [good, {"n": 1}]), "sampling_params[1] is {'n': 1}: must be a "),
        (lambda: session.generate_all(both, [good, good.clone(max_tokens=4)], min_tokens=3), "min_tokens is 3: "),
        (lambda: session.generate_all(both, [good, good], max_tokens=1), "sampling_params[0].min_tokens is 2: "),
        (lambda: session.generate_all(both, wrong), "stop_token_ids is 999: "),
        (lambda: session.generate_all(both, [good, good], stop_token_ids=[999]), "stop_token_ids is 999: "),
    ])  # fmt: skip
    assert session.token_ids == PROMPT


@pytest.mark.parametrize("odd", [np.array(3), np.array("x"), np.array(["x", "y"]), 3.5, np.array([[1.5]])], ids=repr)
def test_odd_arrays_are_named_as_all_that_is_wrong(tiny: Tiny, odd: Any) -> None:
    """One without a dimension can be iterated over by its type alone; one of texts equals none of them."""
    llm: Any = tiny()
    session = llm.session(PROMPT, seed=3)
    acts = {
        "messages": [lambda: check_messages(as_conversations(odd)[0][0]), lambda: check_messages(odd)],
        "on_error": [lambda: llm.generate([PROMPT], on_error=odd)],
        "prompt_token_ids": [lambda: llm.generate(prompt_token_ids=odd)],
        "keep": [lambda: session.generate(keep=odd, max_tokens=1), lambda: list(session.stream(keep=odd))],
        "continuations": [lambda: session.score(odd)],
        "branches": [
            lambda: session.tree(odd), lambda: session.blocks(odd), lambda: session.generate_all(odd),
            lambda: session.score_all(odd, [[[5]]]), lambda: session.tree([odd]), lambda: session.blocks([odd]),
        ],
    }  # fmt: skip
    for field, several in acts.items():
        for act in several:
            with pytest.raises(InvalidArgument, match=rf"^{field}(\[0\])?(\.role)? is .*(must|token ids)"):
                act()
    assert session.token_ids == PROMPT


@pytest.mark.parametrize("odd", [np.array(3), np.array(["x", "y"]), "yes", 1], ids=repr)
def test_odd_values_for_a_chat(odd: Any) -> None:
    tokenizer: Any = None
    for field in ("add_generation_prompt", "continue_final_message"):
        with pytest.raises(InvalidArgument, match=f"^{field} is .*must be true or false"):
            render_chat(tokenizer, [{"role": "user", "content": "Hi"}], **{field: odd})


def test_several_branches(tiny: Tiny) -> None:
    session: Any = tiny().session(PROMPT, seed=3)
    other = session.fork()
    assert_told([
        (lambda: session.generate_all(session), "branches is <Session 0: 37 tokens>: must be a list of branches"),
        (lambda: session.score_all(session, [[[5]]]), "branches is <Session 0: 37 tokens>: must be a list of branches"),
        (lambda: session.generate_all([session, other, session], max_tokens=2),
         "branches[2] is <Session 0: 37 tokens>: must be in the list once"),
        (lambda: session.score_all([session], 5), "continuations is 5: must hold a list for each of 1"),
        (lambda: session.score_all([session], []), "continuations is a list of 0: must hold a list for each of 1 b"),
        (lambda: session.score_all([session, other], [[[5]], "yes"]), "continuations[1] is 'yes': must be a list of"),
        (lambda: session.score_all([session, other], [[[5]], [[5], 7]]), "continuations[1][1] is 7: must be text, or"),
    ])  # fmt: skip
    stream = session.stream(max_tokens=3)
    next(stream)
    for act in (lambda: session.generate(max_tokens=2), lambda: session.score([[5]])):
        with pytest.raises(BranchBusy, match="branch 0 has a call that still runs: another call must wait until"):
            act()


def test_a_context_that_is_full(tiny: Tiny) -> None:
    """What is too long is said of what was brought, and how much room there is."""
    session = tiny(max_model_len=64).session(PROMPT, seed=3)
    assert_told([
        (lambda: session.append([5] * 28),
         "append is 28 tokens: must be at most 27 tokens long: the context holds 64, and 37 stand before it"),
        (lambda: session.score([[5], [5] * 28]), "continuations[1] is 28 tokens: must be at most 27 tokens long"),
    ])  # fmt: skip
    session.append([5] * 27)
    full = (
        "branch 0 is 64 tokens: must be at most 63 tokens long: the context holds 64, and one must be new; roll it back"
    )
    assert_told([(lambda: session.generate(max_tokens=1), full)])
    session.rollback(1)
    assert session.generate(max_tokens=4, ignore_eos=True).outputs[0].limited_by == "max_model_len"


def test_an_answer_of_any_length_counts_as_long_as_it_can_get(tiny: Tiny) -> None:
    """Where nothing is said, and where more is said than there is room for."""
    llm = tiny(max_model_len=64, max_session_tokens=60)
    session = llm.session(PROMPT, seed=3)
    for fields in ({}, {"max_tokens": 1000}):
        with pytest.raises(SessionLimit, match="max_session_tokens is 37 tokens, and 27 more: a session may hold 60"):
            session.generate(**fields)
    assert session.generate(max_tokens=23, ignore_eos=True).finished and session.num_tokens == 60
    enough = tiny(max_model_len=64, max_session_tokens=64).session(PROMPT, seed=3)
    assert enough.generate(max_tokens=1000, ignore_eos=True).finished and enough.num_tokens == 64


def test_a_branch_is_not_copied(tiny: Tiny) -> None:
    llm = tiny()
    session = llm.session([5], seed=3)
    assert repr(session) == "<Session 0: 1 token>"
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a branch of a session cannot be copied or pickled: fork it"):
            act(session)
    llm.close()
    assert session.closed and repr(session) == "<Session 0: its LLM was closed>"


def test_chats(text_llm: Any) -> None:
    def user(content: Any) -> dict[str, Any]:
        return {"role": "user", "content": content}

    answer = {"role": "assistant", "content": "Hello"}
    with text_llm.session(messages=[user("Hi")], seed=3) as chat:
        chat.generate(max_tokens=2)
        before = chat.token_ids
        assert_told([
            (lambda: text_llm.session(messages=[]), "messages is []: must have at least one message"),
            (lambda: text_llm.session(messages=user("Hi")), "messages is {'role'"),
            (lambda: text_llm.session(messages=[user("Hi"), user(5)]), "messages[1].content is 5: must be text"),
            (lambda: text_llm.session(messages=[user("Hi"), answer]),
             "messages[1].role is 'assistant': must be another's: the answer is generated; "),
            (lambda: chat.append(answer), "append.role is 'assistant': must be another's: the answer is generated"),
            (lambda: chat.append(user(5)), "append.content is 5: must be text"),
            (lambda: chat.append({"role": "user"}), "append.content is None: must be text"),
            (lambda: chat.append([user("Hi")]),
             "append is [{'role': 'user', 'content': 'Hi'}]: must be text, a chat's next message, or token ids"),
        ])  # fmt: skip
        assert chat.token_ids == before
        chat.append(user("And?"))
        assert chat.text.endswith("And?\nassistant\n")


WITHOUT_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
"""As Qwen3's: what begins an answer is not written before earlier ones."""
LAST_ALONE = "<|im_start|>{{ messages[-1].content }}:"
PARTED = r"^append is .*: the session did not begin with messages, was taken back .* written in another way since$"


@pytest.mark.parametrize(("template", "first", "second"), [
    (WITHOUT_THOUGHTS, "Say hello to all of us.", "Again?"), (LAST_ALONE, "A", "Much longer than that one was")
])  # fmt: skip
def test_a_chat_that_is_taken_back_into_what_its_template_has_written_anew(
    text_llm: LLM, template: str, first: str, second: str
) -> None:
    """An earlier prompt is not what the branch begins with any more, so its answer does not stand behind its length:
    it was taken from somewhere within."""
    with text_llm.session(messages=[{"role": "user", "content": first}], chat_template=template, seed=1) as chat:
        asked = chat.num_tokens
        chat.generate(temperature=0, max_tokens=12)
        chat.append({"role": "user", "content": second})
        whole, fork = chat.num_tokens, chat.fork()
        chat.generate(temperature=0, max_tokens=4)
        chat.rollback(2)
        assert chat.is_chat and chat.num_tokens == whole + 2
        chat.append({"role": "user", "content": "Third?"})  # its answer is known
        assert "Third?" in chat.text and chat.is_chat
        fork.rollback(whole - asked - 1)  # into the first prompt and its answer, as they were written the second time
        assert not fork.is_chat and fork.num_tokens == asked + 1
        with pytest.raises(InvalidArgument, match=PARTED):
            fork.append({"role": "user", "content": "Third?"})
        fork.append(" and")
        assert fork.generate(temperature=0, max_tokens=2).finished


def test_a_chat_whose_prompts_get_shorter(text_llm: LLM) -> None:
    """Turns stay whose prompt was longer than what is left, as long as the last one's is there."""
    long = {"role": "user", "content": "Much longer than the other one is"}
    with text_llm.session(messages=[long], chat_template=LAST_ALONE, seed=1) as chat:
        asked = chat.num_tokens
        chat.append({"role": "user", "content": "A"})
        mark = chat.mark()
        chat.generate(temperature=0, max_tokens=4, ignore_eos=True)
        chat.rollback(1)
        assert mark.num_tokens < chat.num_tokens < asked and chat.is_chat
        chat.rollback(mark)
        chat.append({"role": "user", "content": "B"})
        assert chat.text == "B:"
        chat.rollback(1)
        assert not chat.is_chat
    with text_llm.session(messages=[long], chat_template="{{ messages|length }}.") as chat:
        before = chat.token_ids
        with pytest.raises(
            InvalidArgument, match="^append is .*: cannot go on: the chat template begins all of the co"
        ):
            chat.append({"role": "user", "content": "A"})
        assert chat.token_ids == before and chat.is_chat


def test_a_chat_s_message_behind_what_was_taken_back_meanwhile(text_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes back with it that was taken back while it was rendered."""
    with text_llm.session(messages=[{"role": "user", "content": "Hi"}], seed=3) as chat:
        mark = chat.mark()
        chat.generate(max_tokens=2)
        chat.append({"role": "user", "content": "SECRET"})
        fork = Conversation.fork

        def meanwhile(self: Conversation) -> Conversation:
            monkeypatch.undo()
            chat.rollback(mark)
            return fork(self)

        monkeypatch.setattr(Conversation, "fork", meanwhile)
        with pytest.raises(BranchBusy):
            chat.append({"role": "user", "content": "And?"})
        assert "SECRET" not in chat.text and chat.num_tokens == mark.num_tokens
        chat.generate(max_tokens=2)
        chat.append({"role": "user", "content": "And?"})
        assert "SECRET" not in chat.text and "And?" in chat.text


def test_a_session_that_nobody_awaited(tiny_path: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=64)
        opening = llm.session(PROMPT)
        with pytest.raises(AttributeError, match=re.escape("must be awaited, or entered with `async with`, before")):
            opening.generate(max_tokens=2)
        session: Any = await opening
        with pytest.raises(InvalidArgument, match=re.escape("logprobs is None: must be a whole number")):
            await session.score([[5]], logprobs=None)
        llm.close()

    asyncio.run(main())
