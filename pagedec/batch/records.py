"""The output of a batch: one record a line, in OpenAI's batch format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedec.batch.bodies import Ask
from pagedec.batch.lines import Line, LineError
from pagedec.errors import FeatureNotAvailable, InvalidArgument, NotFound, PagedecError, RequestError
from pagedec.outputs import CompletionOutput, RequestOutput

RECORD_ID = re.compile(r"line-([1-9][0-9]*)-([0-9a-f]{16})-([0-9a-f]{8})")
STATUSES: Mapping[type[PagedecError], int] = {
    FeatureNotAvailable: 400,
    InvalidArgument: 400,
    NotFound: 404,
    RequestError: 500,
}
TokenBytes = Callable[[int], bytes]


def record_id(line: Line, settings: str) -> str:
    """The name of a line's record: its number, its content's digest, and the digest of the settings it was answered under."""
    return f"line-{line.number}-{line.digest}-{settings}"


def as_line(record: Mapping[str, Any]) -> bytes:
    """A record as it is written: one line, ended."""
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


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
    """A completion or chat.completion object. Choices are numbered over the prompts: those of the first prompt come first."""
    answers = [answer for output in outputs for answer in output.outputs]
    chat, num_top = ask.messages is not None, ask.params.logprobs or 0
    if chat:
        choices = [_chat_choice(i, answer, num_top, token_bytes) for i, answer in enumerate(answers)]
    else:
        choices = [_text_choice(i, answer) for i, answer in enumerate(answers)]
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


def _text_logprobs(answer: Any) -> dict[str, Any] | None:
    if getattr(answer, "logprobs", None) is None:
        return None
    tokens, offsets, own, top, offset = [], [], [], [], 0
    for token_id, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        text = entries[token_id].decoded_token or ""
        tokens.append(text)
        offsets.append(offset)
        own.append(entries[token_id].logprob)
        top.append({entry.decoded_token or "": entry.logprob for entry in entries.values()})
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


def _chat_logprobs(answer: Any, num_top: int, token_bytes: TokenBytes | None) -> dict[str, Any] | None:
    if getattr(answer, "logprobs", None) is None:
        return None

    def entry(token_id: int, logprob: Any) -> dict[str, Any]:
        data = None if token_bytes is None else list(token_bytes(token_id))
        return {"token": logprob.decoded_token or "", "logprob": logprob.logprob, "bytes": data}

    content = []
    for token_id, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        # the drawn token is always among the entries, as one more where it is none of the most probable
        top = sorted((item for item in entries.items() if item[1].rank <= num_top), key=lambda item: item[1].rank)
        listed = [entry(other, logprob) for other, logprob in top[:num_top]]
        content.append(entry(token_id, entries[token_id]) | {"top_logprobs": listed})
    return {"content": content, "refusal": None}
