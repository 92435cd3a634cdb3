"""Where scripts for vLLM look for the parameters of a request."""

from __future__ import annotations

from pagedec.params import BeamSearchParams, RequestOutputKind, SamplingParams
from pagedec.structured import StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
