"""Text to token ids and back."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pagedec.errors import MAX_SHOWN, InvalidArgument, ModelFileError, Shown
from pagedec.fields import check_encodable
from pagedec.formats.files import read_json_object
from pagedec.formats.generation import read_end_ids
from pagedec.formats.gguf_header import read_gguf_header
from pagedec.text.byte_table import ByteTable, Spelling, build_byte_table
from pagedec.text.chat_template import Message, Tool, render_chat
from pagedec.text.detokenizer import Detokenizer
from pagedec.text.gguf_fields import read_vocabulary
from pagedec.text.gguf_tokenizer import tokenizer_of
from pagedec.text.token_bound import TokenBound, token_bound

WITHOUT = "or set skip_tokenizer_init=True and pass token ids"
GGUF_KINDS = {"bos_token": "bos", "eos_token": "eos"}
"""What templates call a special token, and what a GGUF header does."""


class Tokenizer:
    """A vocabulary with its rules. Immutable after construction; may be used from several threads."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        path: Path,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        inner.no_truncation()  # a tokenizer.json may carry those of its training
        inner.no_padding()
        self._inner = inner
        self.path = path
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        named = {"default": chat_template} if isinstance(chat_template, str) else chat_template
        self.chat_templates: dict[str, str] = dict(named or {})
        """Templates by their names; the usual one is "default", the one for calls of tools may be "tool_use"."""
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        """Special tokens by what they are for, as templates call them: {"bos_token": "<s>"}."""
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        self._spelling, drops_leading_space = _spelling(inner.decoder, path)
        self.byte_table = self._build_table(drops_leading_space)

    @classmethod
    def from_path(cls, path: Path | str) -> Tokenizer:
        """Return the tokenizer of a model directory, a tokenizer.json or a .gguf file."""
        place = Path(path)
        if place.suffix == ".gguf":
            return tokenizer_from_gguf(read_gguf_header(place).fields, place)
        return _from_directory(place.parent if place.name == "tokenizer.json" else place)

    def _build_table(self, drops_leading_space: bool) -> ByteTable:
        special = [i for i, token in self._inner.get_added_tokens_decoder().items() if token.special]
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        return build_byte_table(vocabulary, special, self._spelling, drops_leading_space)

    @functools.cached_property
    def _bound(self) -> TokenBound:
        return token_bound(self._inner, self._spelling)

    @property
    def chat_template(self) -> str | None:
        """The model's usual chat template."""
        return self.chat_templates.get("default")

    @property
    def eos_token_id(self) -> int | None:
        """The first of the tokens that end a text."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Return every token's id by its name."""
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return vocabulary

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """Return a conversation's prompt: its token ids, or with `tokenize` False its text. See `render_chat`."""
        text = render_chat(
            self, conversation, add_generation_prompt=add_generation_prompt, tools=tools, documents=documents,
            continue_final_message=continue_final_message, chat_template=chat_template, template_kwargs=template_kwargs,
        )  # fmt: skip
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def check_length(self, text: str, max_tokens: int, field: str = "prompt") -> None:
        """Raise `InvalidArgument` naming `field` for a text that certainly has more tokens than that. Tokenises nothing, so it
        passes texts that are only somewhat too long."""
        if not isinstance(text, str) or 4 * len(text) <= max_tokens:  # no need to look at the vocabulary
            return
        if self._bound.exceeded_by(text, max_tokens):
            most = max_tokens * self._bound.bytes_per_token
            size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            limit = f"must be at most {max_tokens} tokens long, which are at most {most} bytes"
            raise InvalidArgument(field, Shown(f"{size} bytes"), limit)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with the tokens that its model wants around it unless told otherwise."""
        _check_text(text)
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of many texts, worked out in parallel."""
        for text in texts:
            _check_text(text)
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def detokenizer(self, skip_special_tokens: bool = True, keep_leading_space: bool = False) -> Detokenizer:
        """Return what turns tokens into text as they come; keep the leading space of text that continues a prompt."""
        return Detokenizer(self.byte_table, skip_special_tokens, keep_leading_space)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for."""
        return self.byte_table.token_bytes(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its name, as "<|im_end|>"."""
        found: int | None = self._inner.token_to_id(token)
        return found


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidArgument("prompt", text, f"must be a string, is a {type(text).__name__}")
    check_encodable("prompt", text)


