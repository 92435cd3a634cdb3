"""Sentencepiece BPE vocabularies of GGUF files, `tokenizer.ggml.model` "llama": Llama 2, Mistral, Phi-3, Gemma.

Sentencepiece (Kudo & Richardson 2018) joins the two neighbours whose joined text is the token of the best score,
wherever their border lies. The `tokenizers` library ranks pairs instead, so each token gives a rank to every pair that
makes it.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from pagedec.formats.gguf.vocabulary import NORMAL, UNKNOWN, UNUSED, WORD_START, GgufVocabulary, read_scores

MAX_TOKEN_CHARACTERS = 256  # of what merges: the work grows with the square; in use are up to 64
_MERGED = (0, NORMAL, UNUSED)  # the others are control, taken whole before merging, or bytes; 0 is undefined


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return the pairs by rank: tokens by score, then id; of one token the pairs with the longer left part first."""
    scores = read_scores(vocabulary)
    merged = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in _MERGED}
    merges = []
    for i in sorted(range(len(scores)), key=lambda i: -scores[i]):
        token = vocabulary.tokens[i]
        if vocabulary.types[i] not in _MERGED:
            continue
        if len(token) > MAX_TOKEN_CHARACTERS:
            problem = f"number {i} has {len(token)} characters, at most {MAX_TOKEN_CHARACTERS} are supported"
            raise vocabulary.fail("tokens:", problem)
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in merged and right in merged:
                merges.append((left, right))
    return merges


def build_sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer without its special tokens.

    `add_space_prefix`, true unless the file says otherwise, puts a space before the text and after each special token,
    as sentencepiece's dummy prefix does; decoding drops the first one.
    """
    unknown = vocabulary.special_id("unknown")
    names = [vocabulary.tokens[unknown]] if unknown is not None else vocabulary.of_type(UNKNOWN)
    options: dict[str, Any] = {"unk_token": names[0]} if names else {}
    merges = _merges(vocabulary)
    model = models.BPE(dict(vocabulary.ids), merges, fuse_unk=True, byte_fallback=True, **options)
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", WORD_START)
    steps = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_START), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
