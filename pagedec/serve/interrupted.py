"""Streams that go on: what a client needs for that, and what it sends back."""

from __future__ import annotations

import dataclasses

from pagedec.core.resuming import Resume, ToldAnswer
from pagedec.errors import InvalidArgument, Shown
from pagedec.llm.async_llm import AsyncLLM
from pagedec.llm.loras import KnownLora
from pagedec.params import SamplingParams
from pagedec.serve.orders import Limits, Order, read_ids
from pagedec.serve.statuses import Refusal
from pagedec.v1 import generation_service_pb2 as pb


def fingerprint_of(llm: AsyncLLM, lora: KnownLora | None = None) -> pb.Fingerprint:
    """By what clients tell whether two servers give the same tokens."""
    geometry = llm.engine.executor.geometry
    model = geometry.model if lora is None else f"{geometry.model}+{lora.adapter.file.digest}"
    return pb.Fingerprint(model=model, numerics=geometry.numerics)


def read_resume(given: pb.Resume, order: Order, own: pb.Fingerprint, limits: Limits) -> tuple[Order, Resume]:
    """The order with the seed that it began with, and what was told of it. Raises `InvalidArgument`, and `Refusal` for
    what another model has begun, or where another server's numbers do."""
    if given.fingerprint.model != own.model:
        problem = "resume.fingerprint.model is another: tokens of one model mean nothing to another one"
        raise Refusal("FAILED_PRECONDITION", "RESUME_MODEL", problem)
    params = order.params
    if given.fingerprint.numerics != own.numerics and not isinstance(params, SamplingParams):
        problem = (
            "resume.fingerprint.numerics is another: a search that is begun anew must find what it had found, and this "
            "server's numbers have other bits"
        )
        raise Refusal("FAILED_PRECONDITION", "RESUME_NUMERICS", problem)
    if params.seed is not None and params.seed != given.seed:
        raise InvalidArgument("resume.seed", given.seed, f"must be the request's own seed, {params.seed}")
    if len(given.answers) > params.num_answers:  # before they are read: a message may have millions of empty ones
        limit = f"must be at most {params.num_answers}: the request has no more answers"
        raise InvalidArgument("resume.answers", Shown(f"{len(given.answers)} of them"), limit)
    answers = [
        ToldAnswer(
            tuple(read_ids(answer.token_ids, f"resume.answers[{i}].token_ids", limits)),
            answer.num_characters,
            tuple(answer.logprobs),
        )
        for i, answer in enumerate(given.answers)
    ]
    return dataclasses.replace(order, params=params.clone(seed=given.seed)), Resume(tuple(answers))
