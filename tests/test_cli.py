"""The command line: what it takes, what it prints, and how it says no. The engine behind it is a stand-in that notes
its arguments and answers with the prompt's own tokens; the real one is run in test_cli_end_to_end.py."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pagedec.cli import active, bench_serve, generate, main
from pagedec.engine.stats import EngineStats
from pagedec.errors import CallInterrupted
from pagedec.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedec.params import SamplingParams

SOURCES = Path(__file__).resolve().parent.parent


class StandIn:
    """An LLM that echoes. Right for these tests because every token it returns is known beforehand."""

    calls: list[dict[str, Any]] = []
    recommended: dict[str, Any] = {}

    def __init__(self, **engine_args: Any) -> None:
        self.engine_args = engine_args
        self.engine = types.SimpleNamespace(stats=EngineStats())

    def close(self) -> None:
        StandIn.calls[-1]["closed"] = True

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.recommended)

    def chat(self, messages: list[Any], sampling_params: Any, **options: Any) -> list[RequestOutput]:
        outputs = self.generate([talk[-1]["content"] for talk in messages], sampling_params, **options)
        StandIn.calls[-1]["prompts"] = messages
        return [dataclasses.replace(output, prompt=f"<|user|>{output.prompt}") for output in outputs]

    def generate(self, prompts: list[Any], sampling_params: Any, **options: Any) -> list[RequestOutput]:
        StandIn.calls.append({"engine": self.engine_args, "prompts": prompts, "params": sampling_params, **options})
        self.engine.stats.num_steps += 2
        self.engine.stats.num_rows += 10
        self.engine.stats.execute_seconds += 0.5
        outputs = []
        for i, prompt in enumerate(prompts):
            text = prompt if isinstance(prompt, str) else None
            token_ids = list(text.encode()) if text is not None else prompt["prompt_token_ids"]
            answers = [
                CompletionOutput(n, "" if text is None else f"<{text}>", token_ids, finish_reason="length")
                for n in range(sampling_params.num_answers)
            ]
            metrics = RequestMetrics(0.0, 0.25, 1.25, num_output_tokens=5)
            outputs.append(RequestOutput(str(i), text, token_ids, answers, True, metrics))
        return outputs


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    module = types.ModuleType("pagedec.llm")
    module.LLM = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pagedec.llm", module)
    monkeypatch.setattr(active, "active_line", lambda llm: "stand-in")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(StandIn, "calls", [])
    return StandIn


def run(*arguments: str) -> int:
    return main.main(list(arguments))


# ------------------------------------------------------------------------------------------------------------ generate
def test_generate_prints_prompts_and_answers(stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "ab", "c", "--n", "2") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        *("=== ab", "--- answer 1: 2 tokens, length", "<ab>", "--- answer 2: 2 tokens, length", "<ab>"),
        *("=== c", "--- answer 1: 1 token, length", "<c>", "--- answer 2: 1 token, length", "<c>"),
    ]
    assert "pagedec: stand-in; loaded in " in err
    assert "2 prompts of 3 tokens, 4 answers of 6 tokens in " in err and " tokens/s" in err


def test_generate_json_is_one_object_a_line(stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "é\n", "b", "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in records] == ["é\n", "b"]
    assert records[1]["outputs"] == [
        {
            "index": 0, "text": "<b>", "token_ids": [98], "cumulative_logprob": None, "logprobs": None,
            "finish_reason": "length", "stop_reason": None, "limited_by": None, "score": None, "ancestry": None,
            "item_id": None,
        }
    ]  # fmt: skip
    assert records[0]["metrics"]["time_to_first_token"] == 0.25
    assert records[0]["metrics"]["time_per_output_token"] == 0.25
    assert records[0]["finished"] is True


def test_what_is_no_number_is_null_in_json() -> None:
    """Python's NaN and Infinity are no JSON: other readers refuse the line."""
    told = {7: Logprob(float("nan"), 1, "a"), 8: Logprob(-float("inf"), None, "b")}
    answer = CompletionOutput(0, "", [7], cumulative_logprob=0.5, logprobs=[told])
    output = RequestOutput("0", "é", [1], [answer], True)
    text = generate.as_json(output)
    assert "NaN" not in text and "Infinity" not in text and "é" in text
    [answer] = json.loads(text)["outputs"]
    assert answer["cumulative_logprob"] == 0.5
    assert [entry["logprob"] for entry in answer["logprobs"][0].values()] == [None, None]


