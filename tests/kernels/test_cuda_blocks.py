"""CUDA devices have no weights in blocks, and say so."""

from __future__ import annotations

import pytest
import torch

from pagedec.kernels.device import DeviceBackend
from pagedec.kernels.library import EMULATED_DEVICE, BlockFormat, EmbedArgs, GemmArgs, KernelError, Quantization, load
from tests.kernels import cuda_library
from tests.kernels.block_cases import random_blocks

pytestmark = pytest.mark.skipif(cuda_library.path() is None, reason="the emulated device is not built")


def test_weights_in_blocks_are_refused() -> None:
    backend = DeviceBackend(load(EMULATED_DEVICE), torch.float32)
    with pytest.raises(ValueError, match="quantization is q4_k; a CUDA device has no weights in blocks"):
        backend.pack_blocks([random_blocks("q4_k", 32, 256, seed=1)])
    library, rows = backend.library, backend.zeros((1,), torch.int32)
    with pytest.raises(KernelError, match="pd_packed_blocks_bytes: format is 3; a CUDA device has no weights"):
        library.packed_blocks_bytes(32, 256, BlockFormat.Q4_K)
    with pytest.raises(KernelError, match="pd_pack_blocks: format is 3; a CUDA device has no weights"):
        backend.context.pack_blocks(rows.data_ptr(), 32, 256, BlockFormat.Q4_K, rows.data_ptr())
    record = GemmArgs(num_rows=rows.data_ptr(), n=32, k=256, quantization=int(Quantization.BLOCKS))
    with pytest.raises(KernelError, match=r"quantization is 2; it must be 0 \(none\) or 1 \(int8\) on a CUDA"):
        backend.context.call(record)
    with pytest.raises(KernelError, match="pd_embed: num_segments is 2; on a CUDA device segments must be NULL"):
        backend.context.call(EmbedArgs(num_rows=rows.data_ptr(), segments=rows.data_ptr(), num_segments=2))
