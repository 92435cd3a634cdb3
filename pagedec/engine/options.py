"""From a request's parameters to what the core needs of them.

Every error is an `InvalidArgument` naming the field, the value and the limit.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pagedec.blame import warn_of_unused
from pagedec.core.limits import check_token_ids
from pagedec.core.logits_rules import NO_RULES, LogitsRules
from pagedec.core.logprobs import NO_REPORTING, Reporting
from pagedec.core.stop_strings import StopStrings
from pagedec.core.stopping import Stopping
from pagedec.errors import InvalidArgument, Shown, counted
from pagedec.fields import MAX_INT32, float32
from pagedec.params import RequestParams

DEFAULT_LOGPROBS = 20
"""Log-probabilities of each token that a request may always ask for, as in vLLM."""
MAX_REPORTED = 1 << 20
"""Log-probabilities that a request may have where it asks for more of each token: some 300 MB, told in Python's
numbers."""
MAX_BAD_WORD_BYTES, MAX_BAD_WORDS = 1 << 18, 10_000
"""Of all bad words of a request: they are tokenised twice each, in some 0.5 s then."""
P = TypeVar("P", bound=RequestParams)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The text of tokens. `pieces[id]` are a token's bytes (an id past the end has none), `special_ids` the tokens that
    are left out of text, `encode` gives the token ids of a text without special tokens around it."""

    pieces: Sequence[bytes]
    special_ids: frozenset[int]
    encode: Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Options:
    """One request's rules."""

    stopping: Stopping
    rules: LogitsRules
    reporting: Reporting


def read_options(
    params: RequestParams, vocab_size: int, eos_token_ids: tuple[int, ...], vocabulary: Vocabulary | None
) -> Options:
    """The rules that `params` ask for. Raises `InvalidArgument` for ids that the model does not know, for text without
    a vocabulary, and for rules that leave nothing to draw. Warns of parameters that change nothing."""
    warn_of_unused(params)
    stopping = _stopping(params, vocab_size, eos_token_ids, vocabulary)
    rules = _rules(params, vocab_size, vocabulary)
    _check_something_is_left(stopping, rules, vocab_size)
    return Options(stopping, rules, _reporting(params, vocab_size))


def with_seed(params: P, seed: int) -> P:
    """The same parameters but for the seed. Nothing else is looked at, which may take long, but by a decoder's own
    `__post_init__`: what that makes may follow from the seed."""
    if not type(params).__post_init__.__module__.startswith("pagedec."):
        return dataclasses.replace(params, seed=seed)
    own = copy.copy(params)
    object.__setattr__(own, "seed", seed)
    return own


def _stopping(params: RequestParams, vocab_size: int, eos: tuple[int, ...], vocabulary: Vocabulary | None) -> Stopping:
    ids = _token_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    stop = params.stop or ()
    strings = StopStrings((stop,) if isinstance(stop, str) else tuple(stop)) if stop else None
    pieces: Sequence[bytes] = ()
    silent: frozenset[int] = frozenset()
    if strings is not None:
        if vocabulary is None:
            raise InvalidArgument("stop", list(strings.strings), "must be empty: the engine has no tokenizer")
        pieces = vocabulary.pieces
        silent = vocabulary.special_ids if params.skip_special_tokens else silent
    return Stopping(
        eos,
        ids,
        params.min_tokens,
        params.max_tokens,
        params.ignore_eos,
        strings,
        pieces,
        silent,
    )


def _rules(params: RequestParams, vocab_size: int, vocabulary: Vocabulary | None) -> LogitsRules:
    allowed = params.allowed_token_ids
    if allowed is not None:
        allowed = tuple(sorted(set(_token_ids("allowed_token_ids", allowed, vocab_size))))
        if not allowed:
            raise InvalidArgument("allowed_token_ids", [], "must name at least one token, or be None")
    words = params.bad_words or ()
    bias = params.logit_bias or {}
    _token_ids("logit_bias", bias, vocab_size)
    repetition = _finite("repetition_penalty", params.repetition_penalty)
    if float32(repetition) <= 0:
        raise InvalidArgument("repetition_penalty", repetition, "must be above 0 in 32 bits")
    size = params.no_repeat_ngram_size
    if not 0 <= size <= MAX_INT32:
        raise InvalidArgument("no_repeat_ngram_size", size, f"must be from 0 to {MAX_INT32}")
    rules = LogitsRules(
        allowed,
        bad_word_ids(words, vocab_size, vocabulary) if words else (),
        tuple(sorted((int(token), _finite("logit_bias", number)) for token, number in bias.items())),
        size,
        repetition,
        _finite("frequency_penalty", params.frequency_penalty),
        _finite("presence_penalty", params.presence_penalty),
    )
    return NO_RULES if rules == NO_RULES else rules


