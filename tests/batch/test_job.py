"""Jobs with a real engine: each line once, the same answers in one go or in many, faults as records."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, SamplingParams
from pagedec.batch import BatchJob, run_batch
from pagedec.batch.feeder import Feeder
from pagedec.config import ModelConfig
from pagedec.errors import InvalidArgument, RequestError
from tests.batch.files import read_output, request, stable, write_input

BODIES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 7},
    {},  # neither greedy nor seeded: named by its line
    {"n": 2, "max_tokens": 3},
    {"prompt": ["one", "two"]},
    {"prompt": [[65, 66], [67]], "n": 2},
]
BAD: list[dict[str, Any] | str | bytes] = [
    "nonsense",
    b"\xff\xfe",
    "[]",
    request("", prompt="x"),
    request("no such url") | {"url": "/v1/embeddings"},
    request("no such field", prompt="x", temprature=1),
    request("no such value", prompt="x", top_p=2),
    request("too long", prompt="x" * 40_000),
    request("not text", prompt=7),
    request("not here", prompt="x", model="gpt-4"),
    request("not in the vocabulary", prompt=[3, 10**6]),
]


def good_lines(count: int) -> list[dict[str, Any]]:
    return [request(f"r{i}", **{"prompt": f"line {i}"} | BODIES[i % len(BODIES)]) for i in range(count)]


def mixed_lines(count: int) -> list[dict[str, Any] | str | bytes]:
    lines: list[dict[str, Any] | str | bytes] = [*good_lines(count)]
    for i, bad in enumerate(BAD):
        lines.insert(3 * i + 1, bad)
    lines.append(request("r3", prompt="again"))
    return lines


def texts(record: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in record["response"]["body"]["choices"]]


def test_answers_are_those_of_generate(llm: LLM, tmp_path: Path) -> None:
    lines = [
        request("greedy", prompt="abc", temperature=0, max_tokens=9),
        request("two", prompt=["abc", "de"], seed=3, n=2, max_tokens=5),
    ]
    summary = run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out")
    greedy, two = read_output(tmp_path / "out")
    [expected] = llm.generate("abc", SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    several = llm.generate(["abc", "de"], SamplingParams(seed=3, n=2, max_tokens=5), use_tqdm=False)
    assert texts(greedy) == [expected.outputs[0].text]
    assert texts(two) == [answer.text for output in several for answer in output.outputs]
    assert [choice["index"] for choice in two["response"]["body"]["choices"]] == [0, 1, 2, 3]
    body = greedy["response"]["body"]
    assert body["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12, "prompt_tokens_details": 0
    }  # fmt: skip
    assert (body["object"], body["model"]) == ("text_completion", llm.config.model.model)
    assert body["choices"][0]["finish_reason"] == "length"
    assert (summary.num_lines, summary.num_answered, summary.num_errors) == (2, 2, 0)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (3 + 5, 9 + 20)


def test_chats_are_rendered_by_the_model_s_template(llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    half = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    lines = [
        request("new", chat=True, messages=messages, temperature=0, max_completion_tokens=6),
        request("more", chat=True, messages=half, temperature=0, max_tokens=6, continue_final_message=True),
        request("empty", chat=True, messages=[{"role": "user"}]),
        request("parts", chat=True, messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    ]
    run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out")
    new, more, empty, parts = read_output(tmp_path / "out")
    prompts = ["<|system|>Be<|end|><|user|>Hi<|end|><|assistant|>", "<|user|>Hi<|end|><|assistant|>Well,"]
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    for record, output in zip((new, more), expected, strict=True):
        body = record["response"]["body"]
        assert body["object"] == "chat.completion"
        message = {"role": "assistant", "content": output.outputs[0].text, "refusal": None}
        assert body["choices"][0]["message"] == message
        assert body["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    faults = [record["response"]["body"]["error"] for record in (empty, parts)]
    assert [fault["param"] for fault in faults] == ["messages[0].content", "messages[0].content[0]"]


def test_log_probabilities_in_both_forms(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(seed=4, max_tokens=6, logprobs=2)
    lines = [
        request("text", prompt="abc", seed=4, max_tokens=6, logprobs=2),
        request("chat", chat=True, messages=[{"role": "user", "content": "Hi"}], seed=4, max_tokens=6, logprobs=True,
                top_logprobs=2),
        request("own", chat=True, messages=[{"role": "user", "content": "Hi"}], seed=4, max_tokens=6, logprobs=True),
    ]  # fmt: skip
    run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out")
    text, chat, own = (record["response"]["body"]["choices"][0]["logprobs"] for record in read_output(tmp_path / "out"))
    [output] = llm.generate("abc", params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    entries = [
        table[token] for token, table in zip(answer.token_ids, answer.logprobs, strict=True) if table is not None
    ]
    assert text["token_logprobs"] == [entry.logprob for entry in entries]
    assert text["tokens"] == [entry.decoded_token for entry in entries]
    assert text["text_offset"] == [sum(map(len, text["tokens"][:i])) for i in range(6)]
    assert all(own in top.values() for own, top in zip(text["token_logprobs"], text["top_logprobs"], strict=True))
    [output] = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    assert llm.tokenizer is not None
    for content, token in zip(chat["content"], output.outputs[0].token_ids, strict=True):
        assert bytes(content["bytes"]) == llm.tokenizer.token_bytes(token)
        tops = [entry["logprob"] for entry in content["top_logprobs"]]
        assert len(tops) == 2 and tops[0] >= tops[1] and content["logprob"] <= tops[0]
        assert (content["logprob"] in tops) or content["logprob"] <= tops[1]
    assert [one["top_logprobs"] for one in own["content"]] == [[]] * 6
    assert [one["logprob"] for one in own["content"]] == [one["logprob"] for one in chat["content"]]


def test_biases_and_stops_of_bodies_reach_the_engine(llm: LLM, tmp_path: Path) -> None:
    assert llm.tokenizer is not None
    a, b = llm.tokenizer.encode("ab")
    lines = [
        request("bias", prompt="x", max_tokens=3, logit_bias={str(a): 100}),
        request("penalty", prompt="x", max_tokens=4, temperature=0, logit_bias={str(a): 100, str(b): 99},
        presence_penalty=2),
        request("stop", prompt="x", max_tokens=9, logit_bias={str(a): 100}, stop=["aaa"]),
    ]  # fmt: skip
    run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out")
    bias, penalty, stop = read_output(tmp_path / "out")
    assert (texts(bias), texts(penalty), texts(stop)) == (["aaa"], ["abaa"], [""])
    assert stop["response"]["body"]["choices"][0]["stop_reason"] == "aaa"


def test_bad_lines_become_records_and_stop_nothing(llm: LLM, tmp_path: Path) -> None:
    lines = mixed_lines(40)
    summary = run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out", defaults={"max_tokens": 4})
    records = read_output(tmp_path / "out")
    assert [int(record["id"].split("-")[1]) for record in records] == list(range(1, len(lines) + 1))
    errors = [record for record in records if record["error"] or record["response"]["status_code"] != 200]
    assert summary.num_errors == len(errors) == len(BAD) + 1
    told = []
    for record in errors:
        fault = record["error"] or record["response"]["body"]["error"]
        number = int(record["id"].split("-")[1])
        assert fault["line"] == number and fault["message"].startswith(f"line {number}: ")
        status = None if record["response"] is None else record["response"]["status_code"]
        told.append((status, fault["code"], fault["param"], record["custom_id"]))
    assert told == [
        (None, "invalid_json", None, None),
        (None, "invalid_utf8", None, None),
        (None, "invalid_request", None, None),
        (None, "invalid_request", "custom_id", None),
        (None, "invalid_url", "url", "no such url"),
        (400, "invalid_argument", "temprature", "no such field"),
        (400, "invalid_argument", "top_p", "no such value"),
        (400, "invalid_argument", "prompt", "too long"),
        (400, "invalid_argument", "prompt", "not text"),
        (404, "not_found", None, "not here"),
        (400, "invalid_argument", "prompt", "not in the vocabulary"),
        (None, "duplicate_custom_id", "custom_id", "r3"),
    ]
    assert llm.engine.idle and not llm.engine.scheduler.requests


def test_wherever_a_job_was_killed_it_ends_as_if_it_had_not_been(llm: LLM, tmp_path: Path) -> None:
    """kill -9 leaves a prefix of what was to be written, so cutting a finished output is every kill there can be."""
    source = write_input(tmp_path / "in", mixed_lines(36))
    whole = tmp_path / "whole"
    run_batch(llm, source, whole, defaults={"max_tokens": 4})
    expected, data = list(map(stable, read_output(whole))), whole.read_bytes()
    dice = random.Random(0)
    for size in [0, 1, len(data) - 1, *(dice.randrange(len(data)) for _ in range(12))]:
        out = tmp_path / "out"
        out.write_bytes(data[:size])
        summary = run_batch(llm, source, out, defaults={"max_tokens": 4}, window=dice.choice([None, 1, 5]))
        assert list(map(stable, read_output(out))) == expected
        assert summary.num_answered_before == data[:size].count(b"\n")
        assert summary.num_answered_before + summary.num_answered == summary.num_lines == len(expected)
        assert out.read_bytes().startswith(data[: data[:size].rfind(b"\n") + 1]), "what was whole is not written again"


def test_the_window_bounds_what_the_engine_holds(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    step = Feeder.step

    def counted(feeder: Feeder[Any]) -> Any:
        held.append(feeder.num_pending)
        return step(feeder)

    monkeypatch.setattr(Feeder, "step", counted)
    lines = [request(f"r{i}", prompt="x", n=2, max_tokens=2) for i in range(10)]
    run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out", window=4)
    assert max(held) == 4 and len(read_output(tmp_path / "out")) == 10


def test_a_complete_job_does_nothing(llm: LLM, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", good_lines(3))
    run_batch(llm, source, tmp_path / "out", defaults={"max_tokens": 4})
    data = (tmp_path / "out").read_bytes()
    again = run_batch(llm, source, tmp_path / "out", defaults={"max_tokens": 4})
    assert (again.num_answered_before, again.num_answered) == (3, 0)
    assert (tmp_path / "out").read_bytes() == data
    once_more = run_batch(llm, source, tmp_path / "out", defaults={"max_tokens": 4}, restart=True)
    assert (once_more.num_answered_before, once_more.num_answered) == (0, 3)


def test_more_lines_make_more_work(llm: LLM, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", good_lines(2))
    run_batch(llm, source, tmp_path / "out", defaults={"max_tokens": 4})
    write_input(source, good_lines(4))
    more = run_batch(llm, source, tmp_path / "out", defaults={"max_tokens": 4})
    assert (more.num_lines, more.num_answered_before, more.num_answered) == (4, 2, 2)


@pytest.mark.parametrize("num_lines", [1, 3])
def test_an_input_that_changes_while_it_is_read(num_lines: int, llm: LLM, tmp_path: Path) -> None:
    """Lines that are lost were said to be answered; those that are added are."""
    source = write_input(tmp_path / "in", good_lines(2))
    with BatchJob(source, tmp_path / "out", model=llm.config.model, defaults={"max_tokens": 4}) as job:
        write_input(source, good_lines(num_lines))
        if num_lines > 2:
            assert job.run(llm).num_lines == job.num_done == num_lines
            return
        with pytest.raises(InvalidArgument, match="^input is .*: it had 2 lines .* and 1 when .*: 1 are answered"):
            job.run(llm)
    assert len(read_output(tmp_path / "out")) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*good_lines(1), request("r1", prompt="other")],
        "line 2 is not the one that .* has an answer to; name another"),
        (good_lines(1), "has answers to lines that are not there; name another output, or start over with restart"),
        (["", *good_lines(2)], "line 2 is not the one"),
    ],
)  # fmt: skip
def test_a_changed_input_is_noticed(lines: list[Any], message: str, llm: LLM, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", good_lines(2))
    run_batch(llm, source, tmp_path / "out", defaults={"max_tokens": 4})
    data = (tmp_path / "out").read_bytes()
    write_input(source, lines)
    with pytest.raises(InvalidArgument, match=f"^input is .*{message}"):
        run_batch(llm, source, tmp_path / "out", defaults={"max_tokens": 4})
    assert (tmp_path / "out").read_bytes() == data


def test_changed_settings_are_noticed(tmp_path: Path, llm: LLM) -> None:
    source = write_input(tmp_path / "in", good_lines(2))
    run_batch(llm, source, tmp_path / "out", defaults={"max_tokens": 4})
    model = llm.config.model
    base: dict[str, Any] = {"model": model, "defaults": {"max_tokens": 4}}
    models: list[dict[str, Any]] = [
        {"model": "other"}, {"seed": 1}, {"dtype": "float32"}, {"quantization": "int8"}, {"max_model_len": 64},
        {"generation_config": "none"}, {"tokenizer": "other"},
    ]  # fmt: skip
    changes = [{"model": dataclasses.replace(model, **change)} for change in models]
    for change in (*changes, {"defaults": {}}, {"any_model": True}, {"kv_cache_dtype": "int8"}):
        with pytest.raises(InvalidArgument, match="was begun with another model, seed or other sampling parameters"):
            BatchJob(source, tmp_path / "out", **base | change)
    with BatchJob(source, tmp_path / "out", **base) as job:
        assert job.complete


def test_any_model(llm: LLM, tmp_path: Path) -> None:
    names = ["gpt-4", llm.config.model.model, Path(llm.config.model.model).name]
    lines = [request(name, prompt="x", max_tokens=1, model=name) for name in names]
    run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out")
    assert [record["response"]["status_code"] for record in read_output(tmp_path / "out")] == [404, 200, 200]
    run_batch(llm, tmp_path / "in", tmp_path / "all", any_model=True)
    assert [record["response"]["body"].get("model") for record in read_output(tmp_path / "all")] == names


@pytest.mark.parametrize("name", ["none", "folder", "fifo"])
def test_what_is_no_input_makes_no_output(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidArgument, match="^input is "):
        BatchJob(tmp_path / name, tmp_path / "out", model=ModelConfig("m"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "value"), [("input", "-"), ("output", "-"), ("output", "x" * 300)])
def test_the_file_that_is_wrong_is_named(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"input": write_input(tmp_path / "in", good_lines(1)), "output": tmp_path / "out"}
    with pytest.raises(InvalidArgument, match=f"^{name} is '[-x .]+': (must be a plain file|.*File name too long)"):
        BatchJob(**files | {name: Path(value)}, model=ModelConfig("m"))
    assert os.listdir() == ["in"]


def test_a_restart_that_never_runs_loses_no_answers(llm: LLM, tmp_path: Path) -> None:
    """As when the model of the new command does not exist."""
    source, out = write_input(tmp_path / "in", good_lines(2)), tmp_path / "out"
    run_batch(llm, source, out, defaults={"max_tokens": 2})
    before = out.read_bytes()
    with BatchJob(source, out, model=ModelConfig("other"), restart=True) as job:
        assert not job.complete and job.num_done == 0
    assert out.read_bytes() == before
    write_input(source, [])
    assert run_batch(llm, source, out, restart=True).num_lines == 0
    assert out.read_bytes() == b""


def test_the_input_is_not_overwritten(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", good_lines(1))
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(InvalidArgument, match="^output is .*: must not be the input"):
        BatchJob(source, tmp_path / "link", model=ModelConfig("m"), restart=True)
    assert source.read_bytes()


def test_a_request_that_the_engine_gives_up_is_a_record(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a decoder cannot say what to ask: that request fails, and the others go on."""
    step, steps = llm.engine.step, []

    def failing() -> Any:
        steps.append(1)
        if len(steps) == 2:
            victim = next(iter(llm.engine.scheduler.requests)).id
            llm.engine.fail(victim, RequestError(victim, "cannot go on"))
        return step()

    monkeypatch.setattr(llm.engine, "step", failing)
    lines = [request(f"r{i}", prompt=["x", "y"], max_tokens=4) for i in range(3)]
    summary = run_batch(llm, write_input(tmp_path / "in", lines), tmp_path / "out")
    records = read_output(tmp_path / "out")
    assert sorted(record["response"]["status_code"] for record in records) == [200, 200, 500]
    assert summary.num_errors == 1
    [lost] = [record for record in records if record["response"]["status_code"] == 500]
    assert "cannot go on" in lost["response"]["body"]["error"]["message"]
    assert lost["response"]["body"]["error"]["type"] == "server_error"
    assert not llm.engine.scheduler.requests


