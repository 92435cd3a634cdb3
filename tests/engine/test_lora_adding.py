"""Adapters that are added: what is looked at, and what a call that is refused leaves behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedec import LLM, LoRARequest
from pagedec.errors import InvalidArgument, ModelFileError
from tests.engine.lora_models import GREEDY, PROMPTS, Adapted, tokens_of

Make = Callable[..., LLM]


def test_who_adds_one_by_hand_is_told_that_its_files_have_changed(
    with_loras: Make, adapted: Adapted, tmp_path: Path
) -> None:
    llm, folder = with_loras(), tmp_path / "mine"
    shutil.copytree(adapted.loras[0].lora_path, folder)
    lora = LoRARequest("mine", 1, str(folder))
    assert llm.add_lora(lora) and llm.add_lora(lora)
    shutil.copytree(adapted.loras[2].lora_path, folder, dirs_exist_ok=True)
    with pytest.raises(
        InvalidArgument, match=r"^lora_path is .*: must have what .* when mine was .*; remove it first$"
    ):
        llm.add_lora(lora)
    assert llm.remove_lora(1) and llm.add_lora(lora)
    assert tokens_of(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=lora)) == [
        adapted.want(adapted.loras[2], PROMPTS[0])
    ]
    shutil.rmtree(folder)
    with pytest.raises(ModelFileError, match="does not exist"):
        llm.add_lora(lora)
    assert llm.list_loras() == {1}
