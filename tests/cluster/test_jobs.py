"""A job over the engines of a local Ray cluster has the answers of one engine, whoever dies meanwhile."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedec import LLM, SamplingParams
from pagedec.batch import BatchJob, run_batch
from pagedec.config import EngineConfig
from pagedec.errors import InvalidArgument
from tests.batch.files import read_output, request, stable, write_input
from tests.batch.test_job import BAD, good_lines
from tests.batch.tiny import make_tiny
from tests.support import wait_for

ray = pytest.importorskip("ray", reason="ray is not installed")
KINDS: dict[str, Any] = {"load_format": "dummy", "num_blocks": 256, "max_num_seqs": 8}


pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), **KINDS) as made:
        yield made


def test_a_job_on_two_engines(
    llm: LLM, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them dies as soon as it has lines; a line that ends whoever takes it gets an error record."""
    from pagedec.batch import cluster

    lines: list[Any] = [*good_lines(40), *BAD]
    lines.insert(7, request("poison", prompt="x"))
    source, out, whole = write_input(tmp_path / "in", lines), tmp_path / "out", tmp_path / "whole"
    run_batch(llm, source, whole, defaults={"max_tokens": 8})
    plain = cluster._Engine

    class Poisoned(plain):  # type: ignore[valid-type,misc]
        def work(self, asked: list[Any]) -> Any:
            if any(each[1].custom_id == "poison" for each in asked):
                os._exit(1)
            return super().work(asked)

    monkeypatch.setattr(cluster, "_Engine", Poisoned)
    config = EngineConfig.from_kwargs(model=str(tiny), **KINDS)
    with BatchJob(source, out, model=config.model, defaults={"max_tokens": 8}) as job:
        done = cluster.run_on_ray(job, config, replicas=2, window=2)
    assert done.num_answered == len(lines) and done.num_errors == len(BAD) + 1
    assert "an engine is lost with" in caplog.text
    records, expected = read_output(out), read_output(whole)
    told = records.pop(7)
    assert (
        told["response"]["status_code"] == 500 and "has ended 2 engines" in told["response"]["body"]["error"]["message"]
    )
    expected.pop(7)
    assert list(map(stable, records)) == list(map(stable, expected))

    run_batch(llm, source, out, defaults={"max_tokens": 8}, retry_failed=True)
    assert list(map(stable, read_output(out))) == list(map(stable, read_output(whole)))


@pytest.mark.long
def test_what_cannot_be_loaded_ends_the_job(tiny: Path, tmp_path: Path) -> None:
    from pagedec.batch.cluster import run_on_ray

    config = EngineConfig.from_kwargs(model=str(tmp_path / "nowhere"))
    source = write_input(tmp_path / "in", good_lines(2))
    with BatchJob(source, tmp_path / "out", model=config.model) as job, pytest.raises(ValueError, match="nowhere"):
        run_on_ray(job, config, replicas=1)


def test_a_restart_throws_nothing_away_before_an_engine_has_loaded(tiny: Path, tmp_path: Path) -> None:
    from pagedec.batch.cluster import run_on_ray

    config = EngineConfig.from_kwargs(model=str(tmp_path / "nowhere"))
    source, out = write_input(tmp_path / "in", [BAD[0]]), tmp_path / "out"
    with BatchJob(source, out, model=EngineConfig.from_kwargs(model=str(tiny)).model) as job:
        list(job.begin(False, None).requests())
    before = out.read_bytes()
    assert before
    with BatchJob(source, out, model=config.model, restart=True) as job:
        with pytest.raises(ValueError, match="nowhere"):
            run_on_ray(job, config, replicas=1)
        assert not job.begun
    assert out.read_bytes() == before


