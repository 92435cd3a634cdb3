"""What a server's tokens are spelled like: what trees of answers are drawn with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from pagedec.client.connection import Inquiry
from pagedec.outputs import RequestOutput
from pagedec.params import RequestParams
from pagedec.v1 import model_service_pb2 as pb

Out = TypeVar("Out", bound=RequestOutput)


class TokenPieces:
    """The bytes of a model's tokens, as far as the server was asked for them. Adapters have those of their model, which
    is there when they are gone."""

    def __init__(self) -> None:
        self._pieces: dict[bool, dict[int, bytes]] = {True: {}, False: {}}  # with special tokens, and without them

    def spelled(self, output: Out, params: RequestParams, ask: Callable[[Inquiry[None]], Any]) -> Out:
        """The same output, whose tree shows texts: `ask` asks the server when it is drawn."""
        return (
            output.spelled(partial(self._spell, params.skip_special_tokens, ask)) if shows(output, params) else output
        )

    def asking(self, output: RequestOutput, params: RequestParams) -> Inquiry[None] | None:
        """What the server has to be asked before an output can be spelled; None: nothing."""
        if not shows(output, params):
            return None
        answered = (token for answer in output.outputs for token in answer.token_ids)
        return self._asking({*output.prompt_token_ids, *answered}, params.skip_special_tokens)

    # ---- inside
    def _asking(self, token_ids: Iterable[int], skips: bool) -> Inquiry[None] | None:
        known = self._pieces[not skips]
        lacking = sorted({token for token in token_ids if token not in known})
        if not lacking:
            return None
        request = pb.DetokenizeRequest(token_ids=lacking, special_tokens=not skips)

        def read(told: pb.DetokenizeResponse) -> None:
            known.update(zip(lacking, told.pieces, strict=True))

        return Inquiry("Detokenize", request, read, is_safe=True)

    def _spell(self, skips: bool, ask: Callable[[Inquiry[None]], Any], token_ids: list[int]) -> bytes:
        lacking = self._asking(token_ids, skips)
        if lacking is not None:
            ask(lacking)
        return b"".join(self._pieces[not skips][token] for token in token_ids)


def shows(output: RequestOutput, params: RequestParams) -> bool:
    """Its answers have text: they were to have it, and the server has a tokenizer."""
    return params.detokenize and any(answer.text for answer in output.outputs)
