"""OpenAI's bodies as prompts and sampling parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagedec.batch.bodies import CHAT_FIELDS, COMPLETION_FIELDS, parse_body
from pagedec.errors import FeatureNotAvailable, InvalidArgument
from pagedec.fields import rules
from pagedec.params import BeamSearchParams, SamplingParams
from pagedec.structured import StructuredOutputsParams

HELLO = [{"role": "user", "content": "Hello"}]


def completion(defaults: dict[str, Any] | None = None, **body: Any) -> Any:
    return parse_body(False, {"prompt": "x"} | body, defaults or {})


def chat(defaults: dict[str, Any] | None = None, **body: Any) -> Any:
    return parse_body(True, {"messages": HELLO} | body, defaults or {})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_the_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [None, [], 3, {}, [1, "a"], [[1], "a"], [[]], [True], [1.0], [[1], []], ["a", None]])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(InvalidArgument, match="^prompt is .*: must be text, token ids, or a list of"):
        completion(prompt=prompt)


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ({}, {}),
        ({"max_tokens": 7, "temperature": 0}, {"max_tokens": 7, "temperature": 0}),
        ({"max_tokens": None, "stop": None, "n": None}, {}),
        ({"stop": "\n"}, {"stop": ["\n"]}),
        ({"stop": ["a", "b"], "n": 3, "seed": 5, "top_p": 0.5}, {"stop": ["a", "b"], "n": 3, "seed": 5, "top_p": 0.5}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"logit_bias": {"17": -100, "3": 2}}, {"logit_bias": {17: -100, 3: 2}}),
        ({"presence_penalty": 1, "frequency_penalty": -0.5}, {"presence_penalty": 1, "frequency_penalty": -0.5}),
        ({"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True},
         {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}),
        ({"stream": False, "response_format": {"type": "text"}, "user": "me", "metadata": {"a": 1}}, {}),
    ],
    ids=repr,
)  # fmt: skip
def test_both_endpoints_take_sampling_parameters(body: dict[str, Any], values: dict[str, Any]) -> None:
    assert completion(**body).params == chat(**body).params == SamplingParams(**values)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json": SCHEMA}),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}},
         {"regex": "a+", "disable_any_whitespace": True}),
        ({"structured_outputs": {"choice": ["a", "b"]}, "response_format": {"type": "text"}}, {"choice": ["a", "b"]}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
    ],
    ids=repr,
)  # fmt: skip
def test_what_an_answer_may_be(body: dict[str, Any], values: dict[str, Any]) -> None:
    asked = StructuredOutputsParams(**values)
    assert completion(**body).params.structured_outputs == chat(**body).params.structured_outputs == asked


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"response_format": "json"},
            "response_format is 'json': must be an object whose type is one of text, json_ob",
        ),
        ({"response_format": {"type": "xml"}}, "response_format is .*: must be an object whose type is one of"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is None: must be an object with a"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice is .*: must not be given beside guided_regex"),
        ({"guided_regex": ""}, "structured_outputs.regex is '': must be a text that is not empty"),
        (
            {"structured_outputs": {"regx": "a"}},
            "structured_outputs.regx is 'a': not a field of StructuredOutputsParams",
        ),
    ],
)
def test_what_no_answer_can_be(body: dict[str, Any], message: str) -> None:
    for parse in (completion, chat):
        with pytest.raises(InvalidArgument, match=f"^{message}"):
            parse(**body)


def test_logprobs_are_a_number_in_one_and_a_flag_in_the_other() -> None:
    assert [completion(logprobs=value).params.logprobs for value in (None, 0, 5)] == [None, 0, 5]
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3
    assert chat({"logprobs": 2}).params.logprobs == completion({"logprobs": 2}).params.logprobs == 2
    assert chat({"logprobs": 2}, logprobs=False).params.logprobs is None


def test_bodies_win_over_defaults() -> None:
    defaults = {"temperature": 0.5, "max_tokens": 4, "stop": ["x"]}
    assert completion(defaults, max_tokens=9).params == SamplingParams(temperature=0.5, max_tokens=9, stop=["x"])
    assert chat(defaults, max_completion_tokens=9).params.max_tokens == 9
    assert chat(defaults, max_completion_tokens=None).params.max_tokens == 4


def test_order_salt_and_variables_of_the_template() -> None:
    ask = completion(priority=-3, cache_salt="ours")
    assert (ask.priority, ask.cache_salt) == (-3, "ours")
    ask = chat(chat_template_kwargs={"enable_thinking": False})
    assert (ask.priority, ask.cache_salt) == (0, "")
    assert ask.chat_options == {"chat_template_kwargs": {"enable_thinking": False}}


def test_chats() -> None:
    ask = chat(add_generation_prompt=False, continue_final_message=True, model="m")
    assert (ask.messages, ask.prompts, ask.model) == (HELLO, (), "m")
    assert ask.chat_options == {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize(
    ("is_chat", "body", "message"),
    [
        (False, {"top_n": 3}, "top_n is 3: not a field of a completion; known are model, prompt, n,"),
        (False, {"messages": HELLO}, "messages is .*: not a field of a completion"),
        (True, {"prompt": "a"}, "prompt is 'a': not a field of a chat completion"),
        (True, {"nothing": None}, "nothing is None: not a field of a chat completion"),
        (False, {"max_completion_tokens": 3}, "max_completion_tokens is 3: not a field of a completion"),
        (True, {"max_completion_tokens": 3, "max_tokens": 3},
        "max_completion_tokens is 3: give either this or max_tokens"),
        (True, {"max_completion_tokens": 0}, "max_tokens is 0: must be a whole number from 1"),
        (False, {"max_tokens": "7"}, "max_tokens is '7': must be a whole number from 1"),
        (False, {"temperature": -1}, "temperature is -1: must be 0, or a finite number"),
        (False, {"n": True}, "n is True: must be a whole number from 1"),
        (False, {"seed": -(2**63) - 1}, "seed is -9223372036854775809: must be a whole number from 0"),
        (False, {"stop": 3}, "stop is 3: must be "),
        (False, {"logit_bias": {"a": 1}}, "logit_bias is {'a': 1}: must be "),
        (False, {"logprobs": True}, "logprobs is True: must be a whole number from 0 to 20"),
        (False, {"logprobs": 21}, "logprobs is 21: must be a whole number from 0 to 20"),
        (True, {"logprobs": 1}, "logprobs is 1: must be true or false"),
        (True, {"top_logprobs": 2}, "top_logprobs is 2: logprobs must be true with it"),
        (True, {"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21: must be a whole number from 0 to 20"),
        (False, {"model": 3}, "model is 3: must be a text"),
        (True, {"messages": []}, r"messages is \[\]: must have at least one message"),
        (True, {"messages": "Hi"}, "messages is 'Hi': must be a list of messages"),
        (True, {"messages": ["Hi"]}, r"messages\[0\] is 'Hi': must be a message"),
        (True, {"messages": [*HELLO, {"content": "a"}]}, r"messages\[1\].role is None: must be a text"),
        (True, {"chat_template_kwargs": [1]}, r"chat_template_kwargs is \[1\]: must be an object"),
        (False, {"priority": "high"}, "priority is 'high': must be a whole number"),
        (False, {"cache_salt": 3}, "cache_salt is 3: must be a text"),
        (True, {"continue_final_message": 1}, "continue_final_message is 1: must be true or false"),
        (False, {"min_tokens": 5, "max_tokens": 3}, "min_tokens is 5: must be at most max_tokens, which is 3"),
    ],
)  # fmt: skip
def test_mistakes_name_field_value_and_limit(is_chat: bool, body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        (chat if is_chat else completion)(**body)


@pytest.mark.parametrize(
    ("is_chat", "body"),
    [
        *[(kind, {"stream": True}) for kind in (False, True)],
        *[(False, body) for body in ({"echo": True}, {"best_of": 2}, {"suffix": "end"}, {"prompt_logprobs": 1})],
        *[(True, body) for body in ({"tools": [{}]}, {"tool_choice": "required"}, {"modalities": ["audio"]})],
    ],
    ids=repr,
)
def test_what_a_batch_cannot_do_is_refused_by_name(is_chat: bool, body: dict[str, Any]) -> None:
    [(name, value)] = body.items()
    with pytest.raises(FeatureNotAvailable, match=f"^{name} is .*: not available in a batch") as caught:
        (chat if is_chat else completion)(**body)
    assert (caught.value.field, caught.value.value) == (name, value)


def test_the_best_of_as_many_as_are_returned_are_all() -> None:
    assert completion(n=2, best_of=2).params == completion(n=2).params
    with pytest.raises(FeatureNotAvailable, match="^best_of is 3: not available in a batch, only 1 or 2$"):
        completion(n=2, best_of=3)
    with pytest.raises(FeatureNotAvailable, match="^best_of is 3: not available in a batch, only 1$"):
        completion(n=1, best_of=3)


def test_the_effort_of_thinking_is_a_variable_of_the_template() -> None:
    with pytest.raises(FeatureNotAvailable, match="a batch; a template that .* told by chat_template_kwargs$"):
        chat(reasoning_effort="low")
    options = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert chat(**options).chat_options == options


def test_every_sampling_parameter_has_a_field() -> None:
    for fields in (COMPLETION_FIELDS, CHAT_FIELDS):
        assert set(rules(SamplingParams)) | set(rules(BeamSearchParams)) <= set(fields)
        assert len(fields) == len(set(fields))


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ({"use_beam_search": True, "n": 4, "length_penalty": 0.5}, {"beam_width": 4, "length_penalty": 0.5}),
        ({"use_beam_search": True}, {"beam_width": 1}),
        ({"beam_width": 6}, {"beam_width": 6}),
        ({"beam_width": 6, "n": 2}, {"beam_width": 6, "num_return_sequences": 2}),
        ({"use_beam_search": True, "beam_width": 6, "n": 2, "num_return_sequences": 3, "early_stopping": "never"},
         {"beam_width": 6, "num_return_sequences": 3, "early_stopping": "never"}),
        ({"beam_width": 6, "num_beam_groups": 3, "diversity_penalty": 0.5, "seed": -1, "stop": "x", "max_time": 3},
         {"beam_width": 6, "num_beam_groups": 3, "diversity_penalty": 0.5, "seed": 2**64 - 1, "stop": ["x"],
          "max_time": 3}),
        ({"beam_width": 2, "do_sample": True, "top_k": 9},
         {"beam_width": 2, "do_sample": True, "top_k": 9, "temperature": 0.7}),
        ({"beam_width": 2, "temperature": 1}, {"beam_width": 2, "temperature": 1}),
    ],
    ids=repr,
)  # fmt: skip
def test_beams(body: dict[str, Any], values: dict[str, Any]) -> None:
    defaults = {name: getattr(SamplingParams(), name) for name in rules(SamplingParams)}
    defaults |= {"temperature": 0.7, "max_tokens": 5, "n": 3}
    assert completion(defaults, **body).params == BeamSearchParams(max_tokens=5, **values)
    assert chat(defaults, max_completion_tokens=5, **body).params == BeamSearchParams(max_tokens=5, **values)
    assert completion(use_beam_search=False, length_penalty=1, early_stopping=False).params == SamplingParams()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"use_beam_search": 1}, "use_beam_search is 1: must be true or false"),
        ({"use_beam_search": False, "beam_width": 4}, "use_beam_search is False: must be true where beam_width"),
        ({"length_penalty": 2}, "length_penalty is 2: must be given with beam_width, or with use_beam_search true"),
        ({"early_stopping": "maybe"}, "early_stopping is 'maybe': must be true, false or"),
        ({"beam_width": 4, "max_tokens": None}, "max_tokens is None: must be given"),
        ({"beam_width": 4, "n": 5, "max_tokens": 3}, "num_return_sequences is 5: must be at most beam_width, 4"),
        ({"beam_width": 4, "num_beam_groups": 3, "max_tokens": 3}, "num_beam_groups is 3: must divide beam_width"),
        (
            {"beam_width": 4, "temperature": -1, "max_tokens": 3},
            "temperature is -1: must be 0, or a finite number at least",
        ),
        ({"use_beam_search": True, "n": 0, "max_tokens": 3}, "beam_width is 0: must be a whole number from 1"),
    ],
    ids=repr,
)
def test_beams_that_cannot_be(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        completion(**body)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [120, 900, 5000])
def test_a_body_nested_without_end_is_a_fault_of_the_body(depth: int) -> None:
    """Not a `RecursionError`, which would end the job at this line, and again whenever it goes on."""
    deep = nested(depth)
    message = {"role": "user", "content": "a"}
    call = {"function": {"name": "f", "arguments": "[" * depth + "]" * depth}}
    for body in (
        {"messages": [message | {"x": deep}]}, {"messages": [message | {"content": deep}]}, {"messages": deep},
        {"messages": [message | {"tool_calls": [deep]}]}, {"messages": [message | {"tool_calls": [call]}]},
        {"messages": [message | {"tool_calls": [{"function": {"arguments": "9" * 5000}}]}]},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument) as caught:
            parse_body(True, body, {})
        assert caught.value.field.startswith("messages") and str(caught.value)
    for body in ({"guided_json": deep}, {"response_format": {"type": "json_schema", "json_schema": {"schema": deep}}}):
        with pytest.raises(InvalidArgument):
            parse_body(False, {"prompt": "a"} | body, {})
    with pytest.raises(InvalidArgument) as caught:
        parse_body(False, {"prompt": deep}, {})
    assert str(caught.value)


TABLE = {"beam_width": 4, "max_tokens": 9, "length_penalty": 0.5}


@pytest.mark.parametrize(
    ("body", "table", "params"),
    [
        ({}, TABLE, BeamSearchParams(beam_width=4, max_tokens=9, length_penalty=0.5)),
        ({"max_tokens": 5}, TABLE, BeamSearchParams(beam_width=4, max_tokens=5, length_penalty=0.5)),
        ({"n": 2}, TABLE, BeamSearchParams(beam_width=4, num_return_sequences=2, max_tokens=9, length_penalty=0.5)),
        ({"beam_width": 2, "length_penalty": 1}, TABLE, BeamSearchParams(beam_width=2, max_tokens=9)),
        ({"use_beam_search": True, "n": 3}, TABLE, BeamSearchParams(beam_width=3, max_tokens=9, length_penalty=0.5)),
        ({"use_beam_search": True}, TABLE, BeamSearchParams(beam_width=4, max_tokens=9, length_penalty=0.5)),
        ({"use_beam_search": False}, TABLE, SamplingParams(max_tokens=30, temperature=0.7)),
        ({}, {"max_tokens": 9}, SamplingParams(max_tokens=30, temperature=0.7)),
        ({"beam_width": 2}, {"max_tokens": 9}, BeamSearchParams(beam_width=2, max_tokens=9)),
        ({}, {"beam_width": 2, "do_sample": True, "temperature": 1.5},
         BeamSearchParams(beam_width=2, do_sample=True, temperature=1.5, max_tokens=30)),
    ],
    ids=repr,
)  # fmt: skip
def test_a_table_of_beam_search_stands_between_body_and_defaults(
    body: dict[str, Any], table: dict[str, Any], params: Any
) -> None:
    defaults = {"max_tokens": 30, "temperature": 0.7}
    assert parse_body(False, {"prompt": "x"} | body, defaults, table).params == params


def test_a_chat_with_a_table_of_beam_search_may_say_its_length_by_its_new_name() -> None:
    ask = parse_body(True, {"messages": HELLO, "max_completion_tokens": 3}, {}, TABLE)
    assert ask.params == BeamSearchParams(beam_width=4, max_tokens=3, length_penalty=0.5)
