"""`LLM.chat` and conversations: the prompts of the template, and tokens that the prefix cache finds again."""

from __future__ import annotations

from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.errors import InvalidArgument

GREEDY = SamplingParams(temperature=0, max_tokens=8)
HI = {"role": "user", "content": "Say yes."}
SYSTEM = {"role": "system", "content": "Be brief."}
BEGUN = {"role": "assistant", "content": "Yes, I"}


def test_a_chat_is_its_rendered_prompt(text_llm: LLM) -> None:
    tokenizer = text_llm.get_tokenizer()
    conversations = [[HI], [SYSTEM, HI], [{"role": "user", "content": [{"type": "text", "text": "Say yes."}]}]]
    outputs = text_llm.chat(conversations, GREEDY, use_tqdm=False)
    rendered = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in conversations]
    assert [output.prompt for output in outputs] == rendered and rendered[0] == rendered[2]
    again = text_llm.generate(rendered, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [output.prompt_token_ids for output in again]
    assert [output.outputs for output in outputs] == [output.outputs for output in again]
    [alone] = text_llm.chat([HI], GREEDY, use_tqdm=False)
    assert alone.outputs == outputs[0].outputs


def test_an_answer_can_be_continued(text_llm: LLM) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True, "use_tqdm": False}
    [output] = text_llm.chat([HI, BEGUN], GREEDY, **options)
    assert output.prompt is not None and output.prompt.endswith("<|im_start|>assistant\nYes, I")
    assert output.outputs[0].text.startswith(" ")


def test_templates_tools_and_variables_reach_the_prompt(text_llm: LLM) -> None:
    template = "{{ messages[0].content }}|{{ tools | length if tools else 0 }}|{{ word }}"
    options = {"chat_template": template, "tools": [{"type": "function"}], "chat_template_kwargs": {"word": "w"}}
    [output] = text_llm.chat([HI], GREEDY, use_tqdm=False, **options)
    assert output.prompt == "Say yes.|1|w"


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ("Hi", {}, "messages"), (HI, {}, "messages"), ([], {}, "messages"), ([HI, "a"], {}, "messages[1]"),
        ([[HI], []], {}, "messages[1]"), ([[HI], [SYSTEM, {"role": 1}]], {}, "messages[1][1].role"),
        ([HI, {"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[1].content[0]"),
        ([[HI], [HI]], {"chat_template": "{{ raise_exception('no') }}"}, "messages[0][0]"),
        ([HI], {"chat_template": "{% if"}, "chat_template"),
        ([HI], {"continue_final_message": True}, "continue_final_message"),
        ([HI], {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ([HI], {"priority": [1, 2]}, "priority"),
        ([HI], {"sampling_params": [GREEDY] * 2}, "sampling_params"),
    ],
)  # fmt: skip
def test_wrong_chats(text_llm: LLM, messages: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        text_llm.chat(messages, use_tqdm=False, **options)
    assert caught.value.field == field
    assert text_llm.engine.scheduler.requests == []


def test_a_conversation_is_found_in_the_prefix_cache(text_llm: LLM) -> None:
    """Turn after turn, all full blocks of what was said before are cached; the answer is the one without a cache."""
    size, said = text_llm.config.cache.block_size, 0
    chat = text_llm.conversation([{"role": "system", "content": "This conversation has a beginning of its own."}])
    for question in ("Say yes.", "Say no.", "Say what you said."):
        token_ids = chat.ask(question)
        [output] = text_llm.generate([token_ids], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
        assert output.num_cached_tokens >= said // size * size
        fresh = {"prompt_token_ids": token_ids, "cache_salt": question}
        [other] = text_llm.generate([fresh], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
        assert other.num_cached_tokens == 0 and other.outputs == output.outputs
        said = len(token_ids) + len(output.outputs[0].token_ids) - 1  # the last token has no KV yet
        assert chat.answer(output.outputs[0].token_ids) == output.outputs[0].text
    assert said > 3 * size
