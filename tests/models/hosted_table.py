"""Which decoder-only models of the installed transformers run here: `python -m tests.models.hosted_table` writes it
into docs/models.md.

Every model type is looked at with its class's default configuration, with fewer layers where that allows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from transformers import __version__
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedec.errors import ModelFileError, PagedecError
from pagedec.models.hf.hosted_architecture import hosted_architecture
from pagedec.models.registry import ARCHITECTURES, MODEL_TYPES

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
VERSION = re.compile(r"The types of transformers ([0-9.]+),")
BEGIN, END = "<!-- hosted table: begin -->", "<!-- hosted table: end -->"
NATIVE, HOSTED = "native", "hosted"
NUM_LAYERS = 8  # the patterns of layers repeat after 6 at most
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "gemma3n_text": {"num_hidden_layers": 35},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
}
"""Where defaults are not those of a model that exists."""


def outcome(model_type: str) -> str:
    """`NATIVE`, `HOSTED`, or why the type is refused."""
    declared = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    if declared in ARCHITECTURES:
        own = CONFIG_MAPPING_NAMES[model_type]
        if own in {CONFIG_MAPPING_NAMES[native] for native in MODEL_TYPES}:
            return NATIVE
        declared = f"{own.removesuffix('Config')}ForCausalLM"  # of the class that its checkpoints were saved from
    config = {"model_type": model_type, "architectures": [declared]}
    try:
        try:
            hosted_architecture({**config, "num_hidden_layers": NUM_LAYERS, **OVERRIDES.get(model_type, {})}, None)
        except ModelFileError:  # the class describes each of its layers
            hosted_architecture({**config, **OVERRIDES.get(model_type, {})}, None)
    except PagedecError as error:
        reason = str(error).partition(": ")[2].removeprefix("cannot run on the paged cache: ")
        return re.sub(r"^layers? [\d, .]+", "a layer ", reason).partition(". ")[0]
    return HOSTED


def rendered(outcomes: Mapping[str, str]) -> str:
    """The table: a row for each outcome, native and hosted first, then the reasons by how many types they concern."""
    rows: dict[str, list[str]] = {NATIVE: [], HOSTED: []}
    for model_type, result in sorted(outcomes.items()):
        rows.setdefault(result, []).append(model_type)
    reasons = sorted((result for result in rows if result not in (NATIVE, HOSTED)), key=lambda r: (-len(rows[r]), r))
    lines = ["| how | model types |", "|---|---|"]
    for result in (NATIVE, HOSTED, *reasons):
        what = result if result in (NATIVE, HOSTED) else f"refused: {result}"
        lines.append(f"| {what.replace('|', '/')} | {', '.join(rows[result])} |")
    return "\n".join(lines)


def documented() -> dict[str, str]:
    """The outcomes that the document shows."""
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    shown = {}
    for line in table:
        what, types = line.strip("| ").split(" | ")
        shown |= dict.fromkeys(types.split(", "), what.removeprefix("refused: "))
    return shown


def documented_version() -> str:
    """The version of transformers that the document speaks of."""
    found = VERSION.search(DOCUMENT.read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def write() -> None:
    text = VERSION.sub(f"The types of transformers {__version__},", DOCUMENT.read_text(encoding="utf-8"))
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    names = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    with ProcessPoolExecutor(2) as pool:
        table = rendered(dict(zip(names, pool.map(outcome, names), strict=True)))
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write()
