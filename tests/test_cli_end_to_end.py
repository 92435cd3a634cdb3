"""The command line with the real engine behind it: a tiny random model, and the embedded default model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedec.cli import main
from pagedec.formats.resolve import default_model_path

SOURCES = Path(__file__).resolve().parent.parent
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a model of two layers with random weights, and no tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(TINY))
    return ["--model", str(directory), "--load-format", "dummy", "--skip-tokenizer-init", "--num-blocks", "64"]


def records(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """What a successful `generate --json` prints."""
    status = main.main(["generate", "--json", *arguments])
    out, err = capsys.readouterr()
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


def answers(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[list[int]]]:
    return [[answer["token_ids"] for answer in record["outputs"]] for record in records(capsys, *arguments)]


def test_greedy_tokens_do_not_depend_on_company(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos", *tiny]
    together = answers(capsys, "5,6,7", "8,9", "5,6,7,8", *flags)
    assert [len(answer) for [answer] in together] == [12, 12, 12]
    alone = [answers(capsys, prompt, *flags)[0] for prompt in ("5,6,7", "8,9", "5,6,7,8")]
    assert together == alone


def test_a_seed_names_the_tokens(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["5,6,7", "--max-tokens", "16", "--ignore-eos", "--n", "2", *tiny]
    [first], [again], [other] = (answers(capsys, "--seed", seed, *flags) for seed in ("7", "7", "8"))
    assert first == again
    assert len({tuple(answer) for answer in [*first, *other]}) == 4


@pytest.mark.parametrize("seed", [[], ["--seed", "none"], ["--seed", "none", "--engine-seed", "9"]])
def test_the_same_command_gives_the_same_answers(
    seed: list[str], tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no seed is set, the engine's own seed names the randomness."""
    flags = ["5,6,7", "5,6,7", "--max-tokens", "16", "--ignore-eos", *seed, *tiny]
    first, again = answers(capsys, *flags), answers(capsys, *flags)
    assert first == again and first[0] != first[1]


def test_engine_arguments_from_a_file(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(
        f'model = "{tiny[1]}"\nload_format = "dummy"\nskip_tokenizer_init = true\nnum_blocks = 64\nblock_size = 32\n'
        "max_num_batched_tokens = 4\nenable_prefix_caching = false\n"
    )
    flags = ["5,6,7,8,9,10", "--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
    assert answers(capsys, "--config", str(file), *flags) == answers(capsys, *flags, *tiny)


def test_stop_token_ids_end_an_answer(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["5,6", "--temperature", "0", "--max-tokens", "8", "--ignore-eos", *tiny]
    [[plain]] = answers(capsys, *flags)
    [record] = records(capsys, "--stop-token-ids", str(plain[3]), *flags)
    [answer] = record["outputs"]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", plain[3])
    assert answer["token_ids"] == plain[: plain.index(plain[3]) + 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["5,512"], "512"),
        (["5,6", "--max-model-len", "1000"], "max_model_len is 1000: must be at most 256"),
        (["1," * 300 + "1"], "256"),
    ],
)
def test_the_engine_s_own_refusals_are_one_line(
    arguments: list[str], message: str, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["generate", *arguments, *tiny]) == 2
    err = capsys.readouterr().err
    assert err.startswith("pagedec: error: ") and len(err.splitlines()) == 1
    assert message in err


def test_a_missing_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["generate", "a", "--model", str(tmp_path / "none.gguf")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("pagedec: error: ") and "none.gguf" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_bench(kind: str, tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"latency": ["--batch-size", "2", "--num-iters", "2"], "throughput": ["--num-prompts", "3"]}[kind]
    assert main.main(["bench", kind, "--json", "--input-len", "8", "--output-len", "4", *sizes, *tiny]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["output_tokens_per_second"] > 0
    assert result["num_steps"] >= 4
    assert result["time_per_output_token_median_ms"] > 0 and result["execute_mean_ms"] > 0


def test_the_default_model_from_a_shell(tmp_path: Path) -> None:
    if default_model_path() is None:
        pytest.skip("the default model is not installed")
    command = [sys.executable, "-m", "pagedec", "generate", "--temperature", "0", "--max-tokens", "8", "--progress"]
    environment = dict(os.environ)
    done = subprocess.run(
        command,
        input="The capital of France is\n",
        cwd=SOURCES,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "=== The capital of France is"
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr and "pagedec: smollm2: kernels " in done.stderr


@pytest.mark.parametrize("content", [None, "{"])
def test_a_chat_is_not_told_to_do_without_a_tokenizer(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It refuses that; generate does not."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    model = ["--model", str(tmp_path), "--load-format", "dummy", "--num-blocks", "64"]
    assert main.main(["chat", *model]) == main.USER_ERROR
    told = capsys.readouterr().err
    assert told.startswith(f"pagedec: error: model is {tmp_path}: ") and len(told.splitlines()) == 1
    assert main.main(["generate", "one", *model]) == main.USER_ERROR
    instead = "; or set --skip-tokenizer-init and pass token ids\n"
    assert capsys.readouterr().err == told.removesuffix("\n") + instead
