"""Any decoder-only model whose modeling code in transformers calls the attention interface plainly, on the paged cache.

A step's rows are one sequence of length `rows` to the modeling code, each with its own position. Everything but
attention works row by row; attention is the paged kernels', which know which row belongs to which branch. So forks,
chunks, prefixes and trees need nothing from the modeling code. Its linear layers are torch's, whose bits may depend on
the number of rows: results are right, and not promised to be bitwise the same in other company.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pagedec.errors import InvalidArgument, InvariantError
from pagedec.formats.resolve import ModelFiles
from pagedec.kernels.backend import NO_ROTATION, AttentionShape, Backend, CacheTensors, Plan
from pagedec.models.adapters import Adapters
from pagedec.models.architecture import Architecture
from pagedec.models.buffers import StepBuffers
from pagedec.models.hf.attention import RUN, AttentionCall, Refused, answering, register
from pagedec.models.hf.hosted_architecture import MAKING, HostedArchitecture, check_length
from pagedec.models.hf.hosted_weights import read_weights
from pagedec.models.hf.probe import check_rows
from pagedec.models.model import Programs

_log = logging.getLogger(__name__)

EXACT = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""How far, of the largest logit, another order of sums may move one. Rows that mix differ by about 1."""


class _ReadOut:
    """Runs the model, and its head on chosen rows only, whatever that head is.

    It stands in for the forward of the module below the head: what that gives is handed on for the chosen rows alone,
    and can be handed on for other rows of the same forward later.
    """

    def __init__(self, model: Any, trunk: str) -> None:
        module = model.get_submodule(trunk)
        self._model = model
        self._forward: Callable[..., Any] = module.forward
        self._output: Any = None
        self._again = False
        self._rows = torch.zeros(1, dtype=torch.long)
        module.forward = self._trunk

    def run(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, again: bool) -> torch.Tensor:
        """Return the logits [m, vocab] of `rows` [m] of a forward of token ids [n] at positions [n], or of the one
        before."""
        self._again, self._rows = again, rows.long()
        logits: torch.Tensor = self._model(
            input_ids=ids[None].long(), position_ids=positions[None].long(), use_cache=False
        ).logits
        return logits[0]

    def _trunk(self, *args: Any, **kwargs: Any) -> Any:
        if not self._again:
            self._output = self._forward(*args, **kwargs)
        if isinstance(self._output, tuple):
            return (self._output[0][:, self._rows], *self._output[1:])
        output = copy.copy(self._output)
        output.last_hidden_state = self._output.last_hidden_state[:, self._rows]
        return output


class _Sinks:
    """A layer's: the parameter that the modeling code gives with each call, and its numbers fp32 [num_heads]; None."""

    def __init__(self, model: Any, layer: int, name: str) -> None:
        self.parameter = model.get_parameter(name) if name else None
        self.numbers = None if self.parameter is None else self.parameter.detach().float()
        if self.numbers is not None and not bool(self.numbers.isfinite().all()):
            raise Refused(f"layer {layer} has sinks that are not finite")


