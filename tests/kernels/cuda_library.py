"""CUDA's kernels, on the emulated device and on a real one, and which tests run on them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagedec.kernels.library import CUDA, DEVICES, EMULATED_DEVICE, Context, Library, library_directories, load
from tests.kernels import host_memory

MODULES = {"test_norm", "test_argmax", "test_soft_cap", "test_embed", "test_parts", "test_rope", "test_kv_copy"}
MODULES |= {"test_topk", "test_sample", "test_process_logits", "test_verify", "test_best"}
MODULES |= {"test_attention_bits", "test_restrict_logits", "test_copy_rows", "test_pick_logits", "test_readout"}
MODULES |= {"test_attention_unseen", "test_memory", "test_gemm", "test_gemm_int8", "test_kv_bytes"}
MODULES |= {"test_gemm_activations", "test_gemm_blocks", "test_embed_blocks", "test_gemm_weight_only", "test_experts"}
MODULES |= {"test_lora", "test_lora_gates", "test_spread_logits"}
TOO_LONG = {
    "test_tokens_follow_the_exact_distribution",
    "test_neighbouring_draws_are_independent",
    "test_same_key_same_token_whatever_the_logits_of_others",
    "test_pieces_are_merged",
}
"""Of those modules, for the emulated device: statistics of thousands of draws, where it is tested of which noise a draw
is the argmax; and what the host does with kernels that are tested."""
BETWEEN_PAGES = {"test_rows_in_and_out", "test_cache_writes_and_moves", "test_ends_of_arrays"}
BETWEEN_PAGES |= {"test_ends_of_adapters"}
"""Tests of any module whose arrays lie between pages that end a process: in mappings of their own, which a device
reaches only with all memory of the host. The emulated device alone runs them, as every instruction set does."""
LONG = {"test_alone_is_in_a_crowd", "test_order_of_branches", "test_chunked_is_whole"}
LONG |= {"test_no_bit_depends_on_the_size_of_a_block", "test_few_rows_and_many"}
LONG |= {"test_behind_the_ends", "test_tokens_that_some_rows_see", "test_rows_in_pieces_of_every_height"}
LONG |= {"test_company_of_other_lengths"}
"""Those of them that take it many seconds; test_cuda_attention.py and test_kv_bytes.py have smaller ones."""

OF_CONTENTS = {
    "test_an_invalid_record_is_named",
    "test_invalid_draw_is_named",
    "test_invalid_rows_and_alignment_are_named",
    "test_mistakes_are_named",
    "test_negative_row_count_is_named",
    "test_negative_slot_is_named",
    "test_widths_must_add_up",
    "test_wrong_arguments_are_refused",
}
"""Mistakes in what pointers lead to, which nobody looks for in a real device's memory."""


LARGE, SMALL = 1, 64
"""Blocks with which products of more than 64 rows and outputs go by tiles of 128 x 128 or of 64 x 64."""


def on_devices() -> list[str]:
    """Files of tests that run on a real device, linear layers' and attention's first: most depends on them."""
    own = {
        "test_attention",
        "test_block_size",
        "test_block_swap",
        "test_cuda_attention",
        "test_cuda_fp16",
        "test_cuda_hopper",
        "test_cuda_lora",
        "test_cuda_readout",
        "test_features",
        "test_roll",
    }

    def rank(module: str) -> tuple[bool, str]:
        return "gemm" not in module and "attention" not in module, module

    return [f"tests/kernels/{module}.py" for module in sorted(MODULES | own, key=rank)]


def built() -> list[str]:
    """Of the two, those that are."""
    places = library_directories()
    return [isa for isa in DEVICES if any((place / f"libpagedec_{isa}.so").is_file() for place in places)]


def path() -> Path | None:
    """The emulated device's library, where it is built."""
    return load(EMULATED_DEVICE).path if EMULATED_DEVICE in built() else None


def has_device() -> bool:
    return host_memory.has_device()


def cases(is_long: bool = False) -> list[Any]:
    """Those that are built, as parameters of a test."""
    marks = {CUDA: [pytest.mark.gpu], EMULATED_DEVICE: [pytest.mark.long] if is_long else []}
    return [pytest.param(isa, marks=marks[isa]) for isa in built()]


def device_cases() -> list[Any]:
    """The real device alone, where its library is built."""
    return [case for case in cases() if case.values[0] == CUDA]


def and_device(case: str, contexts: list[Context]) -> list[Context]:
    """A processor's and the emulated device's; or, of the case that `device_cases` gives, the real one's alone."""
    if case == CUDA:
        return [open_library(CUDA).context()]
    return [*contexts, open_library(EMULATED_DEVICE).context()] if path() is not None else contexts


def cases_of(module: str, name: str) -> list[Any]:
    """Those on which a test runs that all instruction sets have."""
    if name in BETWEEN_PAGES:
        isas = [EMULATED_DEVICE] if host_memory.reaches_all(EMULATED_DEVICE) else []
        return [case for case in cases() if case.values[0] in isas]
    if module not in MODULES:
        return []
    not_on = {EMULATED_DEVICE: TOO_LONG, CUDA: OF_CONTENTS}
    return [case for case in cases(name in LONG) if name not in not_on[case.values[0]]]


def open_library(isa: str) -> Library:
    """For tests that hand it tensors of the host."""
    if isa == CUDA and not has_device():
        pytest.skip("no CUDA device")
    return host_memory.host_library(load(isa).path)


def shuffle(library: Library, seed: int) -> None:
    """Let threads of the emulated device run in another order; a real one has its own."""
    if library.isa == EMULATED_DEVICE:
        library.functions.pd_emulate_seed(ctypes.c_uint64(seed))


@contextmanager
def early(library: Library) -> Iterator[None]:
    """Kernels of the emulated device that may begin early do: what they find in its memory until they wait is what was
    there before the kernels in front of them."""
    library.functions.pd_emulate_early(ctypes.c_int32(1))
    try:
        yield
    finally:
        library.functions.pd_emulate_early(ctypes.c_int32(0))