def test_our_own_failure_ends_the_run_and_loses_nothing(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = llm.engine.step, []

    def failing() -> Any:
        steps.append(1)
        if len(steps) == 5:
            raise RuntimeError("the device is gone")
        return step()

    source = write_input(tmp_path / "in", good_lines(12))
    monkeypatch.setattr(llm.engine, "step", failing)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run_batch(llm, source, tmp_path / "out", defaults={"max_tokens": 3}, window=2)
    monkeypatch.undo()
    assert not llm.engine.scheduler.requests
    before = len(read_output(tmp_path / "out"))
    rest = run_batch(llm, source, tmp_path / "out", defaults={"max_tokens": 3})
    assert 0 < before == rest.num_answered_before and len(read_output(tmp_path / "out")) == 12


def test_an_interrupt_leaves_whole_records_and_an_empty_engine(llm: LLM, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", [request(f"r{i}", prompt="x", max_tokens=20) for i in range(60)])
    out = tmp_path / "out"

    def interrupt() -> None:
        while not out.exists() or not out.stat().st_size:
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_batch(llm, source, out, window=2)
    thread.join()
    assert not llm.engine.scheduler.requests
    before = len(read_output(out))
    rest = run_batch(llm, source, out)
    assert 0 < before < 60 and rest.num_answered == 60 - before
    assert len({json.dumps(record["custom_id"]) for record in read_output(out)}) == 60
