"""What the command line says to a mistake, and what it says about itself. Nothing here may load a model."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pagedec.cli import main
from pagedec.cli.console import spelled
from pagedec.errors import ModelFileError
from pagedec.fields import rules
from pagedec.params import SamplingParams

SOURCES = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be loaded for a command that is wrong."""

    def refuse(**_: Any) -> None:
        raise AssertionError("a model is loaded")

    module = types.ModuleType("pagedec.llm")
    module.LLM = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pagedec.llm", module)
    monkeypatch.setattr(sys, "stdin", open("/dev/null"))


def run(*arguments: str) -> int:
    return main.main(list(arguments))


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND; see pagedec --help"),
        (["generate", "a", ""], "prompts[1] is empty: must have at least one character"),
        (["generate", "", "--chat"], "prompts[0] is empty: must have at least one character"),
        (["generate", "-f", "/dev/null"], "prompts is empty: must be at least one: as an argument, with --file, or on"),
        (["generate"], "prompts is empty: must be at least one: as an argument, with --file, or on standard input"),
        (["generate", "a", "--temperature", "-1"], "temperature is -1.0: must be 0, or a finite number at least 1e-05"),
        (["generate", "a", "--temperature", "hot"], "temperature is hot: must be 0, or a finite number"),
        (["generate", "a", "--max-tokens", "2", "--min-tokens", "3"], "min_tokens is 3: must be at most max_tokens"),
        (["generate", "a", "--stop-token-ids", "1,x"], "stop_token_ids is 1,x: must be a sequence of token ids"),
        (["generate", "a", "--block-size", "7"], "block_size is 7: must be one of 8, 16, 32, 64, 128, 256"),
        (
            ["generate", "a", "--kv-cache-dtype", "fp8_e5m2"],
            "kv_cache_dtype is fp8_e5m2: not available in this version; available: auto, int8, fp8",
        ),
        (["generate", "a", "--engine-seed", "-1"], "engine_seed is -1: must be a whole number from 0 to"),
        (
            ["generate", "a", "--max-model-len", "0"],
            "max_model_len is 0: must be a whole number from 2 to 2147483647 or none",
        ),
        (["generate", "a", "--stop", ""], "stop is empty: must be a text that is not empty, or a list of them"),
        (["generate", "-f", "no/such/file"], "file is no/such/file: cannot be read: No such file or directory"),
        (["generate", "a", "--config", "no.toml"], "config is no.toml: cannot be read: No such file or directory"),
        (["generate", "a", "--system", "b"], "system is b: must be given with --chat"),
        (["generate", "a b", "--skip-tokenizer-init"], "prompt is 'a b': must be token ids separated by commas"),
        (["bench"], "the following arguments are required: KIND; see pagedec bench --help"),
        (["bench", "latency", "--batch-size", "0"], "batch_size is 0: must be a whole number from 1 to"),
        (["bench", "latency", "--min-tokens", "200"], "min_tokens is 200: must be at most max_tokens, which is 128"),
        (["bench", "throughput", "--num-prompts", "x"], "num_prompts is x: must be a whole number from 1 to"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_and_exit_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"pagedec: error: {message}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "a", "--max-token", "5"],
        "--max-token is not a flag of pagedec generate; did you mean --max-tokens?"),
        (["generate", "--max_tokens=5"], "--max_tokens is not a flag of pagedec generate; did you mean --max-tokens?"),
        (["generate", "-max-tokens", "5"], "-max-tokens is not a flag of pagedec generate; did you mean --max-tokens?"),
        (["chat", "--temp", "1"], "--temp is not a flag of pagedec chat; did you mean --temperature?"),
        (["batch", "--inptu", "a"], "--inptu is not a flag of pagedec batch; did you mean --input?"),
        (["batch", "--retry"], "--retry is not a flag of pagedec batch; did you mean --retry-failed?"),
        (["generate", "a", "--stp=b c"], "--stp is not a flag of pagedec generate; did you mean --stop?"),
        (["bench", "latency", "--iters", "2"],
        "--iters is not a flag of pagedec bench latency; did you mean --num-iters?"),
        (["generate", "--prompt", "a"], "--prompt is not a flag of pagedec generate; PROMPT is given without a flag"),
        (["tokenize", "--text=a"], "--text is not a flag of pagedec tokenize; TEXT is given without a flag"),
        (["bench", "--json"], "--json is not a flag of pagedec bench; see pagedec bench --help"),
        (["generate", "--qqq"], "--qqq is not a flag of pagedec generate; see pagedec generate --help"),
        (["generate", "--executo", "ray"], "--executo is not a flag of pagedec generate; did you mean --executor?"),
        (["generate", "--tensor-paralle", "2"],
         "--tensor-paralle is not a flag of pagedec generate; did you mean --tensor-parallel-size?"),
        (["serve", "--lora-modules", "a=p", "b=q"],
         "--lora-modules is not a flag of pagedec serve; it is written --lora NAME=PATH, given again for each"),
        (["batch", "--lora_modules=a=p"],
         "--lora_modules is not a flag of pagedec batch; it is written --lora NAME=PATH, given again for each"),
        (["generate", "--lora-modules", "a=p"],
         "--lora-modules is not a flag of pagedec generate; did you mean --lora?"),
        (["--verbos", "chat"], "--verbos is not a flag of pagedec; did you mean --version?"),
        (["generate", "--stop", "--END--"],
         "--END-- is not a flag of pagedec generate; as the value of --stop it is written --stop=--END--"),
        (["generate", "a", "--stop"], "argument --stop: expected one argument; see pagedec generate --help"),
        (["chta"], "chta is no command of pagedec; did you mean chat?"),
        (["stop"],
         "stop is no command of pagedec; known are generate, chat, serve, health, batch, tokenize, bench, doctor"),
        (["bench", "latancy"], "latancy is no command of pagedec bench; did you mean latency?"),
        (["chat", "hello"], "pagedec chat takes flags only, not hello; see pagedec chat --help"),
        (["doctor", "--json", "model"], "pagedec doctor takes flags only, not model; see pagedec doctor --help"),
        (["batch", "in.jsonl", "-i", "a", "-o", "b"],
        "pagedec batch takes flags only, not in.jsonl; see pagedec batch --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_is_no_flag_or_command_names_the_nearest(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert capsys.readouterr() == ("", f"pagedec: error: {message}\n")


def test_prompts_may_stand_between_flags() -> None:
    arguments = main.parser().parse_args(
        ["generate", "--n", "2", "a", "--seed=3", "b", "-5", "--stop", "--x y", "c d", "--", "--json", "--"]
    )
    assert arguments.prompts == ["a", "b", "-5", "c d", "--json", "--"]
    assert not arguments.json and vars(arguments)["sampling.stop"] == ["--x y"]


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["batch"], ["bench", "latency"]])
def test_help_lists_what_this_version_has(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A flag all of whose values are refused, or refused but for the default, is no offer."""
    with pytest.raises(SystemExit):
        run(*command, "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "fp8_e5m2" not in shown and "--kv-cache-dtype {auto,int8,fp8}" in shown
    refused = {"chat": ("--n ", "--detokenize", "--skip-tokenizer-init"), "batch": ("--prompt-logprobs",)}
    assert [flag for flag in refused.get(command[0], ()) if flag in shown] == []


@pytest.mark.parametrize(
    ("command", "none"),
    [(["generate"], "drawn from --engine-seed, so that the same command gives the same answers"),
     (["bench", "latency"], "drawn from --engine-seed, so that the same command gives the same answers"),
     (["chat"], "another one for each answer, so that no two chats are alike; or, where --engine-seed is given, "
      "drawn from it"),
     (["batch"], "made from --engine-seed and the line")],
)  # fmt: skip
def test_help_says_what_happens_without_a_seed(
    command: list[str], none: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(*command, "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert f"--seed INT names the randomness; none: {none} (default: none)" in shown
    engine = (
        "seed of random weights, and of requests without a seed; in files and in Python it is named seed (default: 0)"
    )
    assert f"--engine-seed INT {engine}" in shown


@pytest.mark.parametrize("command", ["generate", "chat", "batch"])
def test_help_says_how_a_text_is_written(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(r"list; \n, \t, \r, \" and \uXXXX are read as in C, and \\ is a backslash") == 2


@pytest.mark.parametrize(
    ("flag", "value", "available"),
    [("--kv-cache-dtype", "fp8_e5m2", "auto, int8, fp8")],
)  # fmt: skip
def test_what_help_does_not_list_is_refused_by_name(
    flag: str, value: str, available: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "a", flag, value) == 2
    err, name = capsys.readouterr().err, flag.strip("-").replace("-", "_")
    assert err.startswith(f"pagedec: error: {name} is ")
    assert err.endswith(f": not available in this version; available: {available}\n")
    assert run("generate", "a", "--executor", "mp") == 2
    assert capsys.readouterr().err == "pagedec: error: executor is mp: must be one of auto, inline, process, ray\n"


def told_of(file: Path, text: str, capsys: pytest.CaptureFixture[str], command: str = "generate") -> str:
    """What a command says that refuses a file of engine arguments."""
    file.write_text(text + "\n")
    assert run(command, "--config", str(file), *([] if command == "serve" else ["a"])) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('num_blocks = "600"', "num_blocks is '600': must be a whole number"),
        ('dtype = "half"', "dtype is 'half': must be one of"),
        ('[sampling]\nmax_tokens = "6"', "max_tokens is '6': must be a whole number"),
        ('[beams]\nbeam_width = "6"', "beam_width is '6': must be a whole number"),
    ],
)
def test_a_text_in_the_file_is_shown_as_it_is_written_there(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told_of(tmp_path / "b.toml", text, capsys).startswith(f"pagedec: error: {message}")


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("serve", "port = 5", "port is 5: not a field of {file}; it is a flag of pagedec serve: --port"),
        (
            "serve",
            "admin-port = 5",
            "admin-port is 5: not a field of {file}; it is a flag of pagedec serve: --admin-port",
        ),
        (
            "serve",
            "[sampling]\nport = 5",
            "port is 5: not a field of [sampling] in {file}; it is a flag of pagedec serve",
        ),
        ("generate", "json = true", "json is true: not a field of {file}; it is a flag of pagedec generate: --json"),
        ("generate", "[beam]\nx = 1", "beam is {{'x': 1}}: not a field of {file}; known are model, "),
        ("generate", 'qqq = "1"', "qqq is '1': not a field of {file}; known are model, "),
        ("tokenize", "lines = 1", "lines is 1: not a field of {file}; it is a flag of pagedec tokenize: --lines"),
    ],
    ids=str,
)
def test_a_name_in_the_file_that_is_a_flag_is_said_to_be_one(
    command: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "b.toml"
    assert told_of(file, text, capsys, command).startswith(f"pagedec: error: {message.format(file=file)}")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("[beam]\nx = 1", "beams"), ("[samplings]\nx = 1", "sampling"), ("engine_seed = 1", "seed"),
        ("engine-seed = 1", "seed"), ("kv-cache-memory = 1", "kv_cache_memory"),
    ],
)  # fmt: skip
def test_a_name_in_the_file_has_the_nearest_told(
    text: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told_of(tmp_path / "b.toml", text, capsys).endswith(
        f", num_threads, sampling, beams; did you mean {meant}?\n"
    )


def test_the_flag_that_names_a_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tokenize", "a", "--model", "./none") == 2
    assert capsys.readouterr().err == "pagedec: error: model is ./none: does not exist\n"
    assert run("tokenize", "a", "--tokenizer", "./none") == 2
    assert capsys.readouterr().err == "pagedec: error: tokenizer is ./none: does not exist\n"


def test_nobody_is_told_of_a_flag_that_the_command_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run("tokenize", "a", "--model", str(tmp_path)) == 2
    told = f"model is {tmp_path}: tokenizer.json: does not exist; name a tokenizer directory"
    assert capsys.readouterr().err == f"pagedec: error: {told}\n"


def test_keywords_in_errors_about_files_are_spelled_as_flags() -> None:
    error = ModelFileError("a.gguf", "has no tokenizer; name one with tokenizer, or set skip_tokenizer_init=True")
    assert spelled(error) == "a.gguf: has no tokenizer; name one with tokenizer, or set --skip-tokenizer-init"


LONG = '{"prompt_token_ids": [' + "9" * 5000 + "]}"


@pytest.mark.parametrize("line", ["{", "[1]", LONG, '{"prompt": "a", "prompt_token_ids": [1]}', '{"text": "a"}'])
def test_a_bad_json_line_is_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    assert run("generate", "-f", str(file)) == 2
    assert "p.jsonl line 2 is " in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["5", '{"prompt": "a"}'])
def test_numbers_on_lines_of_json_are_no_tokens_of_one_prompt(
    prompt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": {prompt}}}\n' * 2)
    assert run("generate", "-f", str(file)) == 2
    assert re.search("p.jsonl line 1: prompt is .*: must be text, or a list of token ids", capsys.readouterr().err)


def test_parameters_in_a_json_line_are_not_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 5}\n')
    assert run("generate", "-f", str(file)) == 2
    assert "p.jsonl line 1: max_tokens is 5: sampling parameters are given by flags" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--stop", "--logit-bias", "--config", "-f"])
def test_nesting_without_end(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = "[" * 20_000
    if flag in ("--config", "-f"):
        (tmp_path / "p.jsonl").write_text(("x=" if flag == "--config" else "") + value)
        value = str(tmp_path / "p.jsonl")
    assert run("generate", "a", flag, value) == 2
    err = capsys.readouterr().err
    assert err.startswith("pagedec: error: ") and len(err.splitlines()) == 1 and len(err) < 1000


def test_a_file_that_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"ab\xff")
    assert run("generate", "-f", str(file)) == 2
    assert "is not UTF-8: invalid start byte at byte 2" in capsys.readouterr().err


def test_a_wrong_debugging_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEDEC_ISSA", "avx2")
    assert run("doctor") == 2
    assert capsys.readouterr().err.startswith("pagedec: error: PAGEDEC_ISSA is not a known variable; known are ")


def test_too_few_files_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Libraries would end the process, or wait for ever."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, hard))
    try:
        status = run("serve", "--no-such-flag")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    said = "pagedec: error: ulimit -n is 16: must be at least 64, files that a command may have open\n"
    assert (status, capsys.readouterr().err) == (2, said)


# ---------------------------------------------------------------------------------------------------------------- help
@pytest.mark.parametrize(
    "command",
    [
        [],
        ["generate"],
        ["chat"],
        ["batch"],
        ["tokenize"],
        ["bench"],
        ["bench", "latency"],
        ["bench", "throughput"],
        ["doctor"],
    ],
)
def test_help_of_every_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*command, "--help")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {' '.join(['pagedec', *command])}")


def test_help_names_every_sampling_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("generate", "--help")
    shown = capsys.readouterr().out
    for name, (rule, _) in rules(SamplingParams).items():
        assert f"--{name.replace('_', '-')}" in shown
        assert " ".join(rule.help.split()[:3]) in " ".join(shown.split())


def test_help_and_mistakes_need_no_torch() -> None:
    program = (
        "import sys\nfrom pagedec.cli.main import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "status = main(['generate', 'a', '--temperature', '-1'])\n"
        "slow = {'numpy', 'torch', 'transformers', 'tokenizers', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'{status} {slow}' if slow or status != 2 else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=SOURCES, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_python_m_pagedec() -> None:
    command = [sys.executable, "-m", "pagedec", "generate", "a", "--n", "0"]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pagedec: error: n is 0: must be a whole number from 1 to 16384\n"
