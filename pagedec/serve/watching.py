"""What an engine holds, for those who ask while it runs: never a wait for long, and never two questions at once."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from pagedec.engine.census import Census, take_census
from pagedec.errors import InvalidArgument
from pagedec.llm.async_llm import AsyncLLM

PATIENCE = 1.0
"""Seconds that a long step may take before it is told how things stood before it."""


class CensusTaker:
    """Asks the engine's thread. Any thread may ask it, and waits meanwhile."""

    def __init__(self) -> None:
        self.last = Census()
        """As things stood when the engine answered last; nothing before there is one."""
        self.llm: AsyncLLM | None = None
        """Whom to ask; None: nobody yet."""
        self._asked: Future[Census] | None = None
        self._asking = threading.Lock()

    def take(self) -> Census:
        """How things stand; as they stood where the engine is busy for too long, or gone."""
        with self._asking:
            if self.llm is None:
                return self.last
            try:
                if self._asked is None:
                    self._asked = self.llm.loop.call(take_census)
                self.last = self._asked.result(PATIENCE)
            except (TimeoutError, InvalidArgument):  # it is in a step, and answers behind it; or it is closed
                return self.last
            finally:
                if self._asked is not None and self._asked.done():
                    self._asked = None
            return self.last
