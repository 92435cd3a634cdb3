"""What `beam_search` gives, in vLLM's form."""

from __future__ import annotations

from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from pagedec.params import BeamSearchParams
from pagedec.text.tokenizer import Tokenizer


def as_beams(params: Any) -> BeamSearchParams:
    """A call's parameters, with a report of each token, as sequences have one. Raises `InvalidArgument`."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidArgument("params", params, "must be a BeamSearchParams; other ones go to `generate`")
    return params.clone(logprobs=0) if params.logprobs is None else params


def beam_output(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """One prompt's answers as whole sequences, the best first."""
    prompt = output.prompt
    if prompt is None and tokenizer is not None:
        prompt = tokenizer.decode(output.prompt_token_ids)
    return BeamSearchOutput([_sequence(output, answer, params, prompt) for answer in output.outputs])


def _sequence(
    output: RequestOutput, answer: CompletionOutput, params: BeamSearchParams, prompt: str | None
) -> BeamSearchSequence:
    token_ids, stop_reason = answer.token_ids, answer.stop_reason
    if answer.finish_reason == "stop" and not isinstance(stop_reason, str):
        stop_reason = token_ids[-1]
        token_ids = token_ids if params.include_stop_str_in_output else token_ids[:-1]
    return BeamSearchSequence(
        tokens=[*output.prompt_token_ids, *token_ids],
        logprobs=answer.logprobs or [],
        cum_logprob=answer.cumulative_logprob or 0.0,
        text=None if prompt is None or not params.detokenize else prompt + answer.text,
        finish_reason=answer.finish_reason,
        stop_reason=stop_reason,
        score=answer.score,
    )