class _PagedAttention:
    """Answers a forward's attention calls from the cache: one recorded program for each layer."""

    def __init__(
        self,
        arch: HostedArchitecture,
        backend: Backend,
        b: StepBuffers,
        cache: CacheTensors,
        plans: Sequence[Plan],
        sinks: Sequence[_Sinks],
    ) -> None:
        self.arch, self.buffers, self._sinks = arch, b, sinks
        heads = arch.num_attention_heads + 2 * arch.num_kv_heads
        self._qkv = b.qkv.view(-1, heads, arch.head_dim)
        self._attended = b.attended.view(-1, arch.num_attention_heads, arch.head_dim)
        self._programs = []
        for layer, plan in enumerate(plans):
            program = backend.program()
            program.rope_kv_write(b.num_rows, b.qkv, b.q, cache, layer, b.positions, b.slots, NO_ROTATION)
            program.attention(b.num_rows, plan, b.q, cache, layer, b.attended, sinks[layer].numbers)
            program.finish()
            self._programs.append(program)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, n = call.module.layer_idx, call.query.shape[2]
        is_other = call.given != self.arch.layers[layer].given or call.sinks is not self._sinks[layer].parameter
        if is_other or call.mask is not None or n != int(self.buffers.num_rows):
            raise InvariantError(f"layer {layer} attends in another way than when the model was looked at")
        q_end, k_end = self.arch.num_attention_heads, self.arch.num_attention_heads + self.arch.num_kv_heads
        for part, (begin, end) in (
            (call.query, (0, q_end)),
            (call.key, (q_end, k_end)),
            (call.value, (k_end, k_end + self.arch.num_kv_heads)),
        ):
            self._qkv[:n, begin:end].copy_(part[0].transpose(0, 1))
        self._programs[layer].run()
        # a copy: the buffer is the next layer's too, and nobody knows how long a modeling code holds on to this
        return self._attended[:n].to(call.query.dtype, copy=True)[None]


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Within, torch computes with so many threads: another engine of the process may have told it otherwise."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Piece:
    """A part of the forward, run by calling the model."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run


class _Forward:
    """The forward over one set of buffers, in the pieces that the runner asks for."""

    def __init__(self, read_out: _ReadOut, attention: _PagedAttention, cache: CacheTensors, num_threads: int) -> None:
        self._read_out, self._attention, self._cache = read_out, attention, cache
        self._num_threads, self._process = num_threads, os.getpid()
        self._buffers = attention.buffers

    @torch.inference_mode()
    def body(self) -> None:
        self._call(torch.zeros(1, dtype=torch.int32), again=False)  # the head runs on one row, for nothing

    @torch.inference_mode()
    def head(self) -> None:
        self._read(again=True)

    @torch.inference_mode()
    def whole(self) -> None:
        self._read(again=False)

    def _read(self, again: bool) -> None:
        b = self._buffers
        num_read = int(b.num_read)
        b.logits[:num_read].copy_(self._call(b.read_rows[:num_read], again))

    def _call(self, rows: torch.Tensor, again: bool) -> torch.Tensor:
        b = self._buffers
        n = int(b.num_rows)
        ids, slots = b.token_ids[:n], b.slots[:n]
        if not again:
            written = slots >= 0
            self._cache.tokens[slots[written].long()] = ids[written]
        # a fork has one thread of all, and OpenMP would wait for the others for ever: kernels see to it themselves
        num_threads = self._num_threads if os.getpid() == self._process else 1
        with _threads(num_threads), answering(self._attention):
            return self._read_out.run(ids, b.positions[:n], rows, again)


class HostedModel:
    """A model of transformers with its weights."""

    adapters: Adapters | None = None
    """Nobody knows which of its layers could have some."""
    lag = 0
    feature_layers: tuple[int, ...] = ()

    def __init__(self, arch: HostedArchitecture, model: Any, backend: Backend, max_position: int) -> None:
        self.arch: Architecture = arch
        self._hosted, self.backend, self.max_position = arch, backend, max_position
        self._num_threads = torch.get_num_threads()
        _log.warning(
            "%s runs through transformers: its results' last bits may depend on their company", arch.class_name
        )
        self.model, self._read_out = model, _ReadOut(model, arch.trunk)
        try:
            self._sinks = [_Sinks(model, layer, kind.sinks) for layer, kind in enumerate(arch.layers)]
            check_rows(self._read_out.run, arch.layers, arch.vocab_size, max_position, EXACT[backend.dtype])
        except Refused as error:
            raise InvalidArgument(
                "architectures", arch.class_name, f"cannot run on the paged cache: {error}"
            ) from error

    def _layer_shapes(self, block_size: int) -> list[AttentionShape]:
        arch = self._hosted
        return [
            AttentionShape(
                arch.num_attention_heads,
                arch.num_kv_heads,
                arch.head_dim,
                block_size,
                kind.scale,
                0 if kind.window >= self.max_position else kind.window,
                kind.soft_cap,
                bool(kind.sinks),
            )
            for kind in arch.layers
        ]

    def attention_shapes(self, block_size: int) -> tuple[AttentionShape, ...]:
        """Return the kinds of the layers, in the order in which they first appear."""
        return tuple(dict.fromkeys(self._layer_shapes(block_size)))

    def buffers(self, max_rows: int) -> StepBuffers:
        """Return the tensors of steps of up to `max_rows` rows."""
        return StepBuffers(self.arch, max_rows, self.backend, 0)

    def programs(self, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> Programs:
        """Return the forward over these tensors; the plans are of `attention_shapes`, in its order."""
        kinds = self.attention_shapes(cache.block_size)
        of_layers = [plans[kinds.index(shape)] for shape in self._layer_shapes(cache.block_size)]
        attention = _PagedAttention(self._hosted, self.backend, b, cache, of_layers, self._sinks)
        forward = _Forward(self._read_out, attention, cache, self._num_threads)
        return Programs(_Piece(forward.body), _Piece(forward.head), _Piece(forward.whole))

    def chained(self, b: StepBuffers, cache: CacheTensors, plans: Sequence[Plan]) -> None:
        """There is no other forward."""


def load_hosted(
    arch: HostedArchitecture, files: ModelFiles, backend: Backend, max_position: int, seed: int = 0
) -> HostedModel:
    """Load the weights with transformers' own loader, or make them up where `files` has none, and check the model's
    rows.

    Raises InvalidArgument where the model cannot run after all, ModelFileError where the files are damaged or do not
    hold exactly the model's weights.
    """
    import transformers

    register()
    check_length(arch, max_position)
    quantization = getattr(backend, "quantization", None)
    if quantization is not None:
        limit = f"is not available for models that run through transformers, as {arch.class_name} does"
        raise InvalidArgument("quantization", quantization, limit)
    model_class = getattr(transformers, arch.class_name)
    if files.weights is None:
        with MAKING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % (1 << 63))
            model = model_class._from_config(arch.config, attn_implementation=RUN, dtype=backend.dtype)
    else:
        model = read_weights(model_class, arch.config, files.weights, backend.dtype)
    return HostedModel(arch, model.eval().requires_grad_(False), backend, max_position)