def test_generate_passes_every_argument_on(stand_in: type[StandIn]) -> None:
    flags = "--temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 7 --max-tokens 9 --min-tokens 2 --ignore-eos"
    engine = "--model m --dtype float32 --block-size 32 --kv-cache-memory 1MiB --no-enable-prefix-caching"
    assert run("generate", "a", "--stop-token-ids", "3,4", "--progress", *flags.split(), *engine.split()) == 0
    [call] = stand_in.calls
    assert call["params"] == SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[3, 4],
    )
    given = {name: call["engine"][name] for name in ("model", "dtype", "block_size", "kv_cache_memory")}
    assert given == {"model": "m", "dtype": "float32", "block_size": 32, "kv_cache_memory": 2**20}
    assert call["engine"]["enable_prefix_caching"] is False
    assert call["use_tqdm"] is True
    assert call["closed"]


def test_generate_reads_arguments_then_file_then_stdin(
    stand_in: type[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffone\n\ntwo\r\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffthree\n\nfour"))
    assert run("generate", "zero", "-f", str(file)) == 0
    assert run("generate") == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("five"))
    assert run("generate", "x", "-", "y") == 0
    assert [call["prompts"] for call in stand_in.calls] == [
        ["zero", "one", "two"],
        ["three", "four"],
        ["x", "five", "y"],
    ]


def test_generate_reads_json_lines(stand_in: type[StandIn], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\nb"}\n\n{"prompt_token_ids": [1, 2], "note": "kept out"}\n')
    assert run("generate", "-f", str(file)) == 0
    assert stand_in.calls[0]["prompts"] == ["a\nb", {"prompt_token_ids": [1, 2]}]


def test_generate_without_tokenizer_takes_token_ids(
    stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "1,2,3", "--skip-tokenizer-init") == 0
    assert stand_in.calls[0]["prompts"] == [{"prompt_token_ids": [1, 2, 3]}]
    assert capsys.readouterr().out.splitlines() == ["=== 1,2,3", "--- 3 tokens, length", "1,2,3"]


def test_generate_as_a_chat(stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--chat", "--system", "Be", "a", "b") == 0
    system = {"role": "system", "content": "Be"}
    assert stand_in.calls[0]["prompts"] == [
        [system, {"role": "user", "content": "a"}],
        [system, {"role": "user", "content": "b"}],
    ]
    assert capsys.readouterr().out.splitlines()[:3] == ["=== a", "--- 1 token, length", "<a>"]


def test_flags_win_over_the_file_and_the_file_over_the_model(
    stand_in: type[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "recommended", {"temperature": 0.1, "top_k": 1, "top_p": 0.1})
    file = tmp_path / "engine.toml"
    file.write_text("[sampling]\ntemperature = 0.2\ntop_k = 2\n")
    assert run("generate", "a", "--config", str(file), "--temperature", "0.3") == 0
    assert stand_in.calls[0]["params"] == SamplingParams(temperature=0.3, top_k=2, top_p=0.1)


def test_log_probabilities_are_printed(
    stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[int, Logprob] | None] = [
        {5: Logprob(-1.5, 2, "é\n"), 6: Logprob(-0.5, 1, "x")}, None, {7: Logprob(-0.25, 1, None)}
    ]  # fmt: skip

    def generate(self: StandIn, prompts: list[Any], params: Any, **options: Any) -> list[RequestOutput]:
        StandIn.calls.append({})
        answer = CompletionOutput(0, "é\nyz", [5, 6, 7], finish_reason="length", logprobs=given)
        asked = [None, {8: Logprob(-2.0, 1, "z")}] if params.prompt_logprobs == 0 else None
        return [RequestOutput("0", "a", [1, 8], [answer], True, prompt_logprobs=asked)]

    monkeypatch.setattr(StandIn, "generate", generate)
    assert run("generate", "a", "--logprobs", "2") == 0
    assert capsys.readouterr().out.splitlines()[4:] == [
        '      -1.5000 "é\\n"          -0.5000 "x"; -1.5000 "é\\n"',
        "             given",
        "      -0.2500 7",
    ]
    assert run("generate", "a", "--prompt-logprobs", "0") == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "=== a", "             given", '      -2.0000 "z"', "--- 3 tokens, length"
    ]  # fmt: skip
    assert run("generate", "a", "--logprobs", "2", "--json") == 0
    [record] = map(json.loads, capsys.readouterr().out.splitlines())
    assert record["outputs"][0]["logprobs"][0]["6"] == {"logprob": -0.5, "rank": 1, "decoded_token": "x"}


# --------------------------------------------------------------------------------------------------------------- bench
def test_bench_latency_repeats_one_batch(stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--batch-size 3 --input-len 5 --output-len 4 --num-iters 2 --num-iters-warmup 1"
    assert run("bench", "latency", "--json", *sizes.split()) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(stand_in.calls) == 3
    prompts = [tuple(prompt["prompt_token_ids"]) for call in stand_in.calls for prompt in call["prompts"]]
    assert len(set(prompts)) == 9 and {len(prompt) for prompt in prompts} == {5}
    assert stand_in.calls[0]["params"] == SamplingParams(temperature=0, ignore_eos=True, max_tokens=4)
    assert result["output_tokens_of_a_batch"] == 15
    assert result["time_per_output_token_median_ms"] == 250 and result["time_to_first_token_median_ms"] == 250
    assert result["num_steps"] == 4, "the warm-up's steps do not count"
    assert (result["rows_per_step"], result["execute_mean_ms"], result["plan_and_settle_mean_ms"]) == (5, 250, 0)
    assert result["latency_p10_ms"] <= result["latency_median_ms"] <= result["latency_p90_ms"]


def test_bench_throughput_counts_all(stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "throughput", "--num-prompts", "4", "--input-len", "3", "--temperature", "0.7", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_prompts"], result["input_tokens"], result["output_tokens"]) == (4, 12, 12)
    assert result["total_tokens_per_second"] == pytest.approx(2 * result["output_tokens_per_second"])
    assert stand_in.calls[1]["params"].temperature == 0.7
    assert len(stand_in.calls[0]["prompts"]) == 1, "a first request warms up"


@pytest.mark.parametrize(
    ("flags", "length"),
    [((), 5), (("--output-len", "4"), 4), (("--max-tokens", "3"), 3), (("--output-len", "4", "--max-tokens", "3"), 3)],
)
def test_a_flag_for_the_length_of_answers_wins_over_the_file(
    flags: tuple[str, ...], length: int, stand_in: type[StandIn], tmp_path: Path
) -> None:
    file = tmp_path / "b.toml"
    file.write_text("[sampling]\nmax_tokens = 5\n")
    assert run("bench", "throughput", "--config", str(file), "--num-prompts", "2", *flags) == 0
    assert run("bench", "latency", "--config", str(file), "--num-iters", "1", *flags) == 0
    assert {call["params"].max_tokens for call in stand_in.calls} == {length}


def test_bench_prints_lines(stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "latency", "--num-iters", "1") == 0
    out = capsys.readouterr().out
    assert "output tokens per second" in out and "execute mean ms" in out
    assert re.search(r"^batch size +8$", out, re.MULTILINE), "a count is a whole number"


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_prompt(name: str, stand_in: type[StandIn], tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text('{"prompt": "a"}\r\n' if name == "p.jsonl" else "a\r\n", encoding="utf-8-sig")
    assert run("generate", "-f", str(file)) == 0
    assert stand_in.calls[0]["prompts"] == ["a"]


def test_separators_of_lines_within_json_end_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON may have them as they are, which `str.splitlines` takes for ends."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\u2028b\x85c"}\r\n\n{"prompt": "d"}\n', encoding="utf-8-sig")
    assert bench_serve.read_prompts(str(file)) == ["a\u2028b\x85c", "d"]
    file.write_text("[" * 20_000)
    assert run("bench", "serve", "--dataset-path", str(file)) == main.USER_ERROR
    assert "line 1 is none" in capsys.readouterr().err


def test_no_place_for_a_result_is_said_before_anything_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "serve", "--result", f"/{'a' * 300}/r.json") == main.USER_ERROR
    assert capsys.readouterr().err.endswith(": cannot be written: File name too long\n")


def test_our_own_bugs_are_not_hidden(stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(StandIn, "generate", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run("generate", "a")


def test_interrupt(
    stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StandIn, "generate", interrupted)
    assert run("generate", "a") == main.INTERRUPTED
    assert capsys.readouterr().err.splitlines()[-1] == "pagedec: interrupted"


@pytest.mark.parametrize("chat", [[], ["--chat"]])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_interrupt_keeps_the_answers_that_are_finished(
    chat: list[str],
    form: list[str],
    stand_in: type[StandIn],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "chat" if chat else "generate"
    answer = getattr(StandIn, name)

    def interrupted(*given: Any, **named: Any) -> None:
        outputs = answer(*given, **named)
        raise CallInterrupted([outputs[0], None, outputs[2], None])

    assert run("generate", "ab", "d", *chat, *form) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr(StandIn, name, interrupted)
    assert run("generate", "ab", "c", "d", "e", *chat, *form) == main.INTERRUPTED
    shown = capsys.readouterr()
    assert shown.out.replace('"request_id": "2"', '"request_id": "1"') == whole
    assert "2 prompts of 3 tokens, 2 answers of 3 tokens" in shown.err
    assert shown.err.splitlines()[-1] == "pagedec: interrupted: 2 of 4 prompts answered"
    assert StandIn.calls[-1]["closed"]


def test_the_process_ends_at_once_but_not_before_others_have_had_their_say() -> None:
    """Threads are waited for and exit handlers run; the status is `main`'s; what was written is there."""
    program = (
        "import atexit, sys, threading, time; from pagedec.cli import main as cli\n"
        "def late(): time.sleep(0.3); sys.stdout.write('thread ')\n"
        "def main():\n"
        "    threading.Thread(target=late).start(); atexit.register(sys.stdout.write, 'handler'); return 3\n"
        "cli.main = main; cli.command()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "thread handler", "")


COMMAND = (
    "import sys, types; from pagedec.cli import main as cli; from pagedec.errors import InvalidArgument\n"
    "def run(_):\n"
    "    print('an answer'); sys.stderr.write('told')\n"
    "    if {fails}: raise InvalidArgument('prompt', 'x', 'is bad')\n"
    "    return 0\n"
    "cli.parser = lambda: types.SimpleNamespace(parse_args=lambda _: types.SimpleNamespace(run=run))\n"
    "cli.command()\n"
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("fails", "out", "status"), [
    (False, "/dev/full", 1), (True, "/dev/full", 2), (False, "closed", 0), (True, "closed", 2), (False, "/dev/null", 0),
])  # fmt: skip
def test_the_last_flush_fails_without_a_traceback(fails: bool, out: str, status: int) -> None:
    """A full disk, and a reader who has left."""
    if out == "closed":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(out, os.O_WRONLY)
    command = [sys.executable, "-c", COMMAND.format(fails=fails)]
    held_back = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, env=held_back)
    os.close(writing)
    assert done.returncode == status and "Traceback" not in done.stderr and "told" in done.stderr


def test_who_runs_the_command_inside_goes_on(tmp_path: Path) -> None:
    """A host of `python -m pagedec`, and a profiler."""
    host = (
        "import runpy, sys; sys.argv = ['pagedec', '--version']\n"
        "try: runpy.run_module('pagedec', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: print('goes on', end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", host], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "goes on 0"
    program, profile = tmp_path / "program.py", tmp_path / "profile"
    program.write_text(COMMAND.format(fails=False))
    watched = [sys.executable, "-m", "cProfile", "-o", str(profile), str(program)]
    assert subprocess.run(watched, capture_output=True, timeout=120).returncode == 0
    assert profile.stat().st_size > 0
