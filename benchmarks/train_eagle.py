"""An EAGLE-3 head for the default model, trained on the model's own answers, in minutes on two cores.

    python benchmarks/train_eagle.py DIR --minutes 30 [--passages TEXT]
    python benchmarks/train_eagle.py DIR --minutes 30 --at-once 4      # again and again, until it says that it is done

The model writes questions to itself and answers them (`train_draft.py`). The head learns to give its distribution of
the answers' tokens, from its stream at three layers and, in unrolled steps, from its own outputs in their place, with
the attention that a chain has (training-time test: Li et al. 2025). DIR is a head's directory afterwards, for
`LLM(speculative_config={"method": "eagle3", "model": DIR})`. Printed is, on answers that were held out, how often the
head's most probable token is the model's, by its place in a chain whose tokens are the text's.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from train_draft import NUM_COMMON, SHARE_OF_OUTPUTS, STATE, TOKENS, load_default, read_passages, write_outputs

STEPS, FADING, BATCH = 3, 0.8, 4
"""Unrolled steps, how much less each counts than the one before, and sequences of a batch."""
HELD_OUT = 8
"""Batches that nothing is learned from."""
SECONDS_BETWEEN = 240


class Lesson(NamedTuple):
    """A batch: tokens [b, n]; features [b, n, 3 * hidden] and the last state [b, n, hidden] of the target in bf16;
    whether the token behind is an answer's [b, n]."""

    tokens: torch.Tensor
    features: torch.Tensor
    states: torch.Tensor
    counts: torch.Tensor


