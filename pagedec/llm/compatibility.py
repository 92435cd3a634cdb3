"""Engine arguments of vLLM's scripts that have nothing to do here: checked, and then left."""

from __future__ import annotations

from typing import Any

from pagedec.errors import FeatureNotAvailable
from pagedec.fields import Flag, Integer, Number, Rule

NEUTRAL: dict[str, Rule] = {
    "trust_remote_code": Flag("a permission that is never used: no code that comes with a model is run"),
    "enforce_eager": Flag("there are no graphs to capture"),
    "disable_log_stats": Flag("nothing is logged"),
    "disable_custom_all_reduce": Flag("one process has nothing to reduce over"),
    "max_seq_len_to_capture": Integer("there are no graphs to capture", low=1),
    "gpu_memory_utilization": Number(
        "a share of a GPU's whole memory, which nothing else needs; memory_utilization is one of what is available here",
        above=0,
        high=1,
    ),
    "swap_space": Number("nothing is swapped: what was preempted is computed again", low=0),
    "cpu_offload_gb": Number("all weights are in the CPU's memory already", low=0),
}
"""Each with the reason why it changes nothing. Values are checked, so that a mistake is not missed."""
ONLY: dict[str, tuple[Any, ...]] = {
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
    "kv_cache_dtype": ("auto",),
    "enable_chunked_prefill": (True, None),
    "device": ("cpu", "auto"),
}
"""Those of which some values alone mean what is done here."""


def drop_neutral(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without the neutral ones. Raises `InvalidArgument` for a neutral one with a value that is none, and
    `FeatureNotAvailable` for one that asks for what there is not."""
    kept = {}
    for name, value in arguments.items():
        if name in NEUTRAL:
            NEUTRAL[name].check(name, value)
        elif name in ONLY:
            if value not in ONLY[name]:
                available = ", ".join(map(str, ONLY[name]))
                raise FeatureNotAvailable(name, value, f"not available in this version; available: {available}")
        else:
            kept[name] = value
    return kept
