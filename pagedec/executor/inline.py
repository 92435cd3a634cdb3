"""Steps in the engine's own process and thread."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from pagedec.core.protocol import Answers, LaneForward
from pagedec.runtime.runner import ModelRunner


class InlineExecutor:
    """Carries out each step at once; the future it returns is done."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner: ModelRunner | None = runner

    def execute(self, forwards: Mapping[str, LaneForward]) -> Future[Answers]:
        future: Future[Answers] = Future()
        try:
            if self.runner is None:
                raise RuntimeError("the executor is stopped")
            future.set_result(self.runner.execute(forwards))
        except Exception as error:  # the engine decides what a failed step means
            future.set_exception(error)
        return future

    def stop(self) -> None:
        self.runner = None