class Norm(nn.Module):
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight.clone()), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Head(nn.Module):
    """The head, which begins as what the target has: its last layer, which reads the embedding through its first."""

    def __init__(self, target: nn.Module, common: torch.Tensor) -> None:
        super().__init__()
        config, model = target.config, target.model
        first, last, hidden = model.layers[0], model.layers[-1], config.hidden_size
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.theta, eps = hidden // self.num_heads, config.rope_parameters["rope_theta"], config.rms_norm_eps
        self.fc = nn.Parameter(torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1))
        for name in "qkv":
            parts = [getattr(layer.self_attn, f"{name}_proj").weight for layer in (first, last)]
            setattr(self, name, nn.Parameter(torch.cat(parts, dim=1)))
        self.o, self.gate = (nn.Parameter(own.weight.clone()) for own in (last.self_attn.o_proj, last.mlp.gate_proj))
        self.up, self.down = (nn.Parameter(own.weight.clone()) for own in (last.mlp.up_proj, last.mlp.down_proj))
        self.input_norm, self.hidden_norm = (Norm(own.input_layernorm.weight, eps) for own in (first, last))
        self.mlp_norm, self.norm = Norm(last.post_attention_layernorm.weight, eps), Norm(model.norm.weight, eps)
        self.lm_head = nn.Parameter(model.embed_tokens.weight[common].clone())

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """x [b, heads, n, dim] at positions 0, 1, ..."""
        frequencies = self.theta ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angles = torch.arange(x.shape[2]).float()[:, None] * frequencies
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        left, right = x.float().chunk(2, dim=-1)
        return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)

    def step(
        self, g: torch.Tensor, embedded: torch.Tensor, chain: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Rows [b, n, hidden] that go on with chains: `chain` has the keys and values [b, heads, n, dim] of the steps
        before, to which its own are added. Row i of the s-th step sees pairs up to i - s, and its own chain behind."""
        x = torch.cat([self.input_norm(embedded), self.hidden_norm(g)], dim=-1)
        q, k, v = (functional.linear(x, getattr(self, name)).unflatten(-1, (-1, self.dim)) for name in "qkv")
        q, k, v = self._turned(q.transpose(1, 2)), self._turned(k.transpose(1, 2)), v.transpose(1, 2)
        times = self.num_heads // self.num_kv
        chain.append((k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)))
        n, s = g.shape[1], len(chain) - 1
        mask = torch.ones(n, n, dtype=torch.bool).tril(-s)
        scores = [(q @ chain[0][0].transpose(-1, -2)).float().masked_fill(~mask, -torch.inf)]
        shifted = [(_shift(own[0], s - t), _shift(own[1], s - t)) for t, own in enumerate(chain) if t]
        scores += [(q * key).float().sum(-1, keepdim=True) for key, _ in shifted]
        weights = (torch.cat(scores, dim=-1) / self.dim**0.5).softmax(-1).nan_to_num(0).to(v.dtype)
        seen = weights[..., :n] @ chain[0][1]
        for place, (_, value) in enumerate(shifted):
            seen = seen + weights[..., n + place, None] * value
        stream = g + functional.linear(seen.transpose(1, 2).flatten(-2), self.o)
        y = self.mlp_norm(stream)
        return stream + functional.linear(
            functional.silu(functional.linear(y, self.gate)) * functional.linear(y, self.up), self.down
        )

    def unrolled(self, lesson: Lesson, embedding: torch.Tensor) -> list[torch.Tensor]:
        """What the rows of each step come to, normed: [b, n - 1, hidden]; row i is of token i + 1."""
        embedded, chain = embedding[lesson.tokens[:, 1:]], list[tuple[torch.Tensor, torch.Tensor]]()
        g, outs = functional.linear(lesson.features[:, :-1], self.fc), list[torch.Tensor]()
        for _ in range(STEPS):
            x = self.step(g, embedded, chain)
            outs.append(self.norm(x))
            g = functional.pad(x[:, :-1], (0, 0, 1, 0))
        return outs

    def write(self, directory: Path, target: nn.Module, common: torch.Tensor, layers: list[int]) -> None:
        """A head's files, as they are published."""
        c = target.config
        values = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "rms_norm_eps": c.rms_norm_eps,
            "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv, "rope_theta": self.theta,
            "max_position_embeddings": c.max_position_embeddings, "vocab_size": c.vocab_size, "hidden_act": "silu",
            "draft_vocab_size": len(common), "eagle_aux_hidden_state_layer_ids": layers,
        }  # fmt: skip
        (directory / "config.json").write_text(json.dumps(values, indent=1))
        names = {
            "fc": self.fc, "lm_head": self.lm_head, "norm": self.norm.weight, "midlayer.self_attn.o_proj": self.o,
            "midlayer.mlp.gate_proj": self.gate, "midlayer.mlp.up_proj": self.up, "midlayer.mlp.down_proj": self.down,
            "midlayer.input_layernorm": self.input_norm.weight, "midlayer.hidden_norm": self.hidden_norm.weight,
            "midlayer.post_attention_layernorm": self.mlp_norm.weight,
            **{f"midlayer.self_attn.{name}_proj": getattr(self, name) for name in "qkv"},
        }  # fmt: skip
        tensors = {f"{name}.weight": weight.detach().bfloat16().contiguous() for name, weight in names.items()}
        save_file({**tensors, "d2t": common - torch.arange(len(common))}, directory / "model.safetensors")


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """Row i has what row i - `by` had: [b, heads, n, dim]."""
    return functional.pad(x[:, :, : x.shape[2] - by], (0, 0, by, 0)) if by else x


@torch.no_grad()
def lesson_of(target: nn.Module, batch: list[tuple[list[int], int]], layers: list[int]) -> Lesson:
    """What the target makes of some sequences, of which each has an answer from a place on."""
    length = max(len(sequence) for sequence, _ in batch)
    tokens, counts = (
        torch.zeros(len(batch), length, dtype=torch.long),
        torch.zeros(len(batch), length, dtype=torch.bool),
    )
    for i, (sequence, first) in enumerate(batch):
        tokens[i, : len(sequence)] = torch.tensor(sequence)
        counts[i, first - 1 : len(sequence) - 1] = True
    with torch.autocast("cpu", torch.bfloat16):
        out = target.model(tokens, output_hidden_states=True)
    features = torch.cat([out.hidden_states[layer].bfloat16() for layer in layers], dim=-1)
    return Lesson(tokens, features, out.last_hidden_state.bfloat16(), counts)


