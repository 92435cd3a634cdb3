"""A stage of Ray Data pipelines: batches of prompts in, batches with answers out, one engine an actor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedec.batch.answering import chat_prompt
from pagedec.batch.feeder import Feeder
from pagedec.errors import InvalidArgument, PagedecError
from pagedec.llm import LLM
from pagedec.lora.request import LoRARequest
from pagedec.outputs import RequestOutput
from pagedec.params import RequestParams
from pagedec.text.chat_template import check_messages


class GenerateStage:
    """What `dataset.map_batches` makes an actor of:

        dataset.map_batches(GenerateStage, fn_constructor_kwargs={"model": "smollm2", "params": params}, concurrency=2)

    `params` are sampling or beam search parameters, None: the model's own defaults; `lora_request` names the adapter of
    all prompts; `column` names what is read,
    `prompt` (texts, or token ids) or `messages` (chats); all other arguments are the engine's. A batch keeps its
    columns and gets `text`, `token_ids` and `finish_reason` of the first answer, and `error`: None, or why there is no
    answer, which is then an empty text. A row's mistake costs that row alone.
    """

    def __init__(
        self,
        *,
        params: RequestParams | None = None,
        column: str = "prompt",
        lora_request: LoRARequest | None = None,
        **engine: Any,
    ) -> None:
        if column not in ("prompt", "messages"):
            raise InvalidArgument("column", column, "must be prompt or messages")
        self._llm, self._column = LLM(**engine), column
        self._params = self._llm.get_default_sampling_params() if params is None else params
        self._lora = lora_request
        if lora_request is not None:
            self._llm.add_lora(lora_request)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a batch of columns. Raises `InvalidArgument` where the column is missing, `DeviceError` or
        `DeviceLost` where nothing can be carried out any more."""
        if self._column not in batch:
            raise InvalidArgument("column", self._column, f"must be one of the batch: {', '.join(batch)}")
        rows = list(batch[self._column])
        feeder: Feeder[int] = Feeder(self._llm)
        found: dict[int, list[RequestOutput] | PagedecError] = {}
        for at, row in enumerate(rows):
            try:
                feeder.add(at, [self._prompt(row)], [self._params], field=self._column, lora=self._lora)
            except PagedecError as error:
                found[at] = error
        try:
            while feeder.num_pending:
                found.update(feeder.step())
        finally:
            feeder.abort()
        return {**batch, **_columns([found[at] for at in range(len(rows))])}

    def _prompt(self, row: Any) -> Any:
        given = row.tolist() if isinstance(row, np.ndarray) and row.dtype == object else row
        if self._column == "messages":
            return chat_prompt(self._llm, check_messages(given), {}, False)
        return given  # whatever it is: the engine says what is no prompt


def _columns(results: list[list[RequestOutput] | PagedecError]) -> dict[str, Any]:
    answers = [None if isinstance(result, PagedecError) else result[0].outputs[0] for result in results]
    token_ids = np.empty(len(results), object)
    token_ids[:] = [np.array([] if answer is None else answer.token_ids, np.int64) for answer in answers]
    return {
        "text": np.array(["" if answer is None else answer.text for answer in answers], object),
        "token_ids": token_ids,
        "finish_reason": np.array([None if answer is None else answer.finish_reason for answer in answers], object),
        "error": np.array([str(each) if isinstance(each, PagedecError) else None for each in results], object),
    }
