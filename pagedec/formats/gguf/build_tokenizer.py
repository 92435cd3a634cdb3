"""The tokenizer that the vocabulary of a GGUF file describes, in the terms of the `tokenizers` library."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from pagedec.errors import MAX_SHOWN, ModelFileError, shown
from pagedec.formats.gguf.byte_level import build_byte_level, style_of
from pagedec.formats.gguf.sentencepiece import build_sentencepiece
from pagedec.formats.gguf.vocabulary import CONTROL, PREFIX, UNKNOWN, USER_DEFINED, GgufVocabulary

BUILDERS = {"gpt2": build_byte_level, "llama": build_sentencepiece}
# Phi-3's special tokens take the white space behind them with them, except these
PHI3_KEEPING_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def _post_processor(vocabulary: GgufVocabulary, adds_bos: bool) -> Any:
    """Return what puts the first and last token around a text, None where neither is wanted."""
    pieces, special = ["$A"], []
    for kind, place, default in (("bos", 0, adds_bos), ("eos", 1, False)):
        found = vocabulary.special_id(kind)
        if vocabulary.flag(f"add_{kind}_token", default) and found is not None:
            pieces.insert(len(pieces) * place, kind)
            special.append({"id": kind, "ids": [found], "tokens": [vocabulary.tokens[found]]})
    return processors.TemplateProcessing(single=pieces, special_tokens=special) if special else None


def _add_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Make the tokens known that are found in the text as they are, before any cutting and merging."""
    strips = vocabulary.fields.get("general.architecture") == "phi3" and vocabulary.fields[PREFIX + "model"] == "llama"

    def added(*kinds: int) -> list[AddedToken]:
        return [
            AddedToken(
                token,
                special=USER_DEFINED not in kinds,
                normalized=False,
                rstrip=strips and token not in PHI3_KEEPING_SPACE,
            )
            for token in vocabulary.of_type(*kinds)
        ]

    tokenizer.add_special_tokens(added(CONTROL, UNKNOWN))
    tokenizer.add_tokens(added(USER_DEFINED))


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer of a vocabulary; raise ModelFileError naming the field that is wrong or not supported."""
    kind = vocabulary.fields.get(PREFIX + "model")
    if not isinstance(kind, str) or kind not in BUILDERS:
        raise vocabulary.fail(
            "model", f"is {shown(kind)}, supported are {', '.join(BUILDERS)}; name a tokenizer directory"
        )
    adds_bos = kind == "llama" or style_of(vocabulary).adds_bos
    post_processor = _post_processor(vocabulary, adds_bos)
    try:
        tokenizer = BUILDERS[kind](vocabulary)
        _add_tokens(tokenizer, vocabulary)
    except ModelFileError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(vocabulary.path, f"{PREFIX}tokens make no tokenizer: {str(error)[:MAX_SHOWN]}") from error
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return tokenizer
