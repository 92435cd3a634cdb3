"""Beam sampling returns what transformers returns where both draw the same: its `torch.multinomial` is given our noise
(the highest of log-probability plus Gumbel noise are a draw without replacement), on a model whose logits are a table.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, PretrainedConfig

from pagedec.core.sampler import Sampler
from pagedec.decoders.beam_selection import continued
from tests.decoders.beam_driver import gumbel
from tests.decoders.beam_reference import VOCAB, Case, TableModel, settings, table_of
from tests.decoders.test_beam_parity import cases, ours

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="before 5.24 answers end in the order drawn"
)
FILLED = -1e8
"""What transformers fills up with, where there are fewer candidates than beams, has a score below this."""


class Drawing(TableModel):
    """Draws with the noise of `sampler`."""

    has_ended_filled = False
    """What it fills up with has ended, and counts among the answers with which it stops early."""
    has_tied = False
    """Drawn candidates had equal scores, as nearly as fp32 tells: the order in which they are sorted is nobody's."""

    def __init__(self, case: Case, sampler: Sampler) -> None:
        super().__init__(PretrainedConfig(vocab_size=VOCAB), table_of(case))
        self.sampler = sampler

    def _update_finished_beams(self, **given: Any) -> Any:
        ended = given["next_token_hits_stopping_criteria"] & given["top_num_beam_mask"][None, :]
        self.has_ended_filled |= bool((ended & (given["topk_log_probs"] < FILLED)).any())
        return super()._update_finished_beams(**given)  # type: ignore[misc]

    def _get_top_k_continuations(self, **given: Any) -> Any:
        first, length = given["decoder_prompt_len"], given["cur_len"]
        noise = []
        for row in given["running_sequences"][0].tolist():
            stream = np.zeros(1, np.uint64)
            for token in row[first:length]:
                stream = continued(stream, np.array([token]))
            noise.append(gumbel(self.sampler, int(stream[0]), length, VOCAB))
        keys = given["accumulated_log_probs"][0].numpy() + np.concatenate(noise)

        def multinomial(_: torch.Tensor, num_samples: int) -> torch.Tensor:
            return torch.from_numpy(np.argsort(-keys, kind="stable")[:num_samples].copy())[None]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "multinomial", multinomial)
            found = super()._get_top_k_continuations(**given)  # type: ignore[misc]
        scores = found[0][0][found[0][0] > FILLED]
        self.has_tied |= bool((scores[:-1] - scores[1:] < 1e-5).any())
        return found


def drawn(count: int, seed: int) -> Iterator[Case]:
    """Cases with warpers."""
    rng = random.Random(seed)
    choices = {"temperature": (0.5, 0.8, 1.5), "top_k": (3, 8, 20), "top_p": (0.3, 0.7, 0.95), "min_p": (0.05, 0.3)}
    for i, case in enumerate(cases(count, seed)):
        warps = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.4}
        yield {**case, "sampling": {"do_sample": True, **warps}, "draws": i}


def theirs(case: Case) -> tuple[list[list[int]], list[float], Drawing]:
    """Answers and scores, without what fills up, and the model that has drawn."""
    config = GenerationConfig(
        return_dict_in_generate=True, output_scores=True, **{**settings(case), "top_k": 0, **case["sampling"]}
    )
    model = Drawing(case, Sampler(1.0, seed=case["draws"])).eval()
    prompt = torch.tensor([case["prompt"]])
    with torch.no_grad():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    rows = out.sequences[:, len(case["prompt"]) :].tolist()
    answers = zip(rows, lengths, out.sequences_scores.tolist(), strict=True)
    real = [(row[:length], score) for row, length, score in answers if score > FILLED]
    return [row for row, _ in real], [score for _, score in real], model


def compare(count: int, seed: int) -> None:
    """Where fewer candidates are left than beams, there are fewer beams here: of searches that stop early with fillers
    among their answers few come out otherwise, and of those with ties."""
    num_others = 0
    for case in drawn(count, seed):
        found = ours(case, "5", seed=case["draws"], **case["sampling"])
        texts, scores, model = theirs(case)
        if found.texts() != texts:
            assert model.has_tied or (model.has_ended_filled and case["early_stopping"] is True), case
            num_others += 1
            continue
        assert [answer.score for answer in found.done] == pytest.approx(scores, rel=1e-5, abs=1e-5), case
    assert num_others <= count // 200, num_others


def test_the_same_draws_give_the_same_answers() -> None:
    compare(40, seed=7)


@pytest.mark.long
def test_two_thousand_searches() -> None:
    compare(2000, seed=77)
