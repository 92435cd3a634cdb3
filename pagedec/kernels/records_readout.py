"""The records of read-out: what is done with logits, field by field as in csrc/include/pagedec.h."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_uint64, c_void_p

import numpy as np


class SoftCapArgs(Structure):
    """cap * tanh(x / cap) in place."""

    _fields_ = [("num_rows", c_void_p), ("x", c_void_p), ("n", c_int32), ("cap", c_float)]


class RestrictLogitsArgs(Structure):
    """What may not be drawn becomes -inf, in place."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("logits", c_void_p),
        ("places", c_void_p),
        ("words", c_void_p),
        ("num_banned", c_void_p),
        ("banned_rows", c_void_p),
        ("banned_tokens", c_void_p),
        ("vocab", c_int32),
        ("num_words", c_int32),
        ("num_drawn", c_int32),
        ("reserved", c_int32),
    ]


class CopyRowsArgs(Structure):
    """Rows of one array to places in another."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("src", c_void_p),
        ("dst", c_void_p),
        ("src_rows", c_void_p),
        ("dst_rows", c_void_p),
        ("src_stride", c_int64),
        ("dst_stride", c_int64),
        ("width", c_int32),
        ("src_dtype", c_int32),
        ("dst_dtype", c_int32),
        ("scale", c_float),
    ]


class SpreadLogitsArgs(Structure):
    """Logits of some tokens at their places among all."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("src", c_void_p),
        ("places", c_void_p),
        ("dst", c_void_p),
        ("vocab", c_int32),
        ("draft_vocab", c_int32),
    ]


class PickLogitsArgs(Structure):
    """Single logits, and their ranks."""

    _fields_ = [
        ("num_entries", c_void_p),
        ("logits", c_void_p),
        ("rows", c_void_p),
        ("tokens", c_void_p),
        ("values", c_void_p),
        ("ranks", c_void_p),
        ("vocab", c_int32),
        ("reserved", c_int32),
    ]


class ArgmaxArgs(Structure):
    """The largest logit of each row."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("logits", c_void_p),
        ("token_ids", c_void_p),
        ("vocab", c_int32),
        ("reserved", c_int32),
    ]


class TopkLseArgs(Structure):
    """The k largest logits of each row and the row's logsumexp."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("logits", c_void_p),
        ("row_ids", c_void_p),
        ("token_ids", c_void_p),
        ("values", c_void_p),
        ("lse", c_void_p),
        ("vocab", c_int32),
        ("k", c_int32),
    ]


class Draw(Structure):
    """One Gumbel-max draw from one row, the best or one behind it. DRAW_DTYPE of `pagedec.core.forward` is the same
    record for numpy."""

    _fields_ = [
        ("seed", c_uint64),
        ("stream", c_uint64),
        ("row", c_int32),
        ("position", c_int32),
        ("top_k", c_int32),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("rank", c_int32),
        ("reserved", c_int32),
    ]


class SampleArgs(Structure):
    """A list of draws."""

    _fields_ = [
        ("num_draws", c_void_p),
        ("draws", c_void_p),
        ("logits", c_void_p),
        ("token_ids", c_void_p),
        ("vocab", c_int32),
        ("reserved", c_int32),
    ]


class VerifyArgs(Structure):
    """A list of drafted tokens, kept or replaced by rejection."""

    _fields_ = [
        ("num_drafts", c_void_p),
        ("draws", c_void_p),
        ("drafts", c_void_p),
        ("drafted", c_void_p),
        ("logits", c_void_p),
        ("draft_logits", c_void_p),
        ("token_ids", c_void_p),
        ("vocab", c_int32),
        ("draft_vocab", c_int32),
    ]


class RollChain(Structure):
    """One chain of drawn tokens; CHAIN_DTYPE is the same record for numpy."""

    _fields_ = [
        ("branch", c_int32),
        ("count", c_int32),
        ("prompt_length", c_int32),
        ("rules", c_int32),
        ("kept_row", c_int32),
        ("reserved", c_int32),
    ]


class LayerKind(Structure):
    """A kind of attention layer, and its plan."""

    _fields_ = [("plan", c_void_p), ("shape", c_void_p)]


