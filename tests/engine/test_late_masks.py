"""Masks that follow a step: asked for while the device works, and what is wrong with them fails that step alone."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from pagedec.core.forward import Masks
from pagedec.errors import InvariantError
from tests.engine.crowd import SMALL, Tiny, Tokens, assert_whole
from tests.engine.masks import masked_forward
from tests.masks import of_words
from tests.support import wait_for


@pytest.mark.parametrize("executor", ["inline", "process"])
@pytest.mark.parametrize("num_rows", [1, 130, 250], ids="{} rows".format)
def test_masks_follow_a_forward(tiny: Tiny, executor: str, num_rows: int) -> None:
    """They are asked for once, after the step was begun; of a masked row only what they allow is drawn. 128 rows are
    one piece."""
    llm = tiny(executor=executor, num_blocks=64, max_num_batched_tokens=512)
    runner = llm.engine.executor
    forward, masks, allowed = masked_forward(num_rows, llm.engine.limits.vocab_size)
    plain = runner.execute({"target": forward(masked=False)}, {}).result()["target"].draws
    asked = []

    def late(rolled: np.ndarray) -> Masks:
        assert not len(rolled)
        asked.append(1)
        return masks

    draws = runner.execute({"target": forward(masked=True)}, {}, late).result()["target"].draws
    assert asked == [1]
    for i, (token, other) in enumerate(zip(draws.tolist(), plain.tolist(), strict=True)):
        assert token == other if i not in allowed else token in allowed[i]
    assert any(token != other for token, other in zip(draws.tolist(), plain.tolist(), strict=True))
    with pytest.raises((InvariantError, ValueError), match="masks of .* are due"):
        runner.execute({"target": forward(masked=True)}, {}).result()
    with pytest.raises(ValueError, match="masks of .* are due"):
        few = of_words(masks.words[:, :1].copy())
        runner.execute({"target": forward(masked=True)}, {}, lambda _: few).result()
    again = runner.execute({"target": forward(masked=True)}, {}, late).result()["target"].draws
    assert again.tolist() == draws.tolist(), "a step that was refused leaves nothing behind in the channel"


def test_masks_that_are_none_are_not_awaited_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends would wait for one another for ever."""
    llm = tiny(executor="process", **SMALL)
    forward, masks, _ = masked_forward(3, llm.engine.limits.vocab_size)
    monkeypatch.setattr("pagedec.executor.group.pack_masks", lambda number, masks: np.zeros(4, np.int32))
    said: list[Exception] = []

    def wait() -> None:
        try:
            llm.engine.executor.execute({"target": forward(masked=True)}, {}, lambda _: masks).result()
        except Exception as error:
            said.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        wait_for(lambda: bool(said))
    finally:
        if not said:
            os.kill(llm.engine.executor.pid, signal.SIGKILL)
        waiting.join()
    assert isinstance(said[0], InvariantError)
    llm.engine.scheduler.forget_kv()


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_masks_that_cannot_be_made_fail_the_step_alone(tiny: Tiny, expected: list[Tokens], executor: str) -> None:
    llm = tiny(executor=executor, **SMALL)
    forward, _, _ = masked_forward(3, llm.engine.limits.vocab_size)

    def late(rolled: np.ndarray) -> Masks:
        raise ZeroDivisionError("made up")

    pid = getattr(llm.engine.executor, "pid", None)
    with pytest.raises(ZeroDivisionError):
        llm.engine.executor.execute({"target": forward(masked=True)}, {}, late).result()
    assert getattr(llm.engine.executor, "pid", None) == pid, "the worker lives on"
    llm.engine.scheduler.forget_kv()
    assert_whole(llm, expected)
