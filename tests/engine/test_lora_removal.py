"""Adapters that are removed, or whose call is refused, while others name them."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagedec import LLM, LoRARequest
from pagedec.core.adapter_places import Adapter
from tests.engine.lora_models import GREEDY, PROMPTS, Adapted

Make = Callable[..., LLM]


class Refused(Exception):
    """What a call raises."""


def test_one_that_is_removed_while_it_is_added_again(
    with_loras: Make, adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another path of the same files."""
    llm, lora = with_loras(), adapted.loras[0]
    (tmp_path / "alias").symlink_to(lora.lora_path)
    alias = LoRARequest("a1", 1, str(tmp_path / "alias"))
    llm.add_lora(lora)
    read, removed = llm.engine.adapters.read, list[bool]()

    def read_late(request: LoRARequest) -> Adapter:
        adapter = read(request)
        if not removed:
            removed.append(llm.remove_lora(1))  # as another thread does
        return adapter

    monkeypatch.setattr(llm.engine.adapters, "read", read_late)
    assert llm.add_lora(alias) and removed == [True]
    assert llm.loras.requests == [alias]
    [output] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=alias)
    assert output.outputs[0].token_ids == adapted.want(lora, PROMPTS[0])
    assert llm.remove_lora(1) and llm.list_loras() == set()


def test_one_that_is_removed_while_a_call_names_it(with_loras: Make, adapted: Adapted) -> None:
    """The call goes through it; its name is gone, also behind the call."""
    llm, lora = with_loras(), adapted.loras[0]
    with llm.loras.adding([lora]) as [adapter]:
        assert llm.remove_lora(1)
        llm.engine.add(llm.engine.admit("late", PROMPTS[0], GREEDY, adapter=adapter))
    while llm.engine.unfinished:
        events = llm.engine.step()
    assert list(events[-1].answers[0].token_ids) == adapted.want(lora, PROMPTS[0])  # type: ignore[union-attr]
    assert llm.list_loras() == set()


@pytest.mark.parametrize("is_second_refused", [False, True])
def test_a_refused_call_and_one_that_names_the_same_adapter(
    with_loras: Make, adapted: Adapted, is_second_refused: bool
) -> None:
    """It stays while the second call is under way, and then where that is not refused."""
    llm, lora = with_loras(), adapted.loras[0]
    with contextlib.suppress(Refused), contextlib.ExitStack() as second:
        with contextlib.suppress(Refused), llm.loras.adding([lora, None]) as [own, none]:
            [other] = second.enter_context(llm.loras.adding([lora]))
            assert other is own and none is None
            raise Refused
        assert llm.list_loras() == {1}
        if is_second_refused:
            raise Refused
    assert llm.list_loras() == (set() if is_second_refused else {1})


def test_a_refused_call_forgets_no_other_adapter_of_its_name(with_loras: Make, adapted: Adapted) -> None:
    llm, (one, two, _) = with_loras(), adapted.loras
    other = LoRARequest("a1", 1, two.lora_path)
    with contextlib.suppress(Refused), llm.loras.adding([one]):
        assert llm.remove_lora(1) and llm.add_lora(other)
        raise Refused
    assert llm.loras.requests == [other]


def test_calls_that_are_refused_and_calls_that_are_not(with_loras: Make, adapted: Adapted) -> None:
    """At once, of few names: who is not refused finds its adapter there, until all of them are removed."""
    llm, loras, barrier = with_loras(), adapted.loras[:2], threading.Barrier(4)
    wrong: list[str] = []

    def call(worker: int) -> None:
        rng = random.Random(worker)
        for i in range(100):
            barrier.wait()
            if worker == 0 and i % 2:
                llm.remove_lora(1), llm.remove_lora(2)
            barrier.wait()
            is_refused = rng.random() < 0.5
            with contextlib.suppress(Refused), llm.loras.adding([rng.choice(loras)]) as [adapter]:
                assert adapter is not None
                if is_refused:
                    raise Refused
            barrier.wait()
            if not is_refused and adapter.request.lora_int_id not in llm.list_loras():
                wrong.append(f"{i}: {adapter.request.lora_name}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))
    assert wrong == [] and llm.loras._num_calls == {}
