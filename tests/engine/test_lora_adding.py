"""Adapters that are added: what is looked at, and what a call that is refused leaves behind."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, AsyncLLM, LoRARequest
from pagedec.errors import InvalidArgument, ModelFileError, SessionLimit
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


def test_a_call_that_is_refused_leaves_no_adapters(with_loras: Make, adapted: Adapted, tmp_path: Path) -> None:
    llm, (one, two, three) = with_loras(max_loras=2, max_session_tokens=8), adapted.loras
    gone = LoRARequest("gone", 9, str(tmp_path / "gone"))
    assert llm.add_lora(one)
    with pytest.raises(ModelFileError, match="does not exist"):
        llm.generate(PROMPTS[:4], GREEDY, lora_request=[two, one, three, gone])
    with pytest.raises(InvalidArgument, match="logprobs"):
        llm.generate(PROMPTS[:2], [GREEDY, GREEDY.clone(logprobs=1000)], lora_request=[two, three])
    with pytest.raises(SessionLimit):
        llm.session(PROMPTS[1], lora_request=two)
    assert llm.list_loras() == {1}
    outputs = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=[two, two])
    assert tokens_of(outputs) == [adapted.want(two, prompt) for prompt in PROMPTS[:2]] and llm.list_loras() == {1, 2}


def test_names_and_numbers_of_a_call_are_compared_before_files_are_read(
    with_loras: Make, adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, (one, two, _) = with_loras(), adapted.loras
    monkeypatch.setattr(llm.engine.adapters, "_read", lambda path: pytest.fail(f"{path} is read"))
    for other, message in (
        (LoRARequest("a1", 7, one.lora_path), "^lora_int_id is 7: must be 1, that of adapter 'a1'$"),
        (LoRARequest("b", 1, two.lora_path), "^lora_int_id is 1: must be another one for adapter 'b': .* 'a1'$"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            llm.generate(PROMPTS[:2], GREEDY, lora_request=[one, other])
    assert llm.list_loras() == set()


def test_a_session_that_is_refused_leaves_none_either(adapted: Adapted) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64}
        async with AsyncLLM(str(adapted.path), enable_lora=True, max_session_tokens=8, **settings) as llm:
            await llm.add_lora(adapted.loras[0])
            with pytest.raises(SessionLimit):
                await llm.session(PROMPTS[1], lora_request=adapted.loras[2])
            assert await llm.list_loras() == {1}

    asyncio.run(main())


def test_what_somebody_else_has_named_meanwhile_stays(with_loras: Make, adapted: Adapted) -> None:
    llm, (one, two, _) = with_loras(), adapted.loras
    with pytest.raises(ZeroDivisionError), llm.loras.adding([one, two]):
        assert llm.add_lora(one)
        raise ZeroDivisionError
    assert llm.list_loras() == {1}


def test_adapters_are_removed_by_number(with_loras: Make, adapted: Adapted) -> None:
    llm, one = with_loras(), adapted.loras[0]
    llm.add_lora(one)
    for wrong in ("a1", one, True, None):
        for call in (llm.remove_lora, llm.pin_lora):
            with pytest.raises(InvalidArgument, match="^lora_id is .*: must be a whole number, the lora_int_id of an"):
                call(wrong)
    assert llm.list_loras() == {1} and llm.remove_lora(1)
