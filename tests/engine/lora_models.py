"""A tiny model with adapters of all its linear layers, and what transformers' own models with merged weights answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from pagedec import LLM, LoRARequest, SamplingParams
from tests.formats.lora_files import write_lora
from tests.models.checkpoints import VOCAB

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
RANKS = (8, 16, 4)
"""Of the adapters, in their order."""
SCALE = 2.0
Lora = LoRARequest | None


def prompts_of(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts_of((5, 17, 33, 70))
"""They end in the middle of a block, and one begins a second chunk where steps are small."""


@dataclass
class Adapted:
    """A checkpoint, its adapters' folder, and what is asked of merged models."""

    path: Path
    folder: Path
    answers: dict[tuple[str, tuple[int, ...], int], list[int]] = field(default_factory=dict)

    @cached_property
    def loras(self) -> list[LoRARequest]:
        """Three adapters that change answers."""
        return [self.write(f"a{i}", rank, seed=i) for i, rank in enumerate(RANKS, start=1)]

    @property
    def choices(self) -> list[Lora]:
        return [None, *self.loras]

    def write(self, name: str, rank: int, seed: int, std: float = 0.25, folder: str = "") -> LoRARequest:
        """An adapter of random numbers; its number is the seed."""
        pairs = self._pairs(rank, seed, std)
        return LoRARequest(name, seed, str(write_lora(self.folder / (folder or name), pairs, alpha=SCALE * rank)))

    def _pairs(self, rank: int, seed: int, std: float) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * std

        linear = {
            name: module
            for name, module in self._model().named_modules()
            if isinstance(module, torch.nn.Linear) and "layers." in name
        }
        return {
            name: (drawn(rank, module.in_features), drawn(module.out_features, rank)) for name, module in linear.items()
        }

    def _model(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    def merged(self, lora: Lora) -> Any:
        """transformers' model with an adapter's products added to its weights."""
        model = self._model()
        if lora is not None:
            place = self.loras.index(lora)
            modules = dict(model.named_modules())
            for name, (a, b) in self._pairs(RANKS[place], lora.lora_int_id, 0.25).items():
                modules[name].weight.data += SCALE * (b @ a)
        return model

    def merged_path(self, lora: LoRARequest) -> Path:
        """The same as a checkpoint."""
        path = self.folder / f"{lora.lora_name}-merged"
        if not path.is_dir():
            self.merged(lora).save_pretrained(path)
        return path

    def want(self, lora: Lora, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        """The most probable continuation by the merged model."""
        key = lora.lora_name if lora else "", tuple(prompt), num_tokens
        if key not in self.answers:
            with torch.no_grad():
                made = self.merged(lora).generate(
                    torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
                    eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
            self.answers[key] = made[0, len(prompt) :].tolist()
        return self.answers[key]

    def load(self, **arguments: Any) -> LLM:
        settings = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 64, "enable_lora": True}
        return LLM(str(self.path), **settings | arguments)


def tokens_of(outputs: Any) -> list[list[int]]:
    """The first answers."""
    return [output.outputs[0].token_ids for output in outputs]


def bits_of(outputs: Any) -> list[Any]:
    """All answers, with the bits of their reports."""
    return [
        [
            (
                answer.token_ids,
                [{i: one.logprob for i, one in (table or {}).items()} for table in answer.logprobs or ()],
            )
            for answer in output.outputs
        ]
        for output in outputs
    ]
