"""Offline inference: what people use from Python."""

from __future__ import annotations

from pagedec.llm.async_llm import AsyncLLM
from pagedec.llm.offline import LLM
from pagedec.llm.prompts import Job, Prepared, Prompt, TextPrompt, TokensPrompt

__all__ = ["LLM", "AsyncLLM", "Job", "Prepared", "Prompt", "TextPrompt", "TokensPrompt"]
