"""pagedec: serving language models from paged KV blocks, with cheap branches."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pagedec.environment import limit_spinning
from pagedec.errors import (
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
    UnusedWarning,
    WeightsWarning,
)
from pagedec.inputs import TextPrompt, TokensPrompt
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
    "Logprob",
    "ModelFileError",
    "PagedecError",
    "PoolWarning",
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
    "TokensPrompt",
    "UnusedWarning",
    "WeightsWarning",
]

LAZY = {
    **dict.fromkeys(("LLM", "AsyncLLM", "Session", "SessionBranch", "AsyncSession", "AsyncSessionBranch"), "llm"),
    "TokenTrie": "constraints",
}
"""torch takes seconds to import, and --help must not wait for it."""


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(importlib.import_module(f"pagedec.{LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY})
