"""Adapters that are removed while others add them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, LoRARequest
from tests.engine.lora_models import GREEDY, PROMPTS, Adapted

Make = Callable[..., LLM]


@pytest.mark.parametrize("is_held", [False, True])
def test_one_that_is_removed_while_it_is_added_again(
    with_loras: Make, adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    """By another path of the same files, also where somebody holds the one that was removed."""
    llm, lora = with_loras(), adapted.loras[0]
    (tmp_path / "alias").symlink_to(lora.lora_path)
    alias = LoRARequest("a1", 1, str(tmp_path / "alias"))
    llm.add_lora(lora)
    add, removed = llm.engine.adapters.add, list[bool]()

    def add_late(name: str, path: str) -> Any:
        added = add(name, path)
        if not removed:
            removed.append(llm.remove_lora(1))  # as another thread does
        return added

    with llm.loras.holding("a1") if is_held else contextlib.nullcontext():
        monkeypatch.setattr(llm.engine.adapters, "add", add_late)
        assert llm.add_lora(alias) and removed == [True]
    assert llm.list_loras() == {1} and [*llm.engine.adapters.files] == [2]
    [output] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=alias)
    assert output.outputs[0].token_ids == adapted.want(lora, PROMPTS[0])
    assert llm.remove_lora(1) and llm.engine.adapters.files == {} and llm.list_loras() == set()


def test_one_that_the_engine_has_forgotten_can_be_removed(with_loras: Make, adapted: Adapted) -> None:
    llm = with_loras()
    llm.add_lora(adapted.loras[0])
    llm.engine.adapters.remove("a1")
    assert llm.remove_lora(1) and llm.list_loras() == set() and llm.add_lora(adapted.loras[0])
