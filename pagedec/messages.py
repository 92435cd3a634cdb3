"""What a server and its clients have in common: what the contract's messages call a parameter, a reason or an error."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from pagedec.v1 import answer_pb2, parameters_pb2

DOMAIN = "pagedec.dev"
"""Whose reasons an error's are."""
DETAILS = "grpc-status-details-bin"
"""The trailer that has an error's google.rpc.Status."""

SAMPLING = {name: name for name in ("n", "temperature", "top_p", "top_k", "min_p")}
BEAMS = {
    name: name
    for name in (
        "beam_width", "num_return_sequences", "length_penalty", "do_sample", "temperature", "top_p", "top_k", "min_p",
        "num_beam_groups", "diversity_penalty", "hf_semantics",
    )
}  # fmt: skip
STOPPING = {"include_stop": "include_stop_str_in_output"} | {
    name: name for name in ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
}
RULES = {
    name: name
    for name in (
        "presence_penalty", "frequency_penalty", "repetition_penalty", "no_repeat_ngram_size", "logit_bias",
        "allowed_token_ids", "bad_words",
    )
}  # fmt: skip
REPORTS = {"logprobs": "logprobs", "prompt_logprobs": "prompt_logprobs"}
WHOLE = {"seed": "seed", "truncate_prompt_tokens": "truncate_prompt_tokens"}
"""What a message's fields are called in parameters: of Sampling, BeamSearch, Stopping, LogitsRules, Reports, and of
Parameters itself."""
CONSTRAINTS = {
    "json_schema": "json", "json_object": "json_object", "regex": "regex", "grammar": "grammar", "choice": "choice",
}  # fmt: skip
JSON_OPTIONS = {
    "no_whitespace": "disable_any_whitespace",
    "no_additional_properties": "disable_additional_properties",
    "whitespace_pattern": "whitespace_pattern",
}
"""What a Constraint's fields are called in StructuredOutputsParams."""
EARLY = {
    parameters_pb2.EARLY_STOPPING_UNSPECIFIED: False,
    parameters_pb2.EARLY_STOPPING_HEURISTIC: False,
    parameters_pb2.EARLY_STOPPING_ALWAYS: True,
    parameters_pb2.EARLY_STOPPING_NEVER: "never",
}
REASONS = {
    None: answer_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": answer_pb2.FINISH_REASON_STOP,
    "length": answer_pb2.FINISH_REASON_LENGTH,
    "abort": answer_pb2.FINISH_REASON_ABORTED,
}
TIME_LIMIT = "max_time"
"""What has limited an answer that ends with FINISH_REASON_TIME_LIMIT."""


def as_duration(seconds: float) -> Duration:
    """Seconds as a message."""
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def seconds_of(duration: Duration) -> float:
    """A message's seconds; any that it can say."""
    return float(duration.seconds + duration.nanos / 1e9)