class RollArgs(Structure):
    """Chains of drawn tokens, and the programs that give their logits."""

    _fields_ = [
        ("whole", c_void_p),
        ("body", c_void_p),
        ("head", c_void_p),
        ("kinds", c_void_p),
        ("num_rows", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("num_read", c_void_p),
        ("read_rows", c_void_p),
        ("chain_ids", c_void_p),
        ("logits", c_void_p),
        ("chains", c_void_p),
        ("draws", c_void_p),
        ("block_table", c_void_p),
        ("chain_slots", c_void_p),
        ("token_plane", c_void_p),
        ("rules", c_void_p),
        ("indptr", c_void_p),
        ("tokens", c_void_p),
        ("kept", c_void_p),
        ("num_kinds", c_int32),
        ("num_chains", c_int32),
        ("table_stride", c_int32),
        ("block_size", c_int32),
        ("vocab", c_int32),
        ("num_drawn", c_int32),
        ("num_rules", c_int32),
        ("room", c_int32),
        ("max_rows", c_int32),
        ("refuse_nan", c_int32),
        ("lag", c_int32),
    ]


class Rules(Structure):
    """What is done to the logits of a request's rows."""

    _fields_ = [
        ("allowed", c_void_p),
        ("word_indptr", c_void_p),
        ("word_tokens", c_void_p),
        ("bias_tokens", c_void_p),
        ("bias_values", c_void_p),
        ("num_allowed", c_int32),
        ("num_words", c_int32),
        ("num_biases", c_int32),
        ("no_repeat_ngram_size", c_int32),
        ("repetition_penalty", c_float),
        ("frequency_penalty", c_float),
        ("presence_penalty", c_float),
        ("reserved", c_int32),
    ]


class ProcessLogitsArgs(Structure):
    """Rules of requests on rows of logits, and where the rows' histories stand."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("logits", c_void_p),
        ("rows", c_void_p),
        ("rule_ids", c_void_p),
        ("rules", c_void_p),
        ("prompt_lengths", c_void_p),
        ("branches", c_void_p),
        ("query_rows", c_void_p),
        ("row_indptr", c_void_p),
        ("kv_len", c_void_p),
        ("block_table", c_void_p),
        ("parents", c_void_p),
        ("token_plane", c_void_p),
        ("lse", c_void_p),
        ("num_rules", c_int32),
        ("num_branches", c_int32),
        ("table_stride", c_int32),
        ("block_size", c_int32),
        ("vocab", c_int32),
        ("reserved", c_int32),
    ]


class BestRow(Structure):
    """One row that is ranked; BEST_ROW_DTYPE is the same record for numpy."""

    _fields_ = [
        ("stream", c_uint64),
        ("row", c_int32),
        ("place", c_int32),
        ("position", c_int32),
        ("score", c_float),
    ]


class BestGroup(Structure):
    """Rows that are ranked together; BEST_GROUP_DTYPE is the same record for numpy."""

    _fields_ = [
        ("seed", c_uint64),
        ("first", c_int32),
        ("stop", c_int32),
        ("k", c_int32),
        ("top_k", c_int32),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("min_tokens_to_keep", c_int32),
        ("is_drawn", c_int32),
        ("reserved", c_int32),
    ]


class Candidate(Structure):
    """One continuation of a row; CANDIDATE_DTYPE is the same record for numpy."""

    _fields_ = [
        ("place", c_int32),
        ("token", c_int32),
        ("key", c_float),
        ("value", c_float),
        ("score", c_float),
        ("logprob", c_float),
    ]


class BestArgs(Structure):
    """The best continuations of groups of rows."""

    _fields_ = [
        ("num_rows", c_void_p),
        ("logits", c_void_p),
        ("lse", c_void_p),
        ("rows", c_void_p),
        ("groups", c_void_p),
        ("candidates", c_void_p),
        ("counts", c_void_p),
        ("num_groups", c_int32),
        ("vocab", c_int32),
        ("has_lse", c_int32),
        ("reserved", c_int32),
    ]


CHAIN_DTYPE = np.dtype([(name, np.int32) for name, *_ in RollChain._fields_])
