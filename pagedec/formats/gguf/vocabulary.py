"""What a GGUF header says of the tokenizer: tokens and their types, special ones, chat templates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedec.errors import ModelFileError, shown

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
WORD_START = "\u2581"  # sentencepiece writes a space as this lower block
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types
# Ends of a turn by the names that models give them, for files that do not say eot_token_id
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
MESSAGE_END, TEXT_END = "<|eom_id|>", "<|end_of_text|>"  # of Llama 3, whose eos is a turn's end
HARMONY_ENDS, HARMONY_PART_END = ("<|return|>", "<|call|>"), "<|end|>"
"""Of gpt-oss, whose answers have several parts: thoughts, what goes to a tool, what the user sees."""
QWEN_TEXT_END = "<|endoftext|>"  # its files name it as what begins and fills, their eos is a turn's end, too


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokens by id with their types; `ids` is the other way round. `path` is for errors."""

    fields: Mapping[str, Any]
    path: Path
    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]

    def fail(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(self.path, f"{PREFIX}{key} {problem}")

    def of_type(self, *kinds: int) -> list[str]:
        """Return the tokens of these types in the order of their ids; an empty one is none."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds and token]

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value of the file."""
        value = self.fields.get(PREFIX + key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {shown(value)}, must be true or false")
        return value

    def special_id(self, kind: str) -> int | None:
        """Return the id of a special token ("bos", "eos", ...), None where there is none."""
        value = self.fields.get(f"{PREFIX}{kind}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(self.tokens):
            raise self.fail(f"{kind}_token_id", f"is {shown(value)}, must be from 0 to {len(self.tokens) - 1}")
        return value

    def padding_id(self) -> int | None:
        """Return the id of the token that fills rows. Nothing here needs it, and some files' is no token: then None."""
        value = self.fields.get(PREFIX + "padding_token_id")
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def chat_templates(self) -> dict[str, str]:
        """Return the chat templates by name: one without a name, "default", and others that the file lists."""
        others = self.fields.get(f"{TEMPLATE}s")
        names = [name for name in others if isinstance(name, str)] if isinstance(others, list) else []
        found = {"default": self.fields.get(TEMPLATE)} | {name: self.fields.get(f"{TEMPLATE}.{name}") for name in names}
        return {name: text for name, text in found.items() if isinstance(text, str)}

    def end_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a text: end of sequence, of turn, of message.

        Files have one eos where generation_config.json has a list, and many converters leave the others out, so control
        tokens with a usual name for these count too.
        """
        ids = [self.special_id(kind) for kind in ("eos", "eot", "eom")]
        harmony = [self._named(name) for name in HARMONY_ENDS]
        is_harmony = None not in harmony
        if is_harmony:
            part_end = self._named(HARMONY_PART_END)
            ids[1:] = [None if i == part_end else i for i in ids[1:]] + harmony
        elif ids[1] is None:
            ids[1] = self._named(*TURN_ENDS)
        if ids[2] is None:
            ids[2] = self._named(MESSAGE_END)
        text_end = self._named(QWEN_TEXT_END)
        ends_texts = is_harmony or text_end in (self.special_id("bos"), self.padding_id())
        ids += [self._named(TEXT_END), text_end if ends_texts else None]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def _named(self, *names: str) -> int | None:
        """Return the first of these that is a token of its own."""
        found = (self.ids.get(name) for name in names)
        return next((i for i in found if i is not None and self.types[i] in (CONTROL, USER_DEFINED)), None)


def read_list(fields: Mapping[str, Any], key: str, kind: type, path: Path) -> list[Any]:
    """Return a list of the file whose items all are of one type."""
    value = fields.get(PREFIX + key)
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise ModelFileError(path, f"{PREFIX}{key} is missing or no list of {kind.__name__}")
    return value


def read_scores(vocabulary: GgufVocabulary) -> list[float]:
    """Return a finite score for each token; a writer that was given whole numbers has stored them as such."""
    given = vocabulary.fields.get(PREFIX + "scores")
    kind = int if isinstance(given, list) and given and type(given[0]) is int else float
    scores = read_list(vocabulary.fields, "scores", kind, vocabulary.path)
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.fail("scores", f"has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    for i, score in enumerate(scores):
        if not math.isfinite(score):
            raise vocabulary.fail("scores", f"is {score} for token {i}, must be finite")
    return scores


def read_vocabulary(fields: Mapping[str, Any], path: Path) -> GgufVocabulary:
    """Return the vocabulary of a header; raise ModelFileError unless there are tokens, all different, with a type
    each."""
    tokens = read_list(fields, "tokens", str, path)
    types = read_list(fields, "token_type", int, path) if PREFIX + "token_type" in fields else [NORMAL] * len(tokens)
    ids = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(ids) != len(tokens) or len(types) != len(tokens):
        problem = f"{len(tokens)} tokens, {len(ids)} of them different, {len(types)} token types: must be equal"
        raise ModelFileError(path, problem)
    return GgufVocabulary(fields, path, tokens, types, ids)
