"""The output of a batch: one record a line, in OpenAI's batch format."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedec.batch.bodies import Ask
from pagedec.batch.lines import Line, LineError
from pagedec.errors import FeatureNotAvailable, InvalidArgument, NotFound, PagedecError, RequestError
from pagedec.outputs import CompletionOutput, Logprob, RequestOutput
from pagedec.params import BeamSearchParams
from pagedec.text.json_lines import json_line

RECORD_ID = re.compile(r"line-([1-9][0-9]*)-([0-9a-f]{16})-([0-9a-f]{8})")
STATUSES: Mapping[type[PagedecError], int] = {
    FeatureNotAvailable: 400,
    InvalidArgument: 400,
    NotFound: 404,
    RequestError: 500,
}
TokenBytes = Callable[[int], bytes]


def record_id(line: Line, settings: str) -> str:
    """The name of a line's record: its number, its content's digest, and the digest of the settings it was answered
    under."""
    return f"line-{line.number}-{line.digest}-{settings}"


def as_line(record: Mapping[str, Any]) -> bytes:
    """A record as it is written: one line, ended."""
    return json_line(record).encode() + b"\n"


def is_error(record: Mapping[str, Any]) -> bool:
    """Whether a record says that its line was not answered."""
    return record["error"] is not None or record["response"]["status_code"] != 200


def answer_record(name: str, custom_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return _record(name, custom_id, 200, body)


def line_error_record(name: str, line: Line, error: LineError) -> dict[str, Any]:
    """The record of a line that is no request."""
    message = f"line {line.number}: {error.message}"
    fault = {"code": error.kind, "message": message, "param": error.param, "line": line.number}
    return {"id": name, "custom_id": error.custom_id, "response": None, "error": fault}


def request_error_record(name: str, line: Line, custom_id: str, error: PagedecError) -> dict[str, Any]:
    """The record of a request that cannot be carried out: the response that OpenAI's interface would give."""
    status = next((number for kind, number in STATUSES.items() if isinstance(error, kind)), 400)
    fault = {
        "message": f"line {line.number}: {error}",
        "type": "server_error" if status >= 500 else "invalid_request_error",
        "param": getattr(error, "field", None),
        "code": error.code.lower(),
        "line": line.number,
    }
    return _record(name, custom_id, status, {"error": fault})


def _record(name: str, custom_id: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req-{name}", "body": body}
    return {"id": name, "custom_id": custom_id, "response": response, "error": None}


# ------------------------------------------------------------------------------------------------------------ answers
def completion_body(
    name: str, ask: Ask, model: str, created: int, outputs: Sequence[RequestOutput], token_bytes: TokenBytes | None
) -> dict[str, Any]:
    """A completion or chat.completion object. Choices are numbered over the prompts: those of the first prompt come
    first."""
    answers = [answer for output in outputs for answer in output.outputs]
    chat, num_top = ask.messages is not None, ask.params.logprobs or 0
    if chat:
        choices = [_chat_choice(i, answer, num_top, token_bytes) for i, answer in enumerate(answers)]
    else:
        choices = [_text_choice(i, answer) for i, answer in enumerate(answers)]
    if isinstance(ask.params, BeamSearchParams):
        choices = [{**choice, "score": answer.score} for choice, answer in zip(choices, answers, strict=True)]
    if token_bytes is None or not ask.params.detokenize:  # there is no text
        choices = [{**choice, "token_ids": answer.token_ids} for choice, answer in zip(choices, answers, strict=True)]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_answer = sum(len(answer.token_ids) for answer in answers)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        },
    }


def _text_choice(index: int, answer: CompletionOutput) -> dict[str, Any]:
    return {
        "index": index,
        "text": answer.text,
        "logprobs": _text_logprobs(answer),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


def _chat_choice(index: int, answer: CompletionOutput, num_top: int, token_bytes: TokenBytes | None) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": _chat_logprobs(answer, num_top, token_bytes),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


def _reported(answer: CompletionOutput) -> list[tuple[int, dict[int, Logprob]]] | None:
    """The tokens of an answer that have a report, with it."""
    if answer.logprobs is None:
        return None
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return [(token_id, entries) for token_id, entries in pairs if entries is not None]


def _by_text(token_id: int, entries: Mapping[int, Logprob]) -> dict[str, float]:
    """Log-probabilities by tokens' texts. Of several with one text the drawn one stays, or the most probable."""
    order = sorted(entries, key=lambda other: (other == token_id, entries[other].logprob))
    return {entries[other].decoded_token or "": entries[other].logprob for other in order}


def _text_logprobs(answer: CompletionOutput) -> dict[str, Any] | None:
    reported = _reported(answer)
    if reported is None:
        return None
    texts = [entries[token_id].decoded_token or "" for token_id, entries in reported]
    return {
        "tokens": texts,
        "token_logprobs": [entries[token_id].logprob for token_id, entries in reported],
        "top_logprobs": [_by_text(token_id, entries) for token_id, entries in reported],
        "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=0))[: len(texts)],
    }


def _chat_logprobs(answer: CompletionOutput, num_top: int, token_bytes: TokenBytes | None) -> dict[str, Any] | None:
    reported = _reported(answer)
    if reported is None:
        return None

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        data = None if token_bytes is None else list(token_bytes(token_id))
        return {"token": logprob.decoded_token or "", "logprob": logprob.logprob, "bytes": data}

    content = []
    for token_id, entries in reported:
        # the drawn token is always among the entries, as one more where it is none of the most probable
        ranked = sorted((one.rank or 0, other) for other, one in entries.items())
        listed = [entry(other, entries[other]) for rank, other in ranked if num_top < 0 or rank <= num_top]
        content.append(
            entry(token_id, entries[token_id]) | {"top_logprobs": listed[:num_top] if num_top >= 0 else listed}
        )
    return {"content": content, "refusal": None}
