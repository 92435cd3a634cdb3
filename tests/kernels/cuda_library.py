"""CUDA's kernels on the emulated device, and which tests run on it."""

from __future__ import annotations

from pathlib import Path

from pagedec.kernels.library import EMULATED_DEVICE, library_directories

MODULES = {"test_norm", "test_argmax", "test_soft_cap", "test_embed", "test_parts", "test_rope", "test_kv_copy"}
MODULES |= {"test_topk", "test_sample", "test_process_logits", "test_verify", "test_best"}
MODULES |= {"test_attention_bits", "test_restrict_logits", "test_copy_rows", "test_pick_logits", "test_readout"}
MODULES |= {"test_memory", "test_gemm", "test_gemm_int8"}
TOO_LONG = {
    "test_tokens_follow_the_exact_distribution",
    "test_neighbouring_draws_are_independent",
    "test_same_key_same_token_whatever_the_logits_of_others",
    "test_pieces_are_merged",
}
"""Of those modules: statistics of thousands of draws, where it is tested of which noise a draw is the argmax; and what
the host does with kernels that are tested."""
TESTS = {"test_rows_in_and_out", "test_cache_writes_and_moves"}
"""Tests that run on it as on every instruction set: modules, and single ones of others."""
LONG = {"test_alone_is_in_a_crowd", "test_order_of_branches", "test_chunked_is_whole"}
"""Those of them that take it many seconds; test_cuda_attention.py has smaller ones of the kind."""


def path() -> Path | None:
    """The library, where it is built."""
    places = (place / f"libpagedec_{EMULATED_DEVICE}.so" for place in library_directories())
    return next((place for place in places if place.is_file()), None)
