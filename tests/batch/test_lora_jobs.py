"""Jobs whose bodies name adapters as their model: answers are those of the adapter, in one go or in many, here or on a
cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, LoRARequest, SamplingParams
from pagedec.batch import BatchJob, run_batch
from pagedec.cli import main
from pagedec.config import EngineConfig, ModelConfig
from pagedec.errors import InvalidArgument, ModelFileError
from tests.batch.files import read_output, request, stable, write_input
from tests.batch.test_kill import ENGINE
from tests.batch.tiny import make_lora

GREEDY = SamplingParams(temperature=0, max_tokens=6)
DEFAULTS = {"temperature": 0, "max_tokens": 6}
KINDS: dict[str, Any] = {"load_format": "dummy", "num_blocks": 256, "max_num_seqs": 8, "enable_lora": True}


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters that change every answer."""
    folder = tmp_path_factory.mktemp("loras")
    return {name: str(make_lora(folder / name, rank)) for name, rank in (("red", 4), ("blue", 16))}


@pytest.fixture(scope="module")
def adapted(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), **KINDS) as made:
        yield made


def lines(tiny: Path) -> list[dict[str, Any]]:
    """Of the model, by two names and by none, and of its adapters."""
    names = [None, "red", "blue", str(tiny), "red", tiny.name, "blue"]
    return [
        *(request(f"c{i}", prompt=f"line {i % 2}", model=name) for i, name in enumerate(names)),
        request("chat", chat=True, messages=[{"role": "user", "content": "Hi"}], model="blue"),
        request("wrong", prompt="x", model="green"),
    ]


def wanted(llm: LLM, loras: dict[str, str], tiny: Path) -> list[str]:
    def answer(line: dict[str, Any]) -> str:
        body = line["body"]
        name = body["model"]
        lora = LoRARequest(name, 1 + [*loras].index(name), loras[name]) if name in loras else None
        call, given = (llm.chat, body["messages"]) if "messages" in body else (llm.generate, body["prompt"])
        output = call(given, GREEDY, use_tqdm=False, lora_request=lora)[0]
        return output.outputs[0].text

    return [answer(line) for line in lines(tiny)[:-1]]


def texts(records: list[dict[str, Any]]) -> list[str]:
    choices = [record["response"]["body"]["choices"][0] for record in records]
    return [choice.get("text", choice.get("message", {}).get("content")) for choice in choices]


def test_a_body_names_its_adapter(adapted: LLM, loras: dict[str, str], tiny: Path, tmp_path: Path) -> None:
    source, out = write_input(tmp_path / "in", lines(tiny)), tmp_path / "out"
    summary = run_batch(adapted, source, out, defaults=DEFAULTS, loras=loras)
    *records, wrong = read_output(out)
    assert summary.num_errors == 1 and texts(records) == wanted(adapted, loras, tiny)
    assert len({*texts(records)[:3]}) == 3 and len({record["id"][-8:] for record in records}) == 1
    assert [record["response"]["body"]["model"] for record in records[:3]] == [str(tiny), "red", "blue"]
    error = wrong["response"]["body"]["error"]
    assert wrong["response"]["status_code"] == 404 and f"this job runs {tiny}, red, blue; with any" in error["message"]


def test_a_job_goes_on_with_the_same_adapters(adapted: LLM, loras: dict[str, str], tiny: Path, tmp_path: Path) -> None:
    source, out, whole = write_input(tmp_path / "in", lines(tiny)), tmp_path / "out", tmp_path / "whole"
    run_batch(adapted, source, whole, defaults=DEFAULTS, loras=loras)
    out.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:4]))
    for other in ({}, {"red": loras["blue"], "blue": loras["red"]}, {"red": loras["red"]}):
        with pytest.raises(InvalidArgument, match="was begun with .* with other adapters"):
            run_batch(adapted, source, out, defaults=DEFAULTS, loras=other)
    swapped = dict(reversed(loras.items()))
    assert run_batch(adapted, source, out, defaults=DEFAULTS, loras=swapped).num_answered_before == 4
    assert list(map(stable, read_output(out))) == list(map(stable, read_output(whole)))


