"""Tokens that were drawn, where the next step's rows can have them before the host knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from pagedec.core.forward import NO_INTS, LaneAnswers, LaneForward
from pagedec.kernels.readout import HostReadOut, within

if TYPE_CHECKING:
    from pagedec.kernels.backend import Backend, CacheTensors
    from pagedec.kernels.link import Link
    from pagedec.kernels.row_buffer import RowBuffer


class DrawnTokens(Protocol):
    """The tokens that one forward draws. The next one's take their places."""

    def begin(self, num_draws: int) -> None:
        """Room for a forward's, in which some tokens are until they are drawn."""

    def sample(self, logits: torch.Tensor, draws: np.ndarray, first: int) -> None:
        """Draw tokens `first`, `first + 1`, ... as `Backend.sample` does."""

    def tokens(self, places: np.ndarray) -> np.ndarray | torch.Tensor:
        """Those at these places, where kernels find them: int32 [num_places]."""

    def asking(self) -> AbstractContextManager[None]:
        """Within it, what kernels are asked for is in its arrays when `later` is answered, or before."""

    def put(self, token_ids: torch.Tensor, rows: np.ndarray, places: np.ndarray) -> None:
        """token_ids[rows] = the tokens at these places. All ranks that share the model call it: the first one has
        drawn them."""

    def later(self) -> Callable[[], np.ndarray]:
        """Gives all of them, int32 [num_draws], when what was begun until now is through. Called once, before two more
        forwards have begun."""


class HostDrawn:
    """Where calls return when they are through."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tokens = NO_INTS

    def begin(self, num_draws: int) -> None:
        self._tokens = np.zeros(num_draws, np.int32)

    def sample(self, logits: torch.Tensor, draws: np.ndarray, first: int) -> None:
        self._tokens[first : first + len(draws)] = self._backend.sample(logits, draws)

    def tokens(self, places: np.ndarray) -> np.ndarray:
        return self._tokens[places]

    def asking(self) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, token_ids: torch.Tensor, rows: np.ndarray, places: np.ndarray) -> None:
        token_ids.numpy()[rows] = of_all(self._backend.link, len(places), lambda: self._tokens[places])

    def later(self) -> Callable[[], np.ndarray]:
        tokens = self._tokens
        return lambda: tokens


def of_all(link: Link | None, num_tokens: int, drawn: Callable[[], np.ndarray]) -> np.ndarray:
    """Tokens that the first rank has drawn, on all of them's hosts."""
    tokens = drawn() if link is None or link.rank == 0 else np.empty(num_tokens, np.int32)
    if link is not None:
        link.broadcast(tokens)
    return tokens


class LateReadOut(HostReadOut):
    """The read-out of a forward that asks for draws alone, and for reports of them and of given tokens: all of it stays
    where kernels leave it until somebody asks."""

    def __init__(
        self,
        backend: Backend,
        forward: LaneForward,
        cache: CacheTensors,
        rules: Mapping[int, Any],
        drawn: DrawnTokens,
        room: RowBuffer,
    ) -> None:
        super().__init__(backend, forward, cache, rules, None, room=room)
        self._drawn = drawn
        drawn.begin(len(forward.draws))

    def _asking(self) -> AbstractContextManager[None]:
        return self._drawn.asking()

    def _tokens(self, drawn: np.ndarray) -> np.ndarray | torch.Tensor:
        return self._drawn.tokens(drawn)

    def _draw(self, logits: torch.Tensor, start: int, whole: bool) -> np.ndarray:
        draws = self._forward.draws
        if whole:
            if len(draws):
                self._drawn.sample(logits, draws, 0)
            return np.arange(len(draws))
        drawn = within(draws["row"], start, start + len(logits), whole=False)
        for run in np.split(drawn, np.flatnonzero(np.diff(drawn) != 1) + 1):
            if len(run):
                self._drawn.sample(logits, self.of_piece(run, start), int(run[0]))
        return drawn

    def later(self) -> Callable[[], LaneAnswers]:
        """Gives the answers, when all that was begun until now is through."""
        tokens = self._drawn.later()

        def answers() -> LaneAnswers:
            self._draws = tokens()
            return self.answers()

        return answers