def bad_word_ids(words: Sequence[str], vocab_size: int, vocabulary: Vocabulary | None) -> tuple[tuple[int, ...], ...]:
    """The token sequences of bad words, by vLLM's rule (`SamplingParams.update_from_tokenizer`): each word as it begins
    a text, and as it follows a space, where that is another first token and as many tokens."""
    if vocabulary is None:
        raise InvalidArgument("bad_words", list(words), "must be empty: the engine has no tokenizer")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidArgument("bad_words", Shown(f"{len(words)} words"), f"must be at most {MAX_BAD_WORDS}")
    num_bytes = sum(len(word.encode("utf-8", "replace")) for word in words if isinstance(word, str))
    if num_bytes > MAX_BAD_WORD_BYTES:
        raise InvalidArgument("bad_words", Shown(f"{num_bytes} bytes"), f"must be at most {MAX_BAD_WORD_BYTES} in all")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = vocabulary.encode(word.lstrip()) if isinstance(word, str) else []
        if not bare:
            limit = "must be text with more in it than white space; logit_bias -100 keeps a token of that away"
            raise InvalidArgument("bad_words", word, limit)
        spaced = vocabulary.encode(" " + word.lstrip())
        ways = [bare, spaced] if len(spaced) == len(bare) and spaced[0] != bare[0] else [bare]
        for ids in ways:
            if max(ids) >= vocab_size:
                limit = f"must be of tokens from 0 to {vocab_size - 1}; it has token {max(ids)}"
                raise InvalidArgument("bad_words", word, limit)
            found[tuple(ids)] = None
    return tuple(found)


def _reporting(params: RequestParams, vocab_size: int) -> Reporting:
    counts = []
    for field in ("logprobs", "prompt_logprobs"):
        count = getattr(params, field)
        if count is not None and not -1 <= count <= vocab_size:
            raise InvalidArgument(field, count, f"must be from 0 to {vocab_size}, the vocabulary, or -1 for all of it")
        counts.append(vocab_size if count == -1 else count)
    reporting = Reporting(*counts)
    return NO_REPORTING if reporting == NO_REPORTING else reporting


def check_reports(
    reporting: Reporting, params: RequestParams, prompt_length: int, limit: int, max_logprobs: int
) -> None:
    """Raise `InvalidArgument` for more reports than one request may keep, if it asks for more than `max_logprobs` of a
    token."""
    num_answers = params.num_answers
    for field, count, num_tokens in (
        ("logprobs", reporting.num_logprobs, num_answers * (limit - prompt_length)),
        ("prompt_logprobs", reporting.num_prompt_logprobs, prompt_length - 1),
    ):
        if count is None or max_logprobs < 0 or count <= max_logprobs or count * num_tokens <= MAX_REPORTED:
            continue
        most = max(max_logprobs, MAX_REPORTED // num_tokens)
        limit_text = (
            f"must be at most {most}: {count} for each of up to {num_tokens} tokens are {count * num_tokens} "
            f"log-probabilities, and {MAX_REPORTED} may be reported in all; ask for fewer, shorten the "
            f"{'answer (max_tokens)' if field == 'logprobs' else 'prompt'}, or raise the engine's max_logprobs"
        )
        raise InvalidArgument(field, getattr(params, field), limit_text)


def _check_something_is_left(stopping: Stopping, rules: LogitsRules, vocab_size: int) -> None:
    """Rules that do not depend on the text must leave a token that may be drawn."""
    early = stopping.stops if stopping.min_tokens else frozenset()
    single = {word[0] for word in rules.bad_words if len(word) == 1}
    allowed = rules.allowed_token_ids
    left = vocab_size - len(early | single) if allowed is None else len(set(allowed) - early - single)
    if left > 0:
        return
    if allowed is not None:
        limit = "must leave a token that may be drawn beside bad_words and, before min_tokens, the stop tokens"
        raise InvalidArgument("allowed_token_ids", Shown(counted(len(allowed), "token")), limit)
    if not single:
        limit = "must leave a token that may be drawn before min_tokens are reached"
        raise InvalidArgument("stop_token_ids", Shown(counted(len(stopping.ends), "token")), limit)
    raise InvalidArgument("bad_words", Shown(counted(len(single), "token")), "must leave a token that may be drawn")


def _token_ids(field: str, ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    checked = tuple(map(int, ids))
    check_token_ids(field, checked, vocab_size)
    return checked


def _finite(field: str, value: float) -> float:
    """The number, which the kernels can take: one that they refuse would cost its whole step."""
    if not math.isfinite(float32(value)):
        raise InvalidArgument(field, value, "must be a finite number in 32 bits")
    return float(value)
