"""Offline inference: what people use from Python."""

from __future__ import annotations

from pagedec.runtime import torch_first  # noqa: F401

# isort: split
from pagedec.inputs import Prompt, TextPrompt, TokensPrompt
from pagedec.llm.async_llm import AsyncLLM
from pagedec.llm.async_session import AsyncSession, AsyncSessionBranch
from pagedec.llm.offline import LLM
from pagedec.llm.prompts import Job, Prepared
from pagedec.llm.session import Session, SessionBranch

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncSession",
    "AsyncSessionBranch",
    "Job",
    "Prepared",
    "Prompt",
    "Session",
    "SessionBranch",
    "TextPrompt",
    "TokensPrompt",
]