def _spelling(decoder: Any, path: Path) -> tuple[Spelling, bool]:
    """Return how a tokenizer's decoder spells bytes, and whether it drops the first space."""
    state: Any = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    by_type = {part["type"]: part for part in parts}
    if "ByteLevel" in by_type:
        return Spelling.BYTE_LEVEL, False
    if "Metaspace" in by_type:
        return Spelling.SENTENCEPIECE, by_type["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in by_type:
        strip = by_type.get("Strip", {})
        return Spelling.SENTENCEPIECE, strip.get("content") == " " and strip.get("start", 0) > 0
    kinds = ", ".join(by_type)
    raise ModelFileError(
        path, f"has the decoder {kinds}; supported are byte-level and sentencepiece vocabularies; {WITHOUT}"
    )


def _token_name(value: Any) -> str | None:
    """Return the text of a token of tokenizer_config.json, written plainly or as an object."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, "the file") if path.is_file() else {}


def _end_ids(inner: tokenizers.Tokenizer, directory: Path, config: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text: those of generation_config.json (or config.json), and the tokenizer's own."""
    name = _token_name(config.get("eos_token"))
    own = None if name is None else inner.token_to_id(name)
    return [*read_end_ids(directory), *(() if own is None else (own,))]


def _from_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        slow = [name for name in ("tokenizer.model", "vocab.json") if (directory / name).is_file()]
        hint = f"; {slow[0]} alone is not enough, save the tokenizer in its fast form" if slow else ""
        raise ModelFileError(path, f"does not exist{hint}; name a tokenizer directory, {WITHOUT}")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(
            path, f"is no tokenizer: {str(error)[:MAX_SHOWN]}; name a tokenizer directory, {WITHOUT}"
        ) from error
    config = _optional_json(directory / "tokenizer_config.json")
    special = _special_tokens(directory, config)
    bos = special.get("bos_token")
    return Tokenizer(
        inner,
        path,
        None if bos is None else inner.token_to_id(bos),
        _end_ids(inner, directory, config),
        _chat_templates(directory, config),
        special,
    )


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by what they are for, as {"bos_token": "<s>"}."""
    both = {**_optional_json(directory / "special_tokens_map.json"), **config}
    return {key: token for key in both if key.endswith("_token") and (token := _token_name(both[key])) is not None}


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a directory by name; files win over the configuration, as in transformers."""
    value = config.get("chat_template")
    templates = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name"))] = entry["template"]
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    return templates | {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}


def tokenizer_from_gguf(fields: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return the tokenizer that the metadata of a GGUF file describe; `path` is for errors."""
    vocabulary = read_vocabulary(fields, path)
    inner = tokenizer_of(vocabulary)
    ids = {name: vocabulary.special_id(kind) for name, kind in GGUF_KINDS.items()}
    return Tokenizer(
        inner,
        path,
        ids["bos_token"],
        vocabulary.end_ids(),
        _gguf_templates(fields),
        {name: str(inner.id_to_token(i)) for name, i in ids.items() if i is not None},
    )


def _gguf_templates(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a GGUF header by name: one without a name, others listed in `tokenizer.chat_templates`."""
    key = "tokenizer.chat_template"
    others = fields.get(f"{key}s")
    names = [name for name in others if isinstance(name, str)] if isinstance(others, list) else []
    found = {"default": fields.get(key)} | {name: fields.get(f"{key}.{name}") for name in names}
    return {name: text for name, text in found.items() if isinstance(text, str)}
