"""Text to token ids and back."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pagedec.errors import MAX_SHOWN, InvalidArgument, ModelFileError, Shown
from pagedec.fields import MAX_INT32, check_encodable
from pagedec.formats.files import read_json_object
from pagedec.formats.generation import read_end_ids
from pagedec.formats.gguf.build_tokenizer import build_tokenizer
from pagedec.formats.gguf.header import read_gguf_header
from pagedec.formats.gguf.parts import first_part
from pagedec.formats.gguf.vocabulary import read_vocabulary
from pagedec.inputs import Array
from pagedec.text.byte_table import ByteTable, build_byte_table, spelling_of
from pagedec.text.chat_template import Message, Tool, render_chat
from pagedec.text.detokenizer import Detokenizer
from pagedec.text.encoding import Encoding, check_call, check_clean_up, ids_of, numbers, taken_out
from pagedec.text.token_bound import TokenBound, token_bound

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
        self._spelling, drops_leading_space = spelling_of(inner.decoder, path)
        self.byte_table = self._build_table(drops_leading_space)

    @classmethod
    def from_path(cls, path: Path | str) -> Tokenizer:
        """Return the tokenizer of a model directory, a tokenizer.json or a .gguf file."""
        place = Path(path)
        if place.suffix == ".gguf":
            place = first_part(place)  # which has the vocabulary
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
        """The token that ends a text by the tokenizer's own word; else the first of those that end an answer."""
        own = self._named_id("eos_token")
        return own if own is not None else next(iter(self.eos_token_ids), None)

    @property
    def eos_token(self) -> str | None:
        """The name of `eos_token_id`."""
        return self._name_of(self.eos_token_id)

    @property
    def bos_token(self) -> str | None:
        """The name of `bos_token_id`, the token that begins a text."""
        return self._name_of(self.bos_token_id)

    @property
    def pad_token(self) -> str | None:
        """The name of the token that fills rows. Nothing here needs it."""
        return self.special_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of `pad_token`."""
        return self._named_id("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The name of the token that stands for text which the vocabulary lacks."""
        return self.special_tokens.get("unk_token")

    @property
    def unk_token_id(self) -> int | None:
        """The id of `unk_token`."""
        return self._named_id("unk_token")

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        return sorted(self.byte_table.special_ids)

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Return every token's id by its name."""
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return vocabulary

    def beyond(self, num_ids: int) -> tuple[list[str], list[str]]:
        """The names of the tokens that have other ids than the first `num_ids`: of the vocabulary itself, and of those
        that were added the ones in use, which chat templates write or texts begin or end with."""
        if num_ids >= len(self.byte_table):
            return [], []
        added = self._inner.get_added_tokens_decoder()
        far = {token: name for name, token in self.get_vocab().items() if token >= num_ids}
        own = [name for token, name in far.items() if token not in added]
        ends = {self.bos_token_id, *self.eos_token_ids}
        used = {t for t, name in far.items() if t in ends or any(name in text for text in self.chat_templates.values())}
        return own, [far[token] for token in sorted(used & added.keys())]

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
    ) -> str | list[int] | Encoding:
        """Return a conversation's prompt: its token ids, or with `tokenize` False its text. See `render_chat`; with
        `return_dict`, and for `truncation` and `max_length`, see a call of the tokenizer."""
        tokenizing, is_table = taken_out(template_kwargs)
        text = render_chat(
            self,
            conversation,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
        )
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False, **tokenizing)
        return encoding if is_table else list(encoding.input_ids)

    def check_length(self, text: str, max_tokens: int, field: str = "prompt") -> None:
        """Raise `InvalidArgument` naming `field` for a text that certainly has more tokens than that. Tokenises
        nothing, so it passes texts that are only somewhat too long."""
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

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool | None = None,
        max_length: int | None = None,
        padding: bool = False,
        return_tensors: None = None,
    ) -> Encoding:
        """Return the `input_ids` of a text, and an `attention_mask` of as many ones; lists of both for a list of texts.

        `max_length`: leave out what is behind this many tokens, the ones around a text counted, unless `truncation` is
        False.
        """
        check_call(truncation, max_length, padding, return_tensors)
        most = None if truncation is False else max_length
        if isinstance(text, str):
            return Encoding.of(self._cut(text, add_special_tokens, most))
        if not isinstance(text, (list, tuple)):
            raise InvalidArgument("text", text, "must be a text, or a list of them")
        for i, one in enumerate(text):
            if not isinstance(one, str):
                raise InvalidArgument(f"text[{i}]", one, "must be a text")
        if most is None:
            return Encoding.of_many(self.encode_batch(text, add_special_tokens))
        return Encoding.of_many([self._cut(one, add_special_tokens, most) for one in text])

    def _cut(self, text: str, add_special_tokens: bool, max_length: int | None) -> list[int]:
        """The tokens of a text without its end, where there are more than `max_length`."""
        if max_length is None:
            return self.encode(text, add_special_tokens)
        _check_text(text)
        around = self._inner.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
        if max_length < around:
            raise InvalidArgument("max_length", max_length, f"must be at least {around}, the tokens around a text")
        encoding = self._inner.encode(text, add_special_tokens=False)
        encoding.truncate(max_length - around)
        ids: list[int] = self._inner.post_process(encoding, None, add_special_tokens).ids
        return ids

    def decode(
        self,
        token_ids: int | Iterable[int] | Array,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of tokens, or of one; bytes that are no UTF-8 become U+FFFD."""
        check_clean_up(clean_up_tokenization_spaces)
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(ids_of(token_ids)) + detokenizer.finish()

    def batch_decode(
        self,
        sequences: Iterable[Iterable[int] | Array] | Array,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """Return the text of each of many sequences of tokens."""
        return [self.decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in numbers(sequences)]

    def detokenizer(self, skip_special_tokens: bool = True, keep_leading_space: bool = False) -> Detokenizer:
        """Return what turns tokens into text as they come; keep the leading space of text that continues a prompt."""
        return Detokenizer(self.byte_table, skip_special_tokens, keep_leading_space)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for."""
        return self.byte_table.token_bytes(token_id)

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the names of a text's tokens."""
        return [str(self._name_of(token_id)) for token_id in self.encode(text, add_special_tokens)]

    def convert_ids_to_tokens(
        self, ids: int | Iterable[int] | Array, skip_special_tokens: bool = False
    ) -> str | None | list[str | None]:
        """Return the name of one token, or the names of many; None for an id that the vocabulary lacks."""
        given = numbers(ids)
        if isinstance(given, int):
            return self._name_of(given)
        skipped = self.byte_table.special_ids if skip_special_tokens else frozenset()
        return [self._name_of(token_id) for token_id in given if token_id not in skipped]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> int | None | list[int | None]:
        """Return the id of a name, or the ids of many; that of the unknown token, if there is one, where the vocabulary
        lacks it."""
        if isinstance(tokens, str):
            found = self.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.unk_token_id if (found := self.token_to_id(token)) is None else found for token in tokens]

    def _name_of(self, token_id: int | None) -> str | None:
        if token_id is None or not 0 <= token_id <= MAX_INT32:
            return None
        name: str | None = self._inner.id_to_token(token_id)
        return name

    def _named_id(self, kind: str) -> int | None:
        name = self.special_tokens.get(kind)
        return None if name is None else self.token_to_id(name)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its name, as "<|im_end|>"."""
        found: int | None = self._inner.token_to_id(token)
        return found


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidArgument("prompt", text, f"must be a string, is a {type(text).__name__}")
    check_encodable("prompt", text)


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
        raise ModelFileError(path, f"does not exist{hint}; name a tokenizer directory")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        problem = f"is no tokenizer: {str(error)[:MAX_SHOWN]}; name a tokenizer directory"
        raise ModelFileError(path, problem) from error
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
    return templates | {name: _template(file) for name, file in files.items() if file.is_file()}


def _template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFileError(file, f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ModelFileError(file, f"is not UTF-8: {error.reason} at byte {error.start}") from error


def tokenizer_from_gguf(fields: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return the tokenizer that the metadata of a GGUF file describe; `path` is for errors."""
    vocabulary = read_vocabulary(fields, path)
    inner = build_tokenizer(vocabulary)
    ids = {name: vocabulary.special_id(kind) for name, kind in GGUF_KINDS.items()}
    special = ids | {"pad_token": vocabulary.padding_id()}
    return Tokenizer(
        inner,
        path,
        ids["bos_token"],
        vocabulary.end_ids(),
        vocabulary.chat_templates(),
        {name: str(inner.id_to_token(i)) for name, i in special.items() if i is not None},
    )
