"""The stage of Ray Data pipelines, called as Ray Data calls it: it needs nothing of Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedec import LoRARequest, SamplingParams
from pagedec.batch.ray_stage import GenerateStage
from pagedec.errors import InvalidArgument
from tests.batch.tiny import make_lora

SAID = [{"role": "user", "content": "a"}]
ENGINE: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "num_blocks": 64, "max_model_len": 64}


def column(*rows: Any) -> np.ndarray[Any, Any]:
    made = np.empty(len(rows), object)
    made[:] = rows
    return made


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "prompt",
            ["text", [97, 98], np.array([97, 98], np.int32), np.array([97, 98], object), (97, 98)],
            [None, 3.5, np.float64("nan"), b"ab", ["a"], [97.5, 98], [97, 1000], "", []],
        ),
        ("messages", [SAID, tuple(SAID), column(*SAID)], [None, "text", [3], [None], [{"role": "user"}], [], 7]),
    ],
)
def test_a_row_s_mistake_costs_that_row_alone(name: str, good: list[Any], bad: list[Any], tiny: Path) -> None:
    """Among them what a table has where it has nothing, and numbers that were cut to whole ones."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    stage = GenerateStage(model=str(tiny), column=name, params=params, **ENGINE)
    found = stage({name: column(*good, *bad), "id": np.arange(len(good) + len(bad))})
    errors = found["error"].tolist()
    assert errors[: len(good)] == [None] * len(good) and found["finish_reason"][0] == "length"
    assert all(error.startswith(name) for error in errors[len(good) :]), errors
    assert found["finish_reason"][len(good) :].tolist() == [None] * len(bad)
    assert len({tuple(ids) for ids in found["token_ids"][1 : len(good)]}) == 1
    assert found["id"].tolist() == list(range(len(errors)))


def test_an_adapter(tiny: Path, tmp_path: Path) -> None:
    lora = LoRARequest("a", 1, str(make_lora(tmp_path / "a", 8)))
    rows = {"prompt": column("text", "more")}
    params = SamplingParams(temperature=0, max_tokens=5)
    plain, own = (
        GenerateStage(model=str(tiny), params=params, lora_request=one, enable_lora=True, **ENGINE)(rows)
        for one in (None, lora)
    )
    assert all(error is None for error in own["error"])
    assert [ids.tolist() for ids in own["token_ids"]] != [ids.tolist() for ids in plain["token_ids"]]
    with pytest.raises(InvalidArgument, match="^lora_request is 'a': must be None: .* without enable_lora"):
        GenerateStage(model=str(tiny), lora_request=lora, **ENGINE)