def test_an_engine_that_finds_no_room_while_another_works(
    llm: LLM, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For its workers, say: the arguments are right, and the job goes on."""
    from pagedec.batch import cluster

    source, out, loaded = write_input(tmp_path / "in", good_lines(15)), tmp_path / "out", tmp_path / "loaded"
    run_batch(llm, source, tmp_path / "whole", defaults={"max_tokens": 8})
    plain = cluster._Engine

    class Unlucky(plain):  # type: ignore[valid-type,misc]
        def load(self, arguments: dict[str, Any], terms: Any) -> Any:
            with contextlib.suppress(FileExistsError):
                loaded.touch(exist_ok=False)
                return super().load(arguments, terms)
            wait_for((tmp_path / "works").exists)
            (tmp_path / "fails").touch()
            raise InvalidArgument("tensor_parallel_size", 2, "needs 2 times the room")

        def work(self, asked: list[Any]) -> Any:
            (tmp_path / "works").touch()
            wait_for((tmp_path / "fails").exists)
            time.sleep(0.2)  # many times, in one of which the driver hears of it
            return super().work(asked)

    monkeypatch.setattr(cluster, "_Engine", Unlucky)
    config = EngineConfig.from_kwargs(model=str(tiny), **KINDS)
    with BatchJob(source, out, model=config.model, defaults={"max_tokens": 8}) as job:
        cluster.run_on_ray(job, config, replicas=2, window=1)
    assert list(map(stable, read_output(out))) == list(map(stable, read_output(tmp_path / "whole")))
    assert "the job goes on with 1 engine: tensor_parallel_size is 2: needs 2 times the room" in caplog.text


@pytest.mark.long
def test_an_engine_that_dies_whenever_it_loads_while_another_works(
    llm: LLM, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a node without memory for it, say: it is started three times, not for as long as the job takes."""
    from pagedec.batch import cluster

    source, out, tries = write_input(tmp_path / "in", good_lines(4)), tmp_path / "out", tmp_path / "tries"
    run_batch(llm, source, tmp_path / "whole", defaults={"max_tokens": 8})
    tries.mkdir()
    plain = cluster._Engine

    class Mortal(plain):  # type: ignore[valid-type,misc]
        def load(self, arguments: dict[str, Any], terms: Any) -> Any:
            with contextlib.suppress(FileExistsError):
                (tmp_path / "loaded").touch(exist_ok=False)
                return super().load(arguments, terms)
            wait_for((tmp_path / "works").exists)
            (tries / str(os.getpid())).touch()
            os._exit(1)

        def work(self, asked: list[Any]) -> Any:
            (tmp_path / "works").touch()
            wait_for((tmp_path / "noticed").exists)  # the job may not end before
            return super().work(asked)

    def do_without(self: Any, why: Any) -> None:
        plain_do_without(self, why)
        (tmp_path / "noticed").touch()

    plain_do_without = cluster._Cluster._do_without
    monkeypatch.setattr(cluster._Cluster, "_do_without", do_without)
    monkeypatch.setattr(cluster, "_Engine", Mortal)
    config = EngineConfig.from_kwargs(model=str(tiny), **KINDS)
    with BatchJob(source, out, model=config.model, defaults={"max_tokens": 8}) as job:
        cluster.run_on_ray(job, config, replicas=2, window=1)
    assert list(map(stable, read_output(out))) == list(map(stable, read_output(tmp_path / "whole")))
    assert "the job goes on with 1 engine: 3 in a row could not load; the last: ActorDiedError" in caplog.text
    assert len(list(tries.iterdir())) == cluster.MOST_UNLOADED


@pytest.mark.long
def test_an_engine_that_hangs_while_it_loads(
    llm: LLM, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pagedec.batch import cluster

    source, out, hung = write_input(tmp_path / "in", good_lines(4)), tmp_path / "out", tmp_path / "hung"
    run_batch(llm, source, tmp_path / "whole", defaults={"max_tokens": 8})
    plain = cluster._Engine

    class Stuck(plain):  # type: ignore[valid-type,misc]
        def load(self, arguments: dict[str, Any], terms: Any) -> Any:
            with contextlib.suppress(FileExistsError):
                hung.touch(exist_ok=False)
                time.sleep(600)
            return super().load(arguments, terms)

    monkeypatch.setattr(cluster, "_Engine", Stuck)
    config = EngineConfig.from_kwargs(model=str(tiny), step_timeout=9.0, **KINDS)
    with BatchJob(source, out, model=config.model, defaults={"max_tokens": 8}) as job:
        cluster.run_on_ray(job, config, replicas=1)
    assert list(map(stable, read_output(out))) == list(map(stable, read_output(tmp_path / "whole")))
    assert "an engine is lost with 0 lines" in caplog.text


def test_the_stage(tiny: Path, llm: LLM) -> None:
    from pagedec.batch.ray_stage import GenerateStage

    for module in ("pandas", "pyarrow"):
        pytest.importorskip(module, reason="Ray Data needs it")
    params = SamplingParams(temperature=0, max_tokens=4)
    dataset = ray.data.from_items([{"prompt": "One"}, {"prompt": "y" * 9000}, {"prompt": "Two"}])
    told = {"model": str(tiny), "params": params, **KINDS}
    rows = dataset.map_batches(GenerateStage, fn_constructor_kwargs=told, concurrency=1, num_cpus=1).take_all()
    found = {row["prompt"]: row for row in rows}
    for output in llm.generate(["One", "Two"], params, use_tqdm=False):
        row, answer = found[str(output.prompt)], output.outputs[0]
        assert (row["text"], row["finish_reason"], row["error"]) == (answer.text, answer.finish_reason, None)
        assert list(row["token_ids"]) == list(answer.token_ids)
    failed = found["y" * 9000]
    assert failed["text"] == "" and "prompt" in failed["error"] and failed["finish_reason"] is None


def test_the_stage_reads_chats(tiny: Path) -> None:
    from pagedec.batch.ray_stage import GenerateStage

    stage = GenerateStage(model=str(tiny), column="messages", params=SamplingParams(max_tokens=2), **KINDS)
    chats = np.empty(1, object)
    chats[0] = [{"role": "user", "content": "Hi"}]
    assert stage({"messages": chats})["error"].tolist() == [None]
    with pytest.raises(InvalidArgument, match="column is 'messages': must be one of the batch: prompt"):
        stage({"prompt": chats})


@pytest.mark.long
def test_the_example(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("pandas", "pyarrow"):
        pytest.importorskip(module, reason="Ray Data needs it")
    path = Path(__file__).parents[2] / "examples" / "ray_data.py"
    example = importlib.util.spec_from_file_location("ray_data_example", path)
    assert example is not None and example.loader is not None
    module = importlib.util.module_from_spec(example)
    example.loader.exec_module(module)
    module.main()
    told = capsys.readouterr().out
    assert all(f"{prompt!r} -> " in told for prompt in module.PROMPTS) and "Paris" in told
