"""The tensors a forward works in, allocated once for the largest step."""

from __future__ import annotations

import numpy as np
import torch

from pagedec.models.architecture import Architecture

READ_ROWS = 128  # rows of logits held at once: 128 x 49152 fp32 are 25 MB; a step that reads out more does it in turns


class StepBuffers:
    """Inputs and activations of one lane. `num_rows` rows of each count in a step, `num_read` rows of the read-out.

    token_ids, positions, slots int32 [max_rows]; read_rows int32 [READ_ROWS]; x fp32 [max_rows, hidden] is the residual
    stream; block fp32 [max_rows, hidden] a block's output, where the model norms that; logits fp32 [READ_ROWS, vocab];
    the rest in the model's dtype.
    """

    def __init__(self, arch: Architecture, max_rows: int, dtype: torch.dtype, mlp_width: int) -> None:
        def ints(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32)

        heads, width = arch.num_attention_heads + 2 * arch.num_kv_heads, arch.num_attention_heads * arch.head_dim
        self.max_rows = max_rows
        self.num_rows, self.num_read = ints(1), ints(1)
        self.token_ids, self.positions, self.slots = ints(max_rows), ints(max_rows), ints(max_rows)
        self.read_rows = ints(READ_ROWS)
        self.x = torch.zeros(max_rows, arch.hidden_size)
        self.block = torch.zeros(max_rows if arch.names.has_out_norms else 0, arch.hidden_size)
        self.normed = torch.zeros(max_rows, arch.hidden_size, dtype=dtype)
        self.qkv = torch.zeros(max_rows, heads * arch.head_dim, dtype=dtype)
        self.q = torch.zeros(max_rows, width, dtype=dtype)
        self.attended = torch.zeros(max_rows, width, dtype=dtype)
        self.mlp = torch.zeros(max_rows, mlp_width, dtype=dtype)
        self.read = torch.zeros(READ_ROWS, arch.hidden_size, dtype=dtype)
        self.logits = torch.zeros(READ_ROWS, arch.vocab_size)
        shared = (self.num_rows, self.num_read, self.token_ids, self.positions, self.slots)
        self._host = tuple(tensor.numpy() for tensor in shared)
        self._read_host = self.read_rows.numpy()

    def load(self, token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        """Put a step's rows in place."""
        num_rows, _, ids, at, to = self._host
        n = len(token_ids)
        assert n <= self.max_rows, f"{n} rows in a step; at most {self.max_rows} fit"
        num_rows[0] = n
        ids[:n], at[:n], to[:n] = token_ids, positions, slots

    def load_read(self, rows: np.ndarray) -> torch.Tensor:
        """Choose the rows to read out; the view of the logits that will hold them."""
        assert len(rows) <= READ_ROWS
        self._host[1][0] = len(rows)
        self._read_host[: len(rows)] = rows
        return self.logits[: len(rows)]
