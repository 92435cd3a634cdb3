"""Looking at a model of transformers: does everything that one row takes from others pass through its attention calls?

Two looks, because a modeling code may do anything. `probe_attention` runs the model on the meta device, without
weights, and writes down every attention call: what the paged kernels compute from it must be all that is asked.
`check_rows` runs it with its weights and an attention that mixes no rows: then no row may change with its neighbours.
Convolutions, recurrences, positions that are counted instead of given and frequencies that follow the longest row are
all found by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagedec.errors import InvariantError
from pagedec.models.hf.attention import AttentionCall, ProbeMask, Refused, answering

NUM_ROWS = 4
MAX_POSITION = 1 << 18  # positions up to which a mask is asked; longer contexts repeat its pattern
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16

NAMED_INPUTS: Mapping[str, str] = {
    "position_bias": "a bias by position (position_bias)",
    "alibi": "a bias by position (alibi)",
    "head_mask": "a mask of heads (head_mask)",
    "encoder_hidden_states": "another sequence (encoder_hidden_states)",
}
WITHOUT_EFFECT = {
    *(
        "position_ids",
        "cache_position",
        "position_embeddings",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
    ),
    *("output_router_logits", "return_dict", "logits_to_keep", "dropout", "is_causal"),
}
"""Arguments that modeling codes pass on to every attention function, and that change nothing in one without dropout."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer asks of attention. `window` 0: none; `given`: scaling, window and soft cap as they are passed;
    `sinks`: the name of the parameter that has them, one a head, or ""."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    soft_cap: float
    given: tuple[object, object, object]
    sinks: str = ""


class _Recorder:
    """Writes the calls down and answers zeros."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return torch.zeros_like(call.query).transpose(1, 2).contiguous()


class _WithoutValues(TorchDispatchMode):
    """Answers the questions about values that modeling codes ask on the meta device: which experts were hit (none), and
    whether the rows are one sequence (yes)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func is torch.ops.aten.nonzero.default:
                return torch.empty((0, args[0].dim()), dtype=torch.long, device="meta")
            if func is torch.ops.aten._local_scalar_dense.default:
                return True if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Looks:
    """What a look at a model shows. `trunk`: the module that gives the residual stream to the head, by its name."""

    layers: tuple[LayerAttention, ...]
    trunk: str
    vocab_size: int


def probe_attention(model: Any, num_layers: int, max_position: int) -> Looks:
    """Look at a model on the meta device that was built with PROBE.

    Raises `Refused` where the paged kernels would not compute what the modeling code computes.
    """
    recorder, trunks = _Recorder(), _Trunks(model)
    ids = torch.zeros(1, NUM_ROWS, dtype=torch.long, device="meta")
    positions = torch.arange(NUM_ROWS, device="meta")[None]
    with torch.no_grad(), _WithoutValues(), answering(recorder):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    if logits.dim() != 3 or logits.shape[:2] != (1, NUM_ROWS):
        raise Refused(f"its forward gives {list(logits.shape)} logits for {NUM_ROWS} rows")
    layers = _in_order(recorder.calls, num_layers)
    num_positions = min(max_position, MAX_POSITION)
    windows: dict[int, int] = {}  # layers of a kind share one mask
    for call in layers:
        if isinstance(call.mask, ProbeMask) and id(call.mask) not in windows:
            windows[id(call.mask)] = _window_of(call.mask, num_positions)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = tuple(
        replace(_checked(i, call, windows.get(id(call.mask)), num_positions), sinks=_sinks_of(i, call, names))
        for i, call in enumerate(layers)
    )
    shapes = {(kind.num_heads, kind.num_kv_heads, kind.head_dim) for kind in kinds}
    if len(shapes) > 1:
        raise Refused(f"its layers differ in their heads: (heads, KV heads, head size) are {sorted(shapes)}")
    return Looks(kinds, trunks.name(), logits.shape[2])


