"""pagedec: serving language models from paged KV blocks, with cheap branches."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from pagedec.environment import limit_spinning
from pagedec.errors import (
    AbsentFeature,
    BranchBusy,
    BranchClosed,
    CallInterrupted,
    DeviceError,
    DtypeWarning,
    InvalidArgument,
    ModelFileError,
    PagedecError,
    PoolWarning,
    RequestError,
    RequestsFailed,
    SessionLimit,
    SessionTooSmall,
    TokenizerWarning,
    UnusedWarning,
    WeightsWarning,
)
from pagedec.inputs import PromptType, TextPrompt, TokensPrompt
from pagedec.lora.request import LoRARequest
from pagedec.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    BranchOutput,
    CompletionOutput,
    ContinuationScore,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from pagedec.params import BeamSearchParams, RequestOutputKind, RequestParams, SamplingParams
from pagedec.structured import StructuredOutputsParams

limit_spinning()

if TYPE_CHECKING:
    from pagedec.constraints import TokenTrie
    from pagedec.llm import LLM, AsyncLLM, AsyncSession, AsyncSessionBranch, Session, SessionBranch

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncSession",
    "AsyncSessionBranch",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BranchBusy",
    "BranchClosed",
    "BranchOutput",
    "CallInterrupted",
    "CompletionOutput",
    "ContinuationScore",
    "DeviceError",
    "DtypeWarning",
    "InvalidArgument",
    "LoRARequest",
    "Logprob",
    "ModelFileError",
    "PagedecError",
    "PoolWarning",
    "PromptType",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestParams",
    "RequestsFailed",
    "SamplingParams",
    "Session",
    "SessionBranch",
    "SessionLimit",
    "SessionTooSmall",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenTrie",
    "TokenizerWarning",
    "TokensPrompt",
    "UnusedWarning",
    "WeightsWarning",
]

LAZY = {
    **dict.fromkeys(("LLM", "AsyncLLM", "Session", "SessionBranch", "AsyncSession", "AsyncSessionBranch"), "llm"),
    "TokenTrie": "constraints",
}
"""torch takes seconds to import, and --help must not wait for it."""
_TEXT_ONLY = "models write text here, and nothing else"
_BY_NAME = "engine arguments are given by name: `LLM(model, dtype=...)`, `AsyncLLM(model, dtype=...)`"
ABSENT_NAMES = {
    **dict.fromkeys(("EngineArgs", "AsyncEngineArgs"), _BY_NAME),
    "LLMEngine": "`LLM` has the engine in it, and any thread may use it",
    "AsyncLLMEngine": "`AsyncLLM` is the same by its newer name",
    **dict.fromkeys(
        (
            "PoolingParams",
            "PoolingOutput",
            "PoolingRequestOutput",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "ClassificationOutput",
            "ClassificationRequestOutput",
            "ScoringOutput",
            "ScoringRequestOutput",
        ),
        _TEXT_ONLY,
    ),
    "ModelRegistry": "a model's family is a file of pagedec/models/families; others run through transformers' code",
    "initialize_ray_cluster": "the argument `executor='ray'` finds a cluster, or starts one",
    "GuidedDecodingParams": "`StructuredOutputsParams` is the same by its newer name",
}
"""Names of vLLM's package that there are not, with what there is."""
IMPORTING = "importlib._bootstrap"


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(importlib.import_module(f"pagedec.{LAZY[name]}"), name)
    if name in ABSENT_NAMES:
        if sys._getframe(1).f_globals.get("__name__") == IMPORTING:  # `from pagedec import` would not show the other
            raise ImportError(f"cannot import name {name!r} from 'pagedec': {ABSENT_NAMES[name]}", name=__name__)
        raise AbsentFeature(name, ABSENT_NAMES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY})
