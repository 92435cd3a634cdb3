"""What a request's own rules mean, on plain lists: logits processing, stop strings, reported log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pagedec.core.forward import LaneAnswers, LaneForward, Reported
from pagedec.core.logits_rules import LogitsRules
from pagedec.core.logprobs import TokenLogprobs
from pagedec.core.stopping import Stopping


def process(logits: Sequence[float], tokens: Sequence[int], prompt_length: int, rules: LogitsRules) -> list[float]:
    """The logits after `tokens` with the rules applied, in fp32 as the kernels do."""
    z = np.array(logits, np.float32)
    if rules.allowed_token_ids is not None:
        banned = np.ones(len(z), bool)
        banned[list(rules.allowed_token_ids)] = False
        z[banned] = -np.inf
    for word in rules.bad_words:
        if len(word) == 1 or list(word[:-1]) == list(tokens[len(tokens) - len(word) + 1 :]):
            z[word[-1]] = -np.inf
    for token, number in rules.logit_bias:
        z[token] += np.float32(number)
    n = rules.no_repeat_ngram_size
    if n:
        end = list(tokens[len(tokens) - n + 1 :]) if n > 1 else []
        for i in range(len(tokens) - n + 1):
            if list(tokens[i : i + n - 1]) == end:
                z[tokens[i + n - 1]] = -np.inf
    if rules.repetition_penalty != 1.0:
        r = np.float32(rules.repetition_penalty)
        for token in set(tokens):
            z[token] = z[token] / r if z[token] > 0 else z[token] * r
    for token, count in Counter(tokens[prompt_length:]).items():
        z[token] = z[token] - np.float32(rules.frequency_penalty) * np.float32(count)
        z[token] -= np.float32(rules.presence_penalty)
    values: list[float] = z.tolist()
    return values


def warp(logprobs: np.ndarray, group: np.void) -> np.ndarray:
    """Tempered log-probabilities of the tokens that top_k, top_p and min_p keep, fp32, as BEST_GROUP_DTYPE says; of the
    others -inf."""
    least, order = int(group["min_tokens_to_keep"]), np.lexsort((np.arange(len(logprobs)), -logprobs))
    z = logprobs / np.float32(group["temperature"])
    mass = np.exp(z[order].astype(np.float64))
    num = len(order)
    if group["top_k"]:
        num = min(num, max(int(group["top_k"]), least))
    if group["top_p"] < 1:
        reached = np.cumsum(mass[:num]) >= float(group["top_p"]) * mass[:num].sum()
        num = min(num, max(int(np.argmax(reached)) + 1, least))
    num = min(num, max(int((mass[:num] >= float(group["min_p"]) * mass[0]).sum()), least))
    out = np.full(len(z), -np.inf, np.float32)
    out[order[:num]] = z[order[:num]]
    return out


def report(logprobs: Sequence[float], token: int, num_top: int) -> TokenLogprobs:
    """What is reported of `token` from the log-probabilities of all tokens."""
    best = sorted(range(len(logprobs)), key=lambda other: (-logprobs[other], other))[:num_top]
    rank = 1 + sum(other > logprobs[token] for other in logprobs)
    return TokenLogprobs(token, logprobs[token], rank, tuple(best), tuple(logprobs[other] for other in best))


@dataclass(frozen=True)
class Ending:
    """An answer and how it ended."""

    tokens: list[int]
    reason: str
    stop_string: str | None = None
    excess_bytes: int = 0


def generate(draw: Callable[[Sequence[int]], int], prompt: Sequence[int], stopping: Stopping) -> Ending:
    """One token after the other, looking through the whole text after each. Needs `stopping.max_tokens`."""
    tokens, text = list(prompt), b""
    assert stopping.max_tokens is not None
    for count in range(1, stopping.max_tokens + 1):
        tokens.append(draw(tokens))
        if tokens[-1] in stopping.stops and count > stopping.min_tokens:
            return Ending(tokens, "stop")
        before = len(text)
        if stopping.strings is not None and tokens[-1] not in stopping.silent:
            text += stopping.pieces[tokens[-1]]
        found = find(text, before, stopping.strings.strings if stopping.strings else ())
        if found is not None and count > stopping.min_tokens:
            return Ending(tokens, "stop", found[0], len(text) - found[1])
    return Ending(tokens, "length")


def find(text: bytes, before: int, strings: Sequence[str]) -> tuple[str, int] | None:
    """The string that ends first behind `before` bytes, and where; of those that end there the longest."""
    for end in range(before + 1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string.encode())]
        if ending:
            return max(ending, key=lambda string: len(string.encode())), end
    return None


def reported(forward: LaneForward, raw: list[Sequence[float]], answers: LaneAnswers) -> Reported:
    """What the forward reports of the unprocessed log-probabilities; noise where nobody may look."""
    rows = forward.report
    assert rows is not None
    places = rows.rows.tolist()
    assert places == sorted(set(places)), "reported rows must be ascending, each once"
    tops = [report(raw[row], 0, k) for row, k in zip(places, rows.num_top.tolist(), strict=True)]

    def chosen(row: int, token: int) -> tuple[float, int]:
        return report(raw[row], token, 0)[1:3] if row in places else (float("nan"), -1)

    given = [
        chosen(row, token) for row, token in zip(rows.given_rows.tolist(), rows.given_tokens.tolist(), strict=True)
    ]
    draws = [chosen(row, t) for row, t in zip(forward.draws["row"].tolist(), answers.draws.tolist(), strict=True)]
    topk = [
        [chosen(row, token) for token in tokens]
        for row, tokens in zip(forward.topk_rows.tolist(), answers.topk_tokens.tolist(), strict=True)
    ]
    asked = zip(forward.logprob_rows.tolist(), forward.logprob_tokens.tolist(), strict=True)
    row_of = {
        (number, int(row["place"])): int(row["row"])
        for number, group in enumerate(forward.best_groups)
        for row in forward.best_rows[group["first"] : group["stop"]]
    }
    owners = np.repeat(np.arange(len(forward.best_groups)), answers.best_counts).tolist()
    best = zip(owners, answers.best_parents.tolist(), answers.best_tokens.tolist(), strict=True)
    return Reported(
        np.array([token for top in tops for token in top.top_ids], np.int32),
        np.array([value for top in tops for value in top.top_logprobs], np.float32),
        *_split(given),
        *_split(draws),
        np.array([[value for value, _ in row] for row in topk], np.float32),
        np.array([[rank for _, rank in row] for row in topk], np.int32),
        _split([chosen(row, token) for row, token in asked])[1],
        *_split([chosen(row_of[group, place], token) for group, place, token in best]),
    )


def _split(pairs: list[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([value for value, _ in pairs], np.float32), np.array([rank for _, rank in pairs], np.int32)
