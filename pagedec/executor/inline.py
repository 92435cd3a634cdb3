"""Steps in the engine's own process and thread."""

from __future__ import annotations

from pagedec.core.adapter_places import AdapterFiles
from pagedec.core.forward import Answers, Forwards, MakeMasks, Rules
from pagedec.errors import DeviceLost
from pagedec.executor.base import NO_ADAPTERS, News, Over, Pending
from pagedec.runtime.worker import Begun, Worker


class InlineExecutor:
    """Carries out each step at once; on a device that works by itself, it begins those that ask for draws alone."""

    num_restarts, restart_seconds = 0, 0.0

    def __init__(self, worker: Worker) -> None:
        self.worker: Worker | None = worker
        self.geometry, self.overlaps = worker.geometry, worker.overlaps
        self._news = News()
        self._num_steps = 0

    def execute(
        self, forwards: Forwards, rules: Rules, masks: MakeMasks | None = None, adapters: AdapterFiles = NO_ADAPTERS
    ) -> Pending:
        try:
            if self.worker is None:
                raise RuntimeError("the executor is stopped")
            self._num_steps += 1
            step = self._news.step(self._num_steps, forwards, rules, adapters)
            if self.worker.begins(step):
                return _Begun(self.worker, self.worker.begin(step))
            return Over(self.worker.execute(step, masks))
        except Exception as error:  # the engine decides what a failed step means
            return Over(error=_failure(error, self.worker))
        except BaseException:  # an interrupt: nobody knows what the worker was told
            self._news = News()
            raise

    @property
    def problem(self) -> str | None:
        return None

    def mend(self) -> None:
        """Nothing is lost that is here."""

    def give_up(self) -> None:
        """Nobody waits."""

    def stop(self) -> None:
        self.worker = None


class _Begun:
    """A step that a device is on its way with."""

    __slots__ = ("_begun", "_worker")

    def __init__(self, worker: Worker, begun: Begun) -> None:
        self._worker, self._begun = worker, begun

    def result(self) -> Answers:
        try:
            return self._begun.result()
        except Exception as error:
            failure = _failure(error, self._worker)
            if failure is error:
                raise
            raise failure from error


def _failure(error: Exception, worker: Worker | None) -> Exception:
    """What a step's error comes to: nothing else can be carried out either where the device is lost."""
    if worker is None or not worker.is_lost():
        return error
    lost = DeviceLost(str(error))
    lost.__cause__ = error
    return lost
