"""Fields of bodies that are neither prompts nor sampling parameters, answers without text, and files without names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.batch import BatchJob, run_batch
from pagedec.config import ModelConfig
from pagedec.errors import FeatureNotAvailable, InvalidArgument
from tests.batch.files import read_output, request, write_input


def test_variables_of_the_template(tiny: Path, tmp_path: Path) -> None:
    thinking = shutil.copytree(tiny, tmp_path / "thinking")
    tokenizer = json.loads((thinking / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] += "{% if enable_thinking %}<think>{% endif %}"
    (thinking / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    messages = [{"role": "user", "content": "Hi"}]
    options: list[dict[str, Any]] = [{}, {"chat_template_kwargs": {"enable_thinking": True}}]
    lines = [request(str(i), True, messages=messages, max_tokens=1, **one) for i, one in enumerate(options)]
    lines.append(request("own", True, messages=messages, chat_template_kwargs={"messages": []}))
    with LLM(model=str(thinking), load_format="dummy", num_blocks=64) as llm:
        run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out")
    plain, thought, own = (record["response"]["body"] for record in read_output(tmp_path / "out"))
    assert thought["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + len("<think>")
    assert own["error"]["param"] == "chat_template_kwargs"


def test_what_the_engine_refuses_is_named_as_in_the_body(llm: LLM, tmp_path: Path) -> None:
    """Not as arguments of `LLM.generate`, which has a list of prompts and one of parameters."""
    bodies: list[dict[str, Any]] = [{"prompt": "a", "stop": ["x"] * 65}, {"prompt": ["a", "b"], "stop": ["x"] * 65}]
    bodies += [{"prompt": "a", "stop_token_ids": [9999]}, {"prompt": ["a", ""]}]
    bodies.append({"messages": [{"role": "user", "content": "a" * (llm.config.model.max_model_len or 2048)}]})
    lines = [request(str(i), "messages" in body, **body) for i, body in enumerate(bodies)]
    run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out")
    errors = [record["response"]["body"]["error"] for record in read_output(tmp_path / "out")]
    assert [error["param"] for error in errors] == ["stop", "stop", "stop_token_ids", "prompt[1]", "messages"]
    assert errors[0]["message"] == "line 1: stop is 65 strings: must be at most 64"


def test_a_salt_shares_blocks_only_with_itself(llm: LLM, tmp_path: Path) -> None:
    salts = ["a", "a", "b", None]
    lines = [request(str(i), prompt="salted " * 20, max_tokens=1, cache_salt=salt) for i, salt in enumerate(salts)]
    run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out", window=1)
    usages = [record["response"]["body"]["usage"] for record in read_output(tmp_path / "out")]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[1] > 0 and cached == [0, cached[1], 0, 0]


def test_lower_priorities_run_earlier(llm: LLM, tmp_path: Path) -> None:
    num_seqs = llm.config.scheduler.max_num_seqs
    priorities = [0] * num_seqs + [5, 5, -1]
    lines = [request(str(i), prompt="x", max_tokens=4, priority=value) for i, value in enumerate(priorities)]
    run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out")
    order = [json.loads(line)["custom_id"] for line in (tmp_path / "out").read_text().splitlines()]
    first, later = order.index(str(num_seqs + 2)), [order.index(str(num_seqs)), order.index(str(num_seqs + 1))]
    assert first < min(later)


def test_an_answer_without_text_has_token_ids(llm: LLM, tiny: Path, tmp_path: Path) -> None:
    body: dict[str, Any] = {"prompt": [65, 66], "temperature": 0, "max_tokens": 4}
    lines = [request("text", **body), request("ids", detokenize=False, **body)]
    source = write_input(tmp_path / "in", lines)
    [output] = llm.generate([[65, 66]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    run_batch(llm, source, tmp_path / "out")
    text, ids = (record["response"]["body"]["choices"][0] for record in read_output(tmp_path / "out"))
    assert "token_ids" not in text and text["text"] == output.outputs[0].text
    assert (ids["text"], ids["token_ids"]) == ("", output.outputs[0].token_ids)
    with LLM(model=str(tiny), load_format="dummy", num_blocks=64, skip_tokenizer_init=True) as bare:
        run_batch(bare, source, tmp_path / "bare")
    for record in read_output(tmp_path / "bare"):
        assert record["response"]["body"]["choices"][0]["token_ids"] == output.outputs[0].token_ids


def test_what_no_record_shows_is_refused(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", [request("a", prompt="x")])
    with pytest.raises(FeatureNotAvailable, match="^prompt_logprobs is 2: not available in a batch"):
        BatchJob(source, tmp_path / "out", model=ModelConfig("m"), defaults={"prompt_logprobs": 2})
    assert not (tmp_path / "out").exists()


def test_beams_are_choices_with_scores(llm: LLM, tmp_path: Path) -> None:
    body: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    lines = [
        request("theirs", prompt="ab", use_beam_search=True, n=3, length_penalty=0.5, logprobs=1, **body),
        request("ours", prompt=["ab", "cd"], beam_width=4, n=2, **body),
        request("chat", True, messages=[{"role": "user", "content": "Hi"}], beam_width=2, do_sample=True, **body),
        request("plain", prompt="ab", temperature=0, **body),
        request("wrong", prompt="ab", beam_width=999, **body),
    ]
    run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out")
    theirs, ours, chat, plain, wrong = (record["response"]["body"] for record in read_output(tmp_path / "out"))
    params = BeamSearchParams(beam_width=3, length_penalty=0.5, logprobs=1, **body)
    [expected] = llm.generate("ab", params, use_tqdm=False)
    assert [choice["text"] for choice in theirs["choices"]] == [answer.text for answer in expected.outputs]
    assert [choice["score"] for choice in theirs["choices"]] == [answer.score for answer in expected.outputs]
    assert len(theirs["choices"][0]["logprobs"]["tokens"]) == 6
    assert [choice["index"] for choice in ours["choices"]] == [0, 1, 2, 3] and ours["usage"]["completion_tokens"] == 24
    assert len(chat["choices"]) == 2 and all(choice["score"] < 0 for choice in chat["choices"])
    assert "score" not in plain["choices"][0]
    assert wrong["error"]["param"] == "beam_width"


@pytest.mark.parametrize("name", ["input", "output"])
def test_an_empty_name_is_not_the_folder_one_is_in(name: str, tmp_path: Path) -> None:
    files: dict[str, Any] = {"input": write_input(tmp_path / "in", []), "output": tmp_path / "out"}
    with pytest.raises(InvalidArgument, match=f"^{name} is '': must name a file$"):
        BatchJob(**files | {name: ""}, model=ModelConfig("m"))
