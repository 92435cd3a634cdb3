"""The tensors a forward works in, allocated once for the largest step."""

from __future__ import annotations

import numpy as np
import torch

from pagedec.kernels.backend import Backend
from pagedec.models.architecture import Architecture

READ_ROWS = 128  # rows of logits held at once: 128 x 49152 fp32 are 25 MB; a step that reads out more does it in turns


class StepBuffers:
    """Inputs and activations of one lane. `num_rows` rows of each count in a step, `num_read` rows of the read-out.

    token_ids, positions, slots int32 [max_rows]; read_rows int32 [READ_ROWS]; x fp32 [max_rows, hidden] is the residual
    stream; block fp32 [max_rows, hidden] a block's output, where the model norms that; logits fp32 [READ_ROWS, vocab];
    the rest in the model's dtype.
    """

    def __init__(self, arch: Architecture, max_rows: int, backend: Backend, mlp_width: int) -> None:
        f32, own, zeros = torch.float32, backend.dtype, backend.zeros

        def ints(size: int) -> torch.Tensor:
            return zeros((size,), torch.int32)

        heads, width = arch.num_attention_heads + 2 * arch.num_kv_heads, arch.num_attention_heads * arch.head_dim
        self.max_rows, self._write = max_rows, backend.write
        self.num_rows, self.num_read = ints(1), ints(1)
        self.token_ids, self.positions, self.slots = ints(max_rows), ints(max_rows), ints(max_rows)
        self.read_rows = ints(READ_ROWS)
        self.x = zeros((max_rows, arch.hidden_size), f32)
        self.block = zeros((max_rows if arch.names.has_out_norms else 0, arch.hidden_size), f32)
        self.normed = zeros((max_rows, arch.hidden_size), own)
        self.qkv = zeros((max_rows, heads * arch.head_dim), own)
        self.q = zeros((max_rows, width), own)
        self.attended = zeros((max_rows, width), own)
        self.mlp = zeros((max_rows, mlp_width), own)
        self.read = zeros((READ_ROWS, arch.hidden_size), own)
        self.logits = zeros((READ_ROWS, arch.vocab_size), f32)

    def load(self, token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        """Put a step's rows in place."""
        n, write = len(token_ids), self._write
        assert n <= self.max_rows, f"{n} rows in a step; at most {self.max_rows} fit"
        write(self.num_rows, np.array([n], np.int32))
        write(self.token_ids, token_ids)
        write(self.positions, positions)
        write(self.slots, slots)

    def load_read(self, rows: np.ndarray) -> torch.Tensor:
        """Choose the rows to read out; the view of the logits that will hold them."""
        assert len(rows) <= READ_ROWS
        self._write(self.num_read, np.array([len(rows)], np.int32))
        self._write(self.read_rows, rows)
        return self.logits[: len(rows)]
