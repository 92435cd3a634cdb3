"""Offline inference: what people use from Python."""

from __future__ import annotations

from pagedec.llm.offline import LLM
from pagedec.llm.prompts import Job, Prompt, TextPrompt, TokensPrompt

__all__ = ["LLM", "Job", "Prompt", "TextPrompt", "TokensPrompt"]
