"""Show how a model's tokenizer reads text: token ids, their pieces, their number; or turn ids back into text.

Texts come as arguments, from a file, or from standard input. A file and standard input are one text, taken exactly as
they are, line ends included, but for a byte order mark in front; with --lines each line is a text. Only the tokenizer
is loaded, no weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from pagedec.cli.arguments import file_tables
from pagedec.cli.console import DONE
from pagedec.cli.texts import json_fault, read_argument, read_stdin, read_text
from pagedec.config import ModelConfig
from pagedec.errors import InvalidArgument
from pagedec.fields import TokenIds, rules
from pagedec.formats.named import files_of

if TYPE_CHECKING:
    from pagedec.text.tokenizer import Tokenizer

READ = ("model", "tokenizer", "revision", "tokenizer_revision", "download_dir")
"""The engine arguments that say where a tokenizer is."""
EPILOG = """\
output:
  one line of ids for each text, separated by commas: what `pagedec generate --skip-tokenizer-init` takes as a prompt
  --pieces   one line for each token: its id, and its text as JSON, or its bytes where they are no whole characters
  --json     one object for each text: {"text", "token_ids", "count"}, with --pieces also "pieces"

examples:
  pagedec tokenize "The capital of France is"
  pagedec tokenize --count -f book.txt --model ./my-model
  pagedec tokenize --pieces --no-special-tokens "naive cafe"
  pagedec tokenize --decode 504,3575,282,4649,314
  pagedec tokenize --chat '[{"role": "user", "content": "Hi"}]' --pieces
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="text to tokenize; - reads standard input")
    parser.add_argument("-f", "--file", metavar="FILE", help="a file to tokenize")
    parser.add_argument("--lines", action="store_true", help="each line of a file or of standard input is a text")
    kind = parser.add_argument_group("what is done").add_mutually_exclusive_group()
    kind.add_argument("--decode", action="store_true", help="the texts are token ids; print the text they stand for")
    kind.add_argument(
        "--chat", action="store_true", help="the texts are JSON lists of messages; apply the chat template"
    )
    parser.add_argument(
        "--special-tokens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="add the tokens that the model wants around a text; with --decode, show special tokens (default: yes)",
    )
    form = parser.add_argument_group("what is shown")
    shown = form.add_mutually_exclusive_group()
    shown.add_argument("--pieces", action="store_true", help="each token on a line of its own, with what it stands for")
    shown.add_argument("--count", action="store_true", help="the number of tokens only")
    form.add_argument("--json", action="store_true", help="one JSON object for each text")
    model = parser.add_argument_group("model")
    for name in READ:
        rule, default = rules(ModelConfig)[name]
        shown_default = f" (default: {default})" if default else ""
        flag = f"--{name.replace('_', '-')}"
        model.add_argument(flag, metavar=rule.metavar, help=f"{rule.help}{shown_default}")
    model.add_argument("--config", metavar="FILE", help="TOML file of engine arguments, of which these are read")


def open_tokenizer(config: ModelConfig) -> Tokenizer:
    """The tokenizer of a model, or the one that is named; no weights are opened or fetched."""
    from pagedec.formats.resolve import local_path, resolve_model, resolve_tokenizer
    from pagedec.text.tokenizer import Tokenizer

    if config.tokenizer is None and local_path("model", config.model).exists():
        found = resolve_model(config.model, revision=config.revision).tokenizer
        if found is not None:
            return Tokenizer.from_path(found)
    revision = config.tokenizer_revision
    if revision is None and config.tokenizer in (None, config.model):
        revision = config.revision
    return Tokenizer.from_path(resolve_tokenizer(config.tokenizer or config.model, revision, config.download_dir))


def _split(text: str, lines: bool) -> list[str]:
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if lines else [text]


def read_texts(arguments: argparse.Namespace) -> list[str]:
    """The texts of arguments, file and standard input, in this order."""
    texts: list[str] = []
    for text in arguments.texts:
        texts += _split(read_stdin(), arguments.lines) if text == "-" else [read_argument("texts", text)]
    if arguments.file is not None:
        texts += _split(read_text("file", arguments.file), arguments.lines)
    if not arguments.texts and arguments.file is None:
        if sys.stdin.isatty():
            limit = "must be at least one: as an argument, with --file, or on standard input"
            raise InvalidArgument("texts", [], limit)
        texts += _split(read_stdin(), arguments.lines)
    return texts


def _messages(text: str) -> list[Any]:
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("messages", text, f"is not JSON: {json_fault(error)}") from None
    if not isinstance(messages, list):
        raise InvalidArgument("messages", text, 'must be a list such as [{"role": "user", "content": "Hi"}]')
    return messages


def _ids(text: str, num_tokens: int) -> list[int]:
    """Ids separated by commas, spaces or line ends, as this command and JSON write them."""
    token_ids: tuple[int, ...] = TokenIds("ids").parse("token_ids", ",".join(text.strip().strip("[]").split()))
    for token_id in token_ids:
        if token_id >= num_tokens:
            raise InvalidArgument("token_ids", token_id, f"must be less than {num_tokens}, the size of the vocabulary")
    return list(token_ids)


def _piece(data: bytes) -> str | list[int]:
    """The text of a token, or its bytes where they are no whole characters."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


def _read(tokenizer: Tokenizer, text: str, arguments: argparse.Namespace) -> tuple[str, list[int]]:
    """A text and its tokens; which of them is given depends on the command."""
    if arguments.decode:
        token_ids = _ids(text, len(tokenizer.byte_table))
        return tokenizer.decode(token_ids, skip_special_tokens=not arguments.special_tokens), token_ids
    if arguments.chat:
        from pagedec.text.chat_template import render_chat

        prompt = render_chat(tokenizer, _messages(text))
        return prompt, tokenizer.encode(prompt, add_special_tokens=False)
    return text, tokenizer.encode(text, add_special_tokens=arguments.special_tokens)


def _show(tokenizer: Tokenizer, text: str, token_ids: list[int], arguments: argparse.Namespace) -> None:
    pieces = [_piece(tokenizer.token_bytes(token_id)) for token_id in token_ids] if arguments.pieces else []
    if arguments.json:
        record = {"text": text, "token_ids": token_ids, "count": len(token_ids)}
        print(json.dumps(record | ({"pieces": pieces} if arguments.pieces else {}), ensure_ascii=False))
    elif arguments.count:
        print(len(token_ids))
    elif arguments.pieces:
        for token_id, piece in zip(token_ids, pieces, strict=True):
            print(f"{token_id:8} {json.dumps(piece, ensure_ascii=False)}")
    else:
        print(text if arguments.decode else ",".join(map(str, token_ids)))


def run(arguments: argparse.Namespace) -> int:
    values = dict(file_tables(arguments)[0])
    given = {name: getattr(arguments, name) for name in READ}
    values |= {name: value for name, value in given.items() if value is not None}
    config = ModelConfig(**{name: value for name, value in values.items() if name in given})
    texts = read_texts(arguments)
    with files_of(("model", config.model), ("tokenizer", config.tokenizer)):
        tokenizer = open_tokenizer(config)
    for text in texts:
        _show(tokenizer, *_read(tokenizer, text, arguments), arguments)
    return DONE