class _Trunks:
    """Counts the calls of the modules that may be a model's trunk: what it calls its base model, or its decoder."""

    def __init__(self, model: Any) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        candidates = [module for module in (model.base_model, model.get_decoder()) if module is not model]
        self._counts = {names[id(module)]: 0 for module in candidates if id(module) in names}
        for name in self._counts:
            model.get_submodule(name).register_forward_hook(self._count(name))

    def _count(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._counts[name] += 1

        return hook

    def name(self) -> str:
        for name, count in self._counts.items():
            if count == 1:
                return name
        raise Refused("its forward does not call a trunk apart from its head")


def _in_order(calls: Sequence[AttentionCall], num_layers: int) -> list[AttentionCall]:
    """The calls by layer; every layer must have made exactly one."""
    if not calls:
        raise Refused("its modeling code does not call transformers' attention interface")
    by_layer: dict[int, AttentionCall] = {}
    for call in calls:
        layer = getattr(call.module, "layer_idx", None)
        if not isinstance(layer, int) or layer < 0:
            raise Refused(f"{type(call.module).__name__} does not know which layer it is (layer_idx is {layer})")
        if layer in by_layer:
            raise Refused(f"layer {layer} calls attention more than once in a forward")
        by_layer[layer] = call
    without = sorted(set(range(num_layers)) - set(by_layer))
    if without or len(by_layer) != num_layers:
        listed = ", ".join(map(str, without[:4])) + (", ..." if len(without) > 4 else "")
        problem = f"layers {listed} do not call attention" if without else f"{len(by_layer)} layers call attention"
        raise Refused(f"{problem}, of {num_layers}: recurrent, convolutional or shared layers are not supported")
    return [by_layer[layer] for layer in range(num_layers)]


def _checked(layer: int, call: AttentionCall, window: int | None, num_positions: int) -> LayerAttention:
    """A layer's call as the kernels can carry it out; `window` is what its mask says, None without a mask."""
    where = f"layer {layer}"
    for name, value in call.others.items():
        if value is None or value is False or name in WITHOUT_EFFECT:
            continue
        raise Refused(
            f"{where} has attention with {NAMED_INPUTS.get(name, f'an input that is not known here ({name})')}"
        )
    if call.others.get("dropout"):
        raise Refused(f"{where} drops attention at random")
    if window is None:
        causal = call.others.get("is_causal")
        if call.mask is not None:
            raise Refused(f"{where} has a mask of its own making")
        if not (getattr(call.module, "is_causal", True) if causal is None else causal):
            raise Refused(f"{where} is not causal")
        if call.window is not None:
            raise Refused(f"{where} names a window of {call.window} and has no mask with one")
        window = 0
    elif isinstance(call.window, int) and 0 < call.window < num_positions and call.window != window:
        raise Refused(f"{where} names a window of {call.window}, and its mask has one of {window}")
    num_heads, num_kv_heads, head_dim = _heads(where, call)
    scale = head_dim**-0.5 if call.scaling is None else call.scaling
    soft_cap = 0.0 if call.soft_cap is None else call.soft_cap
    for what, number in (("scaling", scale), ("softcap", soft_cap)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise Refused(f"{where} has a {what} that is not a number")
    numbers = float(scale), window, float(soft_cap)  # type: ignore[arg-type]
    return LayerAttention(num_heads, num_kv_heads, head_dim, *numbers, call.given)


def _sinks_of(layer: int, call: AttentionCall, names: Mapping[int, str]) -> str:
    """The parameter that a layer's sinks are."""
    if call.sinks is None:
        return ""
    name, num_heads = names.get(id(call.sinks), ""), call.query.shape[1]
    if not name or tuple(call.sinks.shape) != (num_heads,):  # type: ignore[attr-defined]
        raise Refused(f"layer {layer} has sinks (s_aux) that are not a parameter of {num_heads} numbers, one a head")
    return name


def _heads(where: str, call: AttentionCall) -> tuple[int, int, int]:
    """(heads, KV heads, head size) of a call."""
    q, k, v = (tuple(tensor.shape) for tensor in (call.query, call.key, call.value))
    if len(q) != 4 or len(k) != 4 or len(v) != 4 or {q[0], k[0], v[0]} != {1} or {q[2], k[2], v[2]} != {NUM_ROWS}:
        raise Refused(f"{where} attends with q {list(q)}, k {list(k)} and v {list(v)} for {NUM_ROWS} rows")
    if q[3] != k[3] or k[3] != v[3]:
        raise Refused(f"{where} has heads of {q[3]} for q, {k[3]} for k and {v[3]} for v: they must be of one size")
    if k[1] != v[1] or q[1] % k[1]:
        raise Refused(f"{where} has {q[1]} heads of q, {k[1]} of k and {v[1]} of v")
    if q[3] % HEAD_DIM_STEP or q[3] > MAX_HEAD_DIM:
        limit = f"must be a multiple of {HEAD_DIM_STEP}, at most {MAX_HEAD_DIM}"
        raise Refused(f"{where} has heads of {q[3]}; {limit}")
    return q[1], k[1], q[3]


def _window_of(mask: ProbeMask, num_positions: int) -> int:
    """How many keys a query sees, itself included; 0: all before it. Any other pattern is refused."""
    keys = torch.arange(num_positions)
    last = num_positions - 1
    try:
        width = int(mask.seen(last, keys).sum())
        if width < 1:
            raise Refused("its attention mask lets no row see a token, not even itself: a window must be at least 1")
        near = {0, 1, 2, 7, width - 1, width, width + 1, last // 3, last // 2, last - 1, last}
        for query in sorted(q for q in near if 0 <= q <= last):
            seen = mask.seen(query, keys)
            if bool((seen & (keys > query)).any()):
                raise Refused("its attention is not causal")
            if not torch.equal(seen, (keys <= query) & (keys > query - width)):
                raise Refused("its attention mask is neither causal nor a sliding window")
    except (RuntimeError, IndexError) as error:  # it looks at tensors, of the meta device or of a step's rows
        raise Refused("its attention mask depends on more than positions") from error
    return 0 if width >= num_positions else width


class _RowByRow:
    """An attention in which each row answers with its own q, k and v."""

    def __init__(self, layers: Sequence[LayerAttention]) -> None:
        self.layers = layers

    def attend(self, call: AttentionCall) -> torch.Tensor:
        kind = self.layers[call.module.layer_idx]
        if call.given != kind.given or call.mask is not None:
            raise InvariantError(f"layer {call.module.layer_idx} attends in another way than when it was looked at")
        groups = kind.num_heads // kind.num_kv_heads
        key, value = (t.repeat_interleave(groups, dim=1) for t in (call.key, call.value))
        return (value + call.query.tanh() + key.tanh()).transpose(1, 2).contiguous()


Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
"""(token ids [n], positions [n], rows to read out [m], whether to read the forward before again) to logits [m,
vocab]."""


@torch.inference_mode()
def check_rows(run: Run, layers: Sequence[LayerAttention], vocab_size: int, max_position: int, exact: float) -> None:
    """Raise `Refused` if a row's logits change with the rows beside it when attention mixes none, or with its read-out.

    `run` is of a model that was built with RUN and has its weights. `exact`: how far, of the largest logit, a changed
    order of sums may go.
    """
    ids = torch.randint(0, vocab_size, (6,), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 1, 5, 5, 2, max_position - 1]).clamp(max=max_position - 1)
    order = torch.tensor([4, 2, 0, 3, 1])  # other neighbours, and without the row of the highest position
    some = torch.tensor([3, 1])
    with answering(_RowByRow(layers)):
        whole = run(ids, positions, torch.arange(6), False).float()
        again = run(ids, positions, some, True).float()
        part = run(ids[order], positions[order], torch.arange(5), False).float()
    if not bool(whole.isfinite().all()):
        raise Refused("its logits are not finite")
    limit = exact * float(whole.abs().max())
    if again.shape != whole[some].shape or float((whole[some] - again).abs().max()) > limit:
        raise Refused("its head does not read rows one by one")
    if float((whole[order] - part).abs().max()) > limit:
        raise Refused("a row's result depends on its neighbours beside attention, or not on the position it is given")
