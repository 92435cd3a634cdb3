"""Steps in the engine's own process and thread."""

from __future__ import annotations

from concurrent.futures import Future

from pagedec.core.forward import Answers, Forwards, MakeMasks, Rules
from pagedec.core.wire import Step
from pagedec.executor.base import Pending, RuleNews
from pagedec.runtime.worker import Worker


class InlineExecutor:
    """Carries out each step at once; on a device that works by itself, it begins those that ask for draws alone."""

    num_restarts, restart_seconds = 0, 0.0

    def __init__(self, worker: Worker) -> None:
        self.worker: Worker | None = worker
        self.geometry, self.overlaps = worker.geometry, worker.overlaps
        self._news = RuleNews()
        self._num_steps = 0

    def execute(self, forwards: Forwards, rules: Rules, masks: MakeMasks | None = None) -> Pending:
        future: Future[Answers] = Future()
        try:
            if self.worker is None:
                raise RuntimeError("the executor is stopped")
            self._num_steps += 1
            step = Step(self._num_steps, forwards, *self._news.of(rules))
            if self.worker.begins(step):
                return self.worker.begin(step)
            future.set_result(self.worker.execute(step, masks))
        except Exception as error:  # the engine decides what a failed step means
            future.set_exception(error)
        except BaseException:  # an interrupt: nobody knows which rules the worker was told
            self._news = RuleNews()
            raise
        return future

    @property
    def problem(self) -> str | None:
        return None

    def mend(self) -> None:
        """Nothing is lost that is here."""

    def give_up(self) -> None:
        """Nobody waits."""

    def stop(self) -> None:
        self.worker = None
