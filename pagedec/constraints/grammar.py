"""Grammars of text, carried out by llguidance: JSON schemas, regular expressions, choices, Lark and GBNF."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pagedec.constraints.schema import carried_out, check_multiples, closed
from pagedec.core.constraint import Allowed, Constraint
from pagedec.errors import FeatureNotAvailable, InvalidArgument, Shown
from pagedec.structured import StructuredOutputsParams

MAX_COMPILED = 128
"""Grammars that are kept, those used last."""
LIMITS = {"step_max_items": 5000, "max_lexer_states": 65_536, "verbose_errors": False}
"""What a mask may take: a tenth of the library's own, since ambiguous grammars take seconds for what that allows, and
all requests wait for it; schemas of hundreds of properties take less than half. States of 200 bytes, for as long as the
grammar is kept."""
MAX_NAMED = 20_000
"""Rules or references of a grammar: the library follows chains of them by recursion, with 3 KB of its stack for
each."""
STACK_BYTES = 128 * 2**20
"""Of the thread that compiles: taken as it is used."""
_SIZING = threading.Lock()  # of all engines of the process: two at a time would leave the other's size behind
MASK_SECONDS, LEAST_SECONDS = 0.01, 1.0
"""Of this thread's time a request's masks may take so much each, and together in any case: usual ones take 0.05 ms."""
EXTRA = "structured"
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(_IN_STRING + f"{{1,{longest}}}" for longest in (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 30)),
    _IN_STRING + "+",
]
"""Sets of tokens that are allowed or not as a whole: the library's own for JSON, and ones for strings that are nearly
as long as they may be (with these, a mask of such a string costs three quarters)."""


class GrammarState:
    """What may follow a text: a matcher of its own, made of its parent's when it is first needed and never moved after
    that."""

    __slots__ = ("_forced", "_matcher", "_parent", "_token", "_words")

    def __init__(self, matcher: Any = None, parent: GrammarState | None = None, token: int = -1) -> None:
        self._matcher, self._parent, self._token = matcher, parent, token
        self._words: np.ndarray | None = None
        self._forced: Sequence[int] | None = None

    def matcher(self) -> Any:
        """Nobody moves it. Raises ValueError where a token on the way here is not in the grammar."""
        if self._matcher is None:
            tokens: list[int] = []
            state = self
            while state._matcher is None:
                tokens.append(state._token)
                assert state._parent is not None
                state = state._parent
            own = state._matcher.deep_copy()
            if not own.consume_tokens(tokens[::-1]):
                raise ValueError(_problem(own))
            self._matcher, self._parent = own, None
        return self._matcher

    def words(self, width: int) -> np.ndarray:
        """uint32 [width]: its mask."""
        if self._words is None:
            matcher, words = self.matcher(), np.zeros(width, np.uint32)
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if matcher.is_error():
                raise ValueError(_problem(matcher))
            words.flags.writeable = False
            self._words = words
        return self._words

    def forced(self) -> Sequence[int]:
        """The tokens that follow in any case. A planner, a decoder and what weighs drafts ask for them in one step."""
        if self._forced is None:
            self._forced = self.matcher().compute_ff_tokens()
        return self._forced


def _problem(matcher: Any) -> str:
    """What the library says of a matcher that cannot go on, without the inside of its parser."""
    told = re.split(r"\n?<(?:state|backtrace|non-verbose/)>", matcher.get_error(), maxsplit=1)[0].strip()
    return "the grammar allows no text" if told == "NoExtensionBias" else told


class GrammarConstraint(Constraint):
    """A compiled grammar in a vocabulary of `vocab_size` tokens, for one request: what its masks take is counted.
    `stops` are the tokens that end an answer; in the matcher's vocabulary it is one token more, the last, that stands
    for all of them. `kind`: of grammar, for errors; `given_up` is called where the library gives up on it."""

    def __init__(
        self,
        root: GrammarState,
        vocab_size: int,
        stops: Sequence[int],
        kind: str = "grammar",
        given_up: Callable[[], object] = lambda: None,
    ) -> None:
        self._given_up = given_up
        self._root, self._vocab_size, self._kind = root, vocab_size, kind
        self._seconds, self._num_masks = 0.0, 0
        self._width, self._own_width = -(-vocab_size // 32), -(-(vocab_size + 1) // 32)
        self._end = vocab_size >> 5, np.uint32(1 << (vocab_size & 31))
        self._stops = [(token >> 5, np.uint32(1 << (token & 31))) for token in stops]

    def start(self, given: Sequence[int]) -> GrammarState:
        return self._root

    def next(self, state: GrammarState, token: int) -> GrammarState:
        return GrammarState(None, state, token)

    def allowed(self, state: GrammarState) -> Allowed:
        with self._measured():
            words = state.words(self._own_width)
        place, bit = self._end
        if not words[place] & bit:
            return words[: self._width]
        words = words.copy()
        words[place] &= ~bit
        words = words[: self._width]
        for place, bit in self._stops:
            words[place] |= bit
        return words

    def is_over(self, state: GrammarState) -> bool:
        return not self._stops and not self.allowed(state).any()  # type: ignore[union-attr]

    def forced(self, state: GrammarState, most: int) -> Sequence[int]:
        with self._measured():
            found = state.forced()[:most]
        out: list[int] = []
        for token in found:
            if token >= self._vocab_size:
                break
            out.append(token)
        return out

    def item(self, tokens: Sequence[int]) -> int | None:
        return None

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        """Raises `InvalidArgument` where the library gives up, and when this has taken too long."""
        field, began = f"structured_outputs.{self._kind}", time.thread_time()
        try:
            yield
        except ValueError as error:
            self._given_up()
            raise InvalidArgument(field, Shown("given"), f"must be what llguidance can carry out: {error}") from None
        self._seconds += time.thread_time() - began
        self._num_masks += 1
        if self._seconds > max(LEAST_SECONDS, MASK_SECONDS * self._num_masks):
            have = Shown(f"{self._seconds / self._num_masks * 1000:.0f} ms for each of {self._num_masks} masks")
            raise InvalidArgument(field, have, f"must take at most {MASK_SECONDS * 1000:g} ms: it is too ambiguous")


class Grammars:
    """Compiles grammars for one vocabulary, each once. `pieces[id]` are the bytes of a token (an id past the end has
    none), `special_ids` the tokens that are no text, `encode` gives the ids of a text."""

    def __init__(
        self,
        vocab_size: int,
        pieces: Sequence[bytes],
        special_ids: frozenset[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self._vocab_size, self._pieces, self._special_ids, self._encode = vocab_size, pieces, special_ids, encode
        self._compiled: OrderedDict[str, GrammarState] = OrderedDict()
        self._compiling = threading.Lock()
        self._tokenizer: Any = None

    def constraint(self, asked: StructuredOutputsParams, stops: Sequence[int]) -> GrammarConstraint:
        """What `asked` allows. May be called from any thread; one compiles at a time. Raises `InvalidArgument` for what
        the library refuses, with its reason, and `FeatureNotAvailable` without the library."""
        try:
            import llguidance
        except ImportError:
            how = f"needs llguidance: pip install 'pagedec[{EXTRA}]'"
            raise FeatureNotAvailable("structured_outputs", asked.kind, how) from None
        key = _key(asked)
        root = self._compiled.get(key)
        if root is None:
            with self._compiling:
                root = self._compiled.get(key)
                if root is None:
                    if self._tokenizer is None:
                        self._tokenizer = self._made(llguidance)
                    root = self._compiled[key] = _on_deep_stack(lambda: self._compile(llguidance, asked))
                    if len(self._compiled) > MAX_COMPILED:
                        self._compiled.popitem(last=False)
        with contextlib.suppress(KeyError):  # another thread has just given it up
            self._compiled.move_to_end(key)
        # what cannot be gone on with is not kept: until it is given up it takes up to hundreds of megabytes
        return GrammarConstraint(root, self._vocab_size, stops, asked.kind, lambda: self._compiled.pop(key, None))

    def has(self, asked: StructuredOutputsParams) -> bool:
        """It is compiled: `constraint` takes no time."""
        return _key(asked) in self._compiled

    def _compile(self, llguidance: Any, asked: StructuredOutputsParams) -> GrammarState:
        field, matcher = f"structured_outputs.{asked.kind}", llguidance.LLMatcher
        value = getattr(asked, asked.kind)
        try:
            if asked.kind in ("json", "grammar"):
                check_multiples(field, value if isinstance(value, str) else json.dumps(value))
            grammar = _grammar_of(matcher, asked)
            _check_named(field, grammar, asked.kind)
            limits = llguidance.LLParserLimits(**LIMITS)
            made = matcher(self._tokenizer, grammar, log_level=0, limits=limits)
        except InvalidArgument:
            raise
        except Exception as error:  # whatever a library's parser does with what users write
            raise InvalidArgument(field, value, f"must be what llguidance can carry out: {error}") from error
        root = GrammarState(made)
        try:
            words = root.words(-(-(self._vocab_size + 1) // 32))
        except ValueError as error:
            raise InvalidArgument(field, value, f"must be what llguidance can carry out: {error}") from None
        if not words.any():
            raise InvalidArgument(field, value, "must allow some text")
        return root

    def _made(self, llguidance: Any) -> Any:
        words = TokenWords(self._vocab_size, self._pieces, self._special_ids, self._encode)
        wrapper = llguidance.TokenizerWrapper(words)
        end = self._vocab_size
        return llguidance.LLTokenizer(wrapper, n_vocab=end + 1, eos_token=end, slices=SLICES)


class TokenWords:
    """The vocabulary as llguidance wants it. Its last token is the end of an answer, and stands for no text."""

    bos_token_id = None

    def __init__(
        self, vocab_size: int, pieces: Sequence[bytes], special_ids: frozenset[int], encode: Callable[[str], list[int]]
    ) -> None:
        known = list(pieces[:vocab_size])
        self.tokens = [*known, *[b""] * (vocab_size - len(known)), b"<end of the answer>"]
        self.special_token_ids = sorted({vocab_size, *(token for token in special_ids if token < vocab_size)})
        self.eos_token_id = vocab_size
        self._vocab_size, self._encode = vocab_size, encode
        self._special = frozenset(self.special_token_ids)
        self._ids = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in self._special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """The ids of a text, as the tokenizer says; where it adds a space, does not know some of it or finds the name
        of a special token in it, the longest tokens from the left."""
        if isinstance(text, bytes):
            raise TypeError("text is told as str")
        ids, data = self._encode(text), text.encode("utf-8", "replace")
        is_text = max(ids, default=0) < self._vocab_size and self._special.isdisjoint(ids)
        if is_text and b"".join(self.tokens[token] for token in ids) == data:
            return ids
        out: list[int] = []
        start = 0
        while start < len(data):
            for size in range(min(self._longest, len(data) - start), 0, -1):
                token = self._ids.get(data[start : start + size])
                if token is not None:
                    out.append(token)
                    start += size
                    break
            else:
                start += 1  # no token stands for this byte: nothing can be forced through it
        return out


def _on_deep_stack(compile: Callable[[], GrammarState]) -> GrammarState:
    """What it returns or raises, in a thread with room for deep recursion."""
    done: list[GrammarState | BaseException] = []

    def run() -> None:
        try:
            done.append(compile())
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=run, name="pagedec-grammar", daemon=True)
    with _SIZING:
        before = threading.stack_size(STACK_BYTES)  # of other threads that are begun meanwhile, too: address space
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    found = done.pop()
    if isinstance(found, InvalidArgument):
        raise _without_frames(found)
    if isinstance(found, BaseException):
        raise found
    return found


def _without_frames(refused: InvalidArgument) -> InvalidArgument:
    """The same, of which nothing holds what was compiled until then: hundreds of megabytes, which would stay for as
    long as the error, or a cycle that it is part of."""
    error: BaseException | None = refused
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    return refused


def _check_named(field: str, grammar: str, kind: str) -> None:
    """Raise `InvalidArgument` for chains of names that the library could not follow to their end."""
    sign, what = {"json": ('ref"', "references"), "grammar": (":", "rules")}.get(kind, ("", ""))
    count = grammar.lower().count(sign) if sign else 0
    if count > MAX_NAMED:
        raise InvalidArgument(field, Shown(f"{count} {what}"), f"must have at most {MAX_NAMED} {what}")


def _key(asked: StructuredOutputsParams) -> str:
    """Of the same grammars the same."""
    return json.dumps([asked.kind, getattr(asked, asked.kind), *_options(asked).items()], sort_keys=False)


def _options(asked: StructuredOutputsParams) -> dict[str, Any]:
    """What llguidance is told of how JSON is written."""
    options: dict[str, Any] = {}
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    if asked.disable_additional_properties:
        options["additional"] = False
    return options


def _grammar_of(matcher: Any, asked: StructuredOutputsParams) -> str:
    if asked.kind in ("json", "json_object"):
        options = _options(asked)
        schema = {"type": "object"} if asked.json_object else {} if asked.json is True else asked.json
        if options.pop("additional", True) is False:
            schema = closed(schema)
        return str(matcher.grammar_from_json_schema(json.dumps(carried_out(schema)), overrides=options))
    if asked.kind == "regex":
        return str(matcher.grammar_from_regex(asked.regex))
    if asked.kind == "choice":  # one terminal: an automaton of any number of texts, where rules are a few thousand
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice or ()).replace(
            "\x7f", "\\u007f"
        )
        return str(matcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}"))
    from llguidance.gbnf_to_lark import any_to_lark

    return str(matcher.grammar_from_lark(any_to_lark(asked.grammar)))
