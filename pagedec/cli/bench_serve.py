"""Load a server over gRPC: requests at a rate, or with a number of them at the same time."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedec.cli.arguments import add_options, add_sampling_arguments, given_options, given_sampling
from pagedec.cli.console import DONE, FAILED, say, written
from pagedec.cli.reach import ADDRESS, Reach
from pagedec.cli.texts import read_text
from pagedec.errors import InvalidArgument
from pagedec.fields import Integer, Number, Text, Texts, check_fields, option

if TYPE_CHECKING:
    from pagedec.v1 import generation_service_pb2 as pb

NUM_PLAIN_IDS = 256
"""Prompt tokens are drawn from this many ids: every vocabulary has them."""
SENT = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "ignore_eos")
"""Sampling flags that are sent with each request."""
UNITS = {
    "duration": "s", "request_throughput": "requests/s", "output_throughput": "tokens/s",
    "request_goodput": "requests/s",
}  # fmt: skip
"""Of what a load amounts to, where vLLM's names for it say none."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is sent, to whom, how fast."""

    address: str = option(ADDRESS, Text("the server's address"))
    model: tuple[str, ...] = option(
        (), Texts("name of the server's model, or of an adapter; several take turns; none: its model")
    )
    num_prompts: int = option(64, Integer("requests", low=1))
    request_rate: float = option(0.0, Number("requests a second on the mean; 0: all at once", low=0))
    burstiness: float = option(
        1.0, Number("of the gaps between requests: 1 is a Poisson process, more is more even", above=0)
    )
    max_concurrency: int | None = option(None, Integer("requests at the same time; none: any", low=1, optional=True))
    dataset_path: str | None = option(
        None, Text('file of JSON lines with "prompt"; none: random token ids', optional=True)
    )
    input_len: int = option(128, Integer("tokens of a random prompt", low=1))
    output_len: int = option(128, Integer("tokens of an answer", low=1))
    stream_interval: int = option(1, Integer("tokens that make a message", low=1))
    timeout: float | None = option(None, Number("deadline of each request in seconds", above=0, optional=True))
    goodput: tuple[str, ...] = option(
        (), Texts('what a good request keeps within, such as "ttft:500" and "tpot:50", in milliseconds; also e2el')
    )
    workload_seed: int = option(0, Integer("of random prompts and gaps"))
    result: str | None = option(None, Text("file for the result, with every request, as JSON", optional=True))
    plot: str | None = option(None, Text("file for a picture, NAME.png; needs matplotlib", optional=True))

    def __post_init__(self) -> None:
        check_fields(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a load."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    add_options(parser, "load", LoadOptions)
    add_options(parser, "connection", Reach)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Send the load and say what became of it; the exit status is 1 where nothing was answered."""
    options, reach = given_options(arguments, LoadOptions), given_options(arguments, Reach)
    sampling = given_sampling(arguments)
    for name in sampling:
        if name not in SENT:
            raise InvalidArgument(name, sampling[name], f"must not be given: a load sends {', '.join(SENT)}")
    from pagedec.serve.load import parse_goals, record, summary

    goals = parse_goals(options.goodput)
    for field in ("result", "plot"):
        _check_place(field, getattr(options, field))
    requests = made(options, sampling)
    outcomes = asyncio.run(_sent(options, reach, requests))
    result = summary(outcomes, goals)
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            label = name.replace("_", " ") + (f" ({UNITS[name]})" if name in UNITS else "")
            number = f"{value:12.2f}" if isinstance(value, float) else f"{value!s:>9}   "
            print(f"{label:32} {number}".rstrip())
    for code, problem in {outcome.code: outcome.problem for outcome in outcomes if outcome.problem}.items():
        say(f"{code}: {problem}{reach.hint(problem)}")
    status = DONE if result["completed"] else FAILED
    if options.result is not None:
        text = json.dumps({**result, "requests": record(outcomes)})
        status |= written("result", options.result, lambda path: Path(path).write_text(text, encoding="utf-8"))
    if options.plot is not None:
        status |= written("plot", options.plot, lambda path: _draw(path, outcomes))
    return status


def _check_place(field: str, path: str | None) -> None:
    """Raise `InvalidArgument`, before anything is sent, for a file that cannot be written behind it."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    try:
        is_there, is_folder = Path(path).exists(), folder.is_dir()
    except OSError as error:  # a name that is too long
        raise InvalidArgument(field, path, f"cannot be written: {error.strerror}") from error
    if is_there and (Path(path).is_dir() or not os.access(path, os.W_OK)):
        raise InvalidArgument(field, path, "cannot be written: must be a file that may be written to")
    if not is_there and not (is_folder and os.access(folder, os.W_OK | os.X_OK)):
        raise InvalidArgument(field, path, f"cannot be written: {folder} must be a directory that may be written to")
    if field == "plot" and Path(path).suffix.lower() != ".png":
        raise InvalidArgument("plot", path, "must be the name of a picture, which ends in .png")
    if field == "plot" and importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgument("plot", path, "needs matplotlib: pip install 'pagedec[plot]'")


def made(options: LoadOptions, sampling: dict[str, Any]) -> list[pb.GenerateStreamRequest]:
    """The requests. Raises `InvalidArgument` for a file that has none."""
    import numpy as np

    from pagedec.v1 import generation_service_pb2 as pb
    from pagedec.v1 import parameters_pb2 as pp
    from pagedec.v1 import prompt_pb2 as pr

    values = {"temperature": 0.0, "ignore_eos": True, "max_tokens": options.output_len, **sampling}
    drawing = {name: value for name, value in values.items() if name in ("temperature", "top_p", "top_k", "min_p")}
    parameters = pp.Parameters(
        sampling=pp.Sampling(**drawing),
        stopping=pp.Stopping(max_tokens=values["max_tokens"], ignore_eos=values["ignore_eos"]),
        seed=values.get("seed"),
    )
    if options.dataset_path is None:
        rng = np.random.default_rng(options.workload_seed)
        rows = rng.integers(0, NUM_PLAIN_IDS, (options.num_prompts, options.input_len)).tolist()
        prompts = [pr.Prompt(token_ids=pr.TokenIds(ids=row)) for row in rows]
    else:
        texts = read_prompts(options.dataset_path)
        prompts = [pr.Prompt(text=texts[i % len(texts)]) for i in range(options.num_prompts)]
    common: dict[str, Any] = {"parameters": parameters, "stream_interval": options.stream_interval}
    models = options.model or ("",)
    return [
        pb.GenerateStreamRequest(prompt=prompt, model=models[i % len(models)], **common)
        for i, prompt in enumerate(prompts)
    ]


def read_prompts(path: str) -> list[str]:
    """The prompts of a file of JSON lines. Raises `InvalidArgument` naming the line."""
    lines = read_text("dataset_path", path).split("\n")  # in JSON, U+2028 ends no line
    texts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise InvalidArgument(
                "dataset_path", path, f'must have objects with a text "prompt"; line {number} is none'
            )
        texts.append(text)
    if not texts:
        raise InvalidArgument("dataset_path", path, "must have at least one line")
    return texts


async def _sent(options: LoadOptions, reach: Reach, requests: Sequence[Any]) -> list[Any]:
    import grpc.aio

    from pagedec.serve.load import Sender, start_times

    starts = start_times(len(requests), options.request_rate, options.burstiness, options.workload_seed)
    metadata, credentials = reach.metadata(), reach.credentials()
    if credentials is None:
        channel = grpc.aio.insecure_channel(options.address)
    else:
        channel = grpc.aio.secure_channel(options.address, credentials, reach.options())
    async with channel:
        return await Sender(channel, metadata).run(requests, starts, options.max_concurrency, options.timeout)


def _draw(path: str, outcomes: Sequence[Any]) -> None:
    """Times to the first token and between messages as cumulative shares."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
    gaps = [gap for outcome in outcomes for gap in outcome.gaps]
    firsts = [outcome.ttft for outcome in outcomes if outcome.ttft is not None]
    ends = [outcome.e2el for outcome in outcomes if outcome.code == "OK"]
    for panel, title, values in zip(
        panels, ("time to first token", "between messages", "end to end"), (firsts, gaps, ends), strict=True
    ):
        panel.set(title=title, xlabel="ms", ylabel="share of all", ylim=(0, 1))
        if values:
            panel.ecdf([1e3 * value for value in values])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"drawn: {path}", file=sys.stderr)
