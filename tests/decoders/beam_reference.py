"""Beam search by whichever transformers runs this file, on a model whose logits are a table: no kernel stands between
two searches, so what they find must be equal to the last bit.

python tests/decoders/beam_reference.py < cases.json > answers.json      # of another release, in a process of its own
"""

from __future__ import annotations

import json
import sys
import warnings
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutput

VOCAB = 64
Case = dict[str, Any]


@lru_cache(maxsize=8)
def table(seed: int, eos: tuple[int, ...], lift: float) -> np.ndarray:
    """fp32 [VOCAB, VOCAB, VOCAB]: logits behind the last two tokens. `lift` makes the ends likelier."""
    logits = np.random.default_rng(seed).normal(scale=1.5, size=(VOCAB, VOCAB, VOCAB)).astype(np.float32)
    logits[:, :, list(eos)] += np.float32(lift)
    return logits


def table_of(case: Case) -> np.ndarray:
    return table(case["seed"], tuple(case["eos"]), case["lift"])


class TableModel(PreTrainedModel, GenerationMixin):
    """Looks its logits up."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"
    _supports_cache_class = False

    def __init__(self, config: PretrainedConfig, logits: np.ndarray) -> None:
        super().__init__(config)
        self.logits = torch.from_numpy(logits)
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, return_dict: bool = True, **_: Any
    ) -> CausalLMOutput:
        return CausalLMOutput(logits=self.logits[input_ids[:, -2], input_ids[:, -1]][:, None])

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": kwargs.get("attention_mask")}


def settings(case: Case) -> dict[str, Any]:
    """A case as generation settings of transformers."""
    given = {
        "num_beams": case["width"], "num_return_sequences": case["answers"], "length_penalty": case["length_penalty"],
        "early_stopping": case["early_stopping"], "max_new_tokens": case["max_tokens"], "do_sample": False,
        "eos_token_id": case["eos"] or None, "pad_token_id": case["eos"][0] if case["eos"] else 0, "use_cache": False,
        "bos_token_id": None,
    }  # fmt: skip
    if case["min_tokens"]:
        given["min_new_tokens"] = case["min_tokens"]
    for name in ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"):
        if case.get(name):
            given[name] = case[name]
    if case.get("sequence_bias"):
        given["sequence_bias"] = {tuple(ids): number for ids, number in case["sequence_bias"]}
    if case.get("groups", 1) > 1:
        given |= {"num_beam_groups": case["groups"], "diversity_penalty": case["diversity_penalty"]}
    return given


class EndsWith(StoppingCriteria):
    """Stops where a text ends with one of some sequences: what a stop string does."""

    def __init__(self, endings: list[list[int]]) -> None:
        self.endings = endings

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        rows = input_ids.tolist()
        return torch.tensor([any(row[-len(end) :] == end for end in self.endings) for row in rows])


def search(case: Case) -> dict[str, Any]:
    """The answers: token ids behind the prompt, padded as transformers pads them; scores; and beam indices."""
    model = TableModel(PretrainedConfig(vocab_size=VOCAB), table_of(case)).eval()
    config = GenerationConfig(return_dict_in_generate=True, output_scores=True, **settings(case))
    prompt = torch.tensor([case["prompt"]])
    extra = {"stopping_criteria": StoppingCriteriaList([EndsWith(case["stop"])])} if case.get("stop") else {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config, **extra)
    return {
        "sequences": out.sequences[:, prompt.shape[1] :].tolist(),
        "scores": out.sequences_scores.tolist(),
        "beam_indices": out.beam_indices.tolist(),
    }


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    answers = [search(case) for case in json.load(sys.stdin)]
    json.dump({"transformers": transformers.__version__, "answers": answers}, sys.stdout)