def test_mistakes(llm: LLM, adapted: LLM, loras: dict[str, str], tiny: Path, tmp_path: Path) -> None:
    source, out = write_input(tmp_path / "in", lines(tiny)[:1]), tmp_path / "out"
    run_batch(adapted, source, out, defaults=DEFAULTS)
    before = out.read_bytes()
    again: dict[str, Any] = {"defaults": DEFAULTS, "restart": True}
    with pytest.raises(InvalidArgument, match="^lora_request is 'red': must be None: .* without enable_lora"):
        run_batch(llm, source, out, loras=loras, **again)
    with pytest.raises(ModelFileError, match="does not exist"):
        run_batch(adapted, source, out, loras={"gone": str(tmp_path / "gone")}, **again)
    assert out.read_bytes() == before, "nothing is thrown away for adapters that cannot be read"
    for name, path, message in ((tiny.name, "p", "must be another name than the model's"), ("", "p", "lora_name is ''"),
                                ("a", "", "lora_path is ''")):  # fmt: skip
        with pytest.raises(InvalidArgument, match=message):
            BatchJob(source, tmp_path / "new", model=ModelConfig(str(tiny)), loras={name: path})
    assert not (tmp_path / "new").exists()


def test_the_command(loras: dict[str, str], adapted: LLM, tiny: Path, tmp_path: Path) -> None:
    source, out = write_input(tmp_path / "in", lines(tiny)), tmp_path / "out"
    flags = ["--model", str(tiny), *ENGINE, "--temperature", "0", "--max-tokens", "6", "--max-loras", "2"]
    named = [flag for name, path in loras.items() for flag in ("--lora", f"{name}={path}")]
    assert main.main(["batch", "-i", str(source), "-o", str(out), *flags, *named]) == 0
    assert texts(read_output(out)[:-1]) == wanted(adapted, loras, tiny)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora", "red"], "lora is red: must be NAME=PATH, the path that of a directory that PEFT has written, or a"),
        (["--lora", "=p"], "lora is =p: must be NAME=PATH"), (["--lora", "a="], "lora is a=: must be NAME=PATH"),
        (["--lora", "a=p", "--lora", "a=q"], "lora is a=q: must have a name of its own: a is p"),
        (["--lora", "a=p", "--no-enable-lora"], "must not be given with --no-enable-lora"),
        (["--lora", "a=/none"], "/none: does not exist"),
        (["--lora", "MODEL=p"], "error: lora is MODEL: must be another name than"),
    ],
)  # fmt: skip
def test_mistakes_of_the_command(
    flags: list[str], message: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_input(tmp_path / "in", lines(tiny)[:1])
    given = ["-i", str(source), "-o", str(tmp_path / "out"), "--model", str(tiny), *ENGINE]
    given += [flag.replace("MODEL", tiny.name) for flag in flags]
    assert main.main(["batch", *given]) == main.USER_ERROR
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("pagedec: error: ") and message.replace("MODEL", tiny.name) in told


def test_an_engine_of_a_cluster(adapted: LLM, loras: dict[str, str], tiny: Path, tmp_path: Path) -> None:
    """What an actor is asked, with the terms that it is sent."""
    from pagedec.batch.cluster import _Engine
    from pagedec.batch.lines import parse_line, read_lines

    source = write_input(tmp_path / "in", lines(tiny))
    config = EngineConfig.from_kwargs(model=str(tiny), **KINDS)
    with BatchJob(source, tmp_path / "out", model=config.model, defaults=DEFAULTS, loras=loras) as job:
        actor = _Engine("[]")
        actor.load(config.to_kwargs(), job.terms)
        turn = actor.work([(line, parse_line(line)) for line in read_lines(source)])
        records = [answered.record for answered in turn.records]
        while turn.num_pending:
            turn = actor.work([])
            records += [answered.record for answered in turn.records]
        assert actor._answering is not None
        actor._answering._llm.close()
    found = sorted(records, key=lambda record: int(record["id"].split("-")[1]))
    assert texts([dict(record) for record in found[:-1]]) == wanted(adapted, loras, tiny)
