"""Sentencepiece's BPE as its definition has it, to compare with: join the neighbours whose text has the best score."""

from __future__ import annotations

import heapq
from typing import Any

import regex

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class PlainSentencepiece:
    """From the fields of a GGUF header; independent of the code under test."""

    def __init__(self, fields: dict[str, Any]) -> None:
        tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        triples = list(zip(tokens, types, fields["tokenizer.ggml.scores"], strict=True))
        self.scores = {token: score for token, kind, score in triples if kind in (NORMAL, UNUSED)}
        whole = [token for token, kind, _ in triples if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
        whole.sort(key=len, reverse=True)  # at one place the longest is taken
        self.whole = regex.compile("(" + "|".join(map(regex.escape, whole)) + ")")
        self.prefix = fields.get("tokenizer.ggml.add_space_prefix", True)

    def merged(self, text: str) -> list[str]:
        """Join the best pair, the leftmost of equal ones, until none is a token."""
        parts: list[str | None] = list(text)
        right = list(range(1, len(parts) + 1))
        left = list(range(-1, len(parts) - 1))
        heap: list[tuple[float, int, int, str]] = []

        def offer(i: int, j: int) -> None:
            if 0 <= i and j < len(parts):
                joined = f"{parts[i]}{parts[j]}"
                if joined in self.scores:
                    heapq.heappush(heap, (-self.scores[joined], i, j, joined))

        for i in range(len(parts) - 1):
            offer(i, i + 1)
        while heap:
            _, i, j, joined = heapq.heappop(heap)
            if parts[i] is None or parts[j] is None or f"{parts[i]}{parts[j]}" != joined:
                continue
            parts[i], parts[j] = joined, None
            right[i] = right[j]
            if right[j] < len(parts):
                left[right[j]] = i
            offer(left[i], i)
            offer(i, right[i])
        return [part for part in parts if part is not None]

    def encode(self, text: str) -> list[int]:
        """Return the ids without those around the text; characters that are no token as their bytes."""
        result: list[int] = []
        for i, piece in enumerate(self.whole.split(text)):
            if i % 2:
                result.append(self.ids[piece])
                continue
            spelled = piece.replace(" ", "▁")
            for part in self.merged("▁" + spelled if self.prefix and spelled else spelled):
                known = part in self.scores
                result += [self.ids[part]] if known else [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        return result
