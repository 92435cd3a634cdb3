"""Offline inference: what people use from Python."""

from __future__ import annotations

from pagedec.inputs import Prompt, TextPrompt, TokensPrompt
from pagedec.llm.async_llm import AsyncLLM
from pagedec.llm.offline import LLM
from pagedec.llm.prompts import Job, Prepared

__all__ = ["LLM", "AsyncLLM", "Job", "Prepared", "Prompt", "TextPrompt", "TokensPrompt"]