def losses_of(
    head: Head, lesson: Lesson, embedding: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, list[float]]:
    """Divergence from the target's distributions over the tokens that are drafted, over all steps; and by step how
    often both find the same token most probable. `output`: the target's rows of these tokens."""
    total, alike = torch.zeros(()), list[float]()
    rows = lesson.counts[:, 1:]
    wanted = functional.linear(lesson.states[:, 1:][rows], output).float()
    p, best = wanted.softmax(-1), wanted.argmax(-1)
    for s, out in enumerate(head.unrolled(lesson, embedding)):
        logits = functional.linear(out[rows], head.lm_head).float()
        total = total - FADING**s * (p * logits.log_softmax(-1)).sum(-1).mean()
        alike.append(float((logits.argmax(-1) == best).float().mean()))
    return total, alike


def learn(given: argparse.Namespace, seconds: float, deadline: float) -> bool:
    """Go on with what is in the directory until it is time; whether it is done."""
    target = load_default()
    outputs = json.loads((given.directory / TOKENS).read_text())[: given.sequences]
    tokens = torch.tensor([token for sequence, first in outputs for token in sequence[first:]])
    common = torch.bincount(tokens, minlength=target.config.vocab_size).topk(NUM_COMMON).indices.sort().values
    count = target.config.num_hidden_layers
    layers, head = [2, count // 2, count - 3], Head(target, common)
    embedding, output = target.model.embed_tokens.weight.bfloat16(), target.model.embed_tokens.weight[common].bfloat16()
    optimizer = torch.optim.AdamW(head.parameters(), lr=given.lr, weight_decay=0.0, betas=(0.9, 0.95))
    path, spent, steps = given.directory / STATE, 0.0, 0
    if path.exists():
        state = torch.load(path)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        spent, steps = state["spent"], state["steps"]
    torch.manual_seed(steps)
    batches = [outputs[i : i + BATCH] for i in range(0, len(outputs), BATCH)]
    known, order, shown = dict[int, Lesson](), list[int](), time.monotonic()

    def lesson(number: int) -> Lesson:
        if number not in known:
            known[number] = lesson_of(target, batches[number], layers)
        return known[number]

    def tell() -> None:
        head.write(given.directory, target, common, layers)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            alike = [losses_of(head, lesson(i), embedding, output)[1] for i in range(HELD_OUT)]
        means = " ".join(f"{sum(own) / HELD_OUT:.3f}" for own in zip(*alike, strict=True))
        print(f"step {steps}, {spent:.0f} s: the same token at places 1 to {STEPS}: {means}", flush=True)

    while spent < seconds and time.monotonic() < deadline:
        began = time.monotonic()
        order = order or (torch.randperm(len(batches) - HELD_OUT) + HELD_OUT).tolist()
        for group in optimizer.param_groups:
            group["lr"] = given.lr * min(1.0, (steps + 1) / 20) * 0.5 * (1.02 + math.cos(math.pi * spent / seconds))
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = losses_of(head, lesson(order.pop()), embedding, output)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        steps, spent = steps + 1, spent + time.monotonic() - began
        if time.monotonic() - shown > SECONDS_BETWEEN or steps == 50:
            tell()
            shown = time.monotonic()
    tell()
    state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "spent": spent, "steps": steps}
    torch.save(state, path)
    return spent >= seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0, help="of all runs together")
    parser.add_argument(
        "--at-once", type=float, default=math.inf, help="most minutes of this run; the next one goes on"
    )
    parser.add_argument("--sequences", type=int, default=800, help="answers to learn from, at most")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--passages", type=Path, help="a text, for questions about pieces of it")
    given = parser.parse_args()
    began, seconds = time.monotonic(), 60 * given.minutes
    given.directory.mkdir(parents=True, exist_ok=True)
    if not (given.directory / TOKENS).exists():
        outputs = write_outputs(SHARE_OF_OUTPUTS * seconds, read_passages(given.passages))
        (given.directory / TOKENS).write_text(json.dumps(outputs))
    done = learn(given, (1 - SHARE_OF_OUTPUTS) * seconds, began + 60 * given.at_once - 15)
    print("done" if done else "not done: run it again")


if __name__ == "__main__":
    main()
