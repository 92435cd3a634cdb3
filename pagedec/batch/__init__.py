"""Many requests from a file: OpenAI's batch format, answered into a file that a killed job goes on with."""

from __future__ import annotations

from pagedec.batch.job import BatchJob, BatchSummary, run_batch

__all__ = ["BatchJob", "BatchSummary", "run_batch"]
