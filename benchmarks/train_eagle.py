"""An EAGLE-3 head for the default model, trained on the model's own answers, in minutes on two cores.

    python benchmarks/train_eagle.py DIR --minutes 30 [--passages TEXT]
    python benchmarks/train_eagle.py DIR --minutes 30 --at-once 4      # again and again, until it says that it is done

First the model writes questions to itself, and answers them (`train_draft.py`). Then a head learns to give its
distribution of each text's tokens: from the model's stream at three layers and, in unrolled steps that grow in number,
from its own outputs in place of the stream, with the attention that a chain has (training-time test; Li et al. 2025).
DIR is a head's directory afterwards, from its first minute of learning on, for
`LLM(speculative_config={"method": "eagle3", "model": DIR})`.

Printed is, for answers that were held out, how often the head's most probable token is the model's at each place of a
chain whose tokens before were the text's, and how many tokens of such a chain that comes to.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from train_draft import LONGEST, NUM_COMMON, STATE, TOKENS, Outputs, load_default, train

BATCH = 4
NUM_KEPT = 32
"""Tokens of a distribution that are learned, the most probable ones."""
UNROLLED = ((0.0, 1), (0.4, 2), (0.6, 3), (0.75, 4))
"""From which share of the time on there are how many steps: early on the first one alone is worth its time."""
FADING = 0.8
"""How much less each step counts than the one before."""
PLACES = 5
HELD_OUT = 32
"""Answers that nothing is learned from."""
SECONDS_BETWEEN = 120
"""Between two times that the head is written."""
FEATURES = "features.pt"
INPUT_NORM = "midlayer.input_layernorm"


class Lesson(NamedTuple):
    """Sequences [b, n] beside one another: what the target makes of them, and what is drafted of its distributions
    behind each token."""

    tokens: torch.Tensor
    """int64 [b, n]."""
    features: torch.Tensor
    """bf16 [b, n, 3 * hidden]."""
    ids: torch.Tensor
    """Most probable ones of the tokens that are drafted, int16 [b, n, NUM_KEPT]: rows of the head's output matrix."""
    shares: torch.Tensor
    """Their probabilities, fp16 [b, n, NUM_KEPT]."""
    answers: torch.Tensor
    """1 where the token behind is an answer's, 0 where it is a question's, -1 where there is none: int8 [b, n]."""


# ---- the head
class Head(nn.Module):
    """The head of one layer, which begins as the target's last one. Its output matrix is the target's, as it is."""

    def __init__(self, target: Any, common: torch.Tensor) -> None:
        super().__init__()
        self.config = c = target.config
        last, hidden = target.model.layers[-1], c.hidden_size
        self.dim = c.head_dim
        weights = {f"midlayer.{name}": weight.clone() for name, weight in last.state_dict().items()}
        for name in ("q", "k", "v"):
            own = weights[f"midlayer.self_attn.{name}_proj.weight"]
            weights[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat([torch.randn_like(own) * 0.02, own], dim=1)
        weights["midlayer.hidden_norm.weight"] = weights[f"{INPUT_NORM}.weight"]
        weights[f"{INPUT_NORM}.weight"] = torch.ones(hidden)
        weights["norm.weight"] = target.model.norm.weight.clone()
        weights["fc.weight"] = torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1)
        self.weights = nn.ParameterDict({_key(name): nn.Parameter(own) for name, own in weights.items()})
        self.register_buffer("output", target.model.embed_tokens.weight[common].clone(), persistent=False)
        frequencies = c.rope_parameters["rope_theta"] ** (-torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.arange(LONGEST)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By their names in files."""
        return {name.replace("/", "."): weight.detach() for name, weight in self.weights.items()}

    def unrolled(self, features: torch.Tensor, embedded: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """What the rows of each step come to, normed: [b, n, hidden]. A row of the first step is of a token's features
        and of the embedding of the one behind; row i of step s is the s-th behind the pairs up to i - s."""
        g, outs, embedded = self._linear("fc", features), list[torch.Tensor](), self._norm(INPUT_NORM, embedded)
        keys, values = list[torch.Tensor](), list[torch.Tensor]()
        for _ in range(steps):
            h = torch.cat([embedded, self._norm("midlayer.hidden_norm", g)], dim=-1)
            x = g + self._linear("midlayer.self_attn.o_proj", self._attention(h, keys, values))
            y = self._norm("midlayer.post_attention_layernorm", x)
            gated = functional.silu(self._linear("midlayer.mlp.gate_proj", y)) * self._linear("midlayer.mlp.up_proj", y)
            x = x + self._linear("midlayer.mlp.down_proj", gated)
            outs.append(self._norm("norm", x))
            g = functional.pad(x[:, :-1], (0, 0, 1, 0))  # the next step's rows go on with those before them
        return outs

    def _attention(self, h: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        """Add the step's keys and values, and let its rows see all pairs that were true, and their own chain."""
        n, step = h.shape[1], len(keys)
        q, k, v = (
            self._linear(f"midlayer.self_attn.{name}_proj", h).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for name in "qkv"
        )
        times = q.shape[1] // k.shape[1]
        keys.append(self._turned(k).repeat_interleave(times, 1))
        values.append(v.repeat_interleave(times, 1))
        behind = torch.arange(n)[:, None] - torch.arange(n)
        mask = torch.cat([behind >= step, *(behind == step - own for own in range(1, step + 1))], dim=1)
        q, v = self._turned(q), torch.cat(values, dim=2)
        mixed = functional.scaled_dot_product_attention(q, torch.cat(keys, dim=2), v, attn_mask=mask)
        return mixed.transpose(1, 2).flatten(-2)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[2]
        left, right = x.chunk(2, dim=-1)
        return (x * self.cos[:n] + torch.cat([-right, left], dim=-1) * self.sin[:n]).to(x.dtype)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[_key(f"{name}.weight")]
        return functional.rms_norm(x.float(), weight.shape, weight, self.config.rms_norm_eps)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weights[_key(f"{name}.weight")])


def _key(name: str) -> str:
    """A parameter's name has no dots."""
    return name.replace(".", "/")


def write(head: Head, directory: Path, common: torch.Tensor, layers: list[int]) -> None:
    """A head's files, as they are published."""
    c = head.config
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "hidden_act": "silu",
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
        "head_dim": head.dim, "rms_norm_eps": c.rms_norm_eps, "rope_theta": c.rope_parameters["rope_theta"],
        "max_position_embeddings": c.max_position_embeddings, "vocab_size": c.vocab_size,
        "draft_vocab_size": len(common), "target_hidden_size": c.hidden_size, "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": layers, "tie_word_embeddings": False,
    }  # fmt: skip
    tensors = {name: weight.bfloat16() for name, weight in head.tensors().items()}
    tensors |= {"lm_head.weight": head.output.bfloat16(), "d2t": common - torch.arange(len(common))}
    tensors["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill(0, common, True)
    unfinished = directory / "model.safetensors.unfinished"
    save_file({name: value.contiguous() for name, value in tensors.items()}, unfinished, {"format": "pt"})
    unfinished.rename(directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values, indent=2))


# ---- what it learns from
class Lessons:
    """Batches of sequences about as long, with what the target makes of them, worked out once."""

    def __init__(self, target: Any, outputs: Outputs, common: torch.Tensor, layers: list[int]) -> None:
        self._target, self._common, self.layers = target, common, layers
        ordered = sorted(outputs, key=lambda output: len(output[0]))
        self._batches = [ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)]
        self._order: list[int] = []
        self.known: dict[int, Lesson] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def next(self) -> Lesson:
        self._order = self._order or torch.randperm(len(self)).tolist()
        return self[self._order.pop()]

    @torch.no_grad()
    def __getitem__(self, number: int) -> Lesson:
        if number not in self.known:
            self.known[number] = self._found(self._batches[number])
        return self.known[number]

    def _found(self, batch: Outputs) -> Lesson:
        shape = len(batch), max(len(sequence) for sequence, _ in batch)
        tokens, answers = torch.zeros(shape, dtype=torch.long), torch.full(shape, -1, dtype=torch.int8)
        for i, (sequence, first) in enumerate(batch):
            tokens[i, : len(sequence)] = torch.tensor(sequence)
            answers[i, : first - 1], answers[i, first - 1 : len(sequence) - 1] = 0, 1
        with torch.autocast("cpu", torch.bfloat16):
            out = self._target.model(tokens, output_hidden_states=True, use_cache=False)
            logits = functional.linear(out.last_hidden_state, self._target.model.embed_tokens.weight[self._common])
        shares, ids = logits.float().softmax(-1).topk(NUM_KEPT)
        features = torch.cat([out.hidden_states[layer].bfloat16() for layer in self.layers], dim=-1)
        return Lesson(tokens, features, ids.short(), shares.half(), answers)


def loss_of(head: Head, embedding: torch.Tensor, lesson: Lesson, steps: int) -> torch.Tensor:
    """Divergence from the target's distributions over all steps."""
    rows = lesson.answers[:, 1:] >= 0
    rows[:, :steps] = False  # no chain is that long there
    ids, shares = lesson.ids[:, 1:][rows].long(), lesson.shares[:, 1:][rows].float()
    total, weight = torch.zeros(()), 0.0
    with torch.autocast("cpu", torch.bfloat16):
        outs = head.unrolled(lesson.features[:, :-1], embedding[lesson.tokens[:, 1:]], steps)
    for step, out in enumerate(outs):
        with torch.autocast("cpu", torch.bfloat16):
            logits = functional.linear(out[rows], head.output)
        found = (shares * logits.gather(-1, ids).float()).sum(-1) - shares.sum(-1) * logits.float().logsumexp(-1)
        total, weight = total - FADING**step * found.mean(), weight + FADING**step
    return total / weight


@torch.no_grad()
def agreement(head: Head, embedding: torch.Tensor, common: torch.Tensor, lessons: Lessons) -> list[float]:
    """Of answers' tokens, by place in a chain: how often the head's most probable token is the target's, of those that
    are drafted, where all before it were the text's."""
    found, alive = [0] * PLACES, [0] * PLACES
    for number in range(len(lessons)):
        lesson = lessons[number]
        with torch.autocast("cpu", torch.bfloat16):
            outs = head.unrolled(lesson.features[:, :-1], embedding[lesson.tokens[:, 1:]], PLACES)
        going = lesson.answers[:, 1:-1] == 1
        going = going[:, : -PLACES + 1].clone()
        count = going.shape[1]
        for place, out in enumerate(outs):
            rows = slice(place, place + count)  # row i + place of this step is of the chain behind row i
            drafted = functional.linear(out[:, rows].float(), head.output).argmax(-1)
            best = lesson.ids[:, 1 + place :, 0][:, :count]
            alive[place] += int(going.sum())
            found[place] += int((going & (drafted == best)).sum())
            going = going & (common[drafted] == lesson.tokens[:, 2 + place :][:, :count])
    return [one / max(1, of) for one, of in zip(found, alive, strict=True)]


# ---- learning
def learn(given: argparse.Namespace, seconds: float, deadline: float) -> bool:
    """Go on with what is in the directory until it is time; whether it is done."""
    target = load_default()
    outputs = json.loads((given.directory / TOKENS).read_text())
    held, outputs = outputs[-HELD_OUT:], outputs[: min(given.sequences, len(outputs) - HELD_OUT)]
    tokens = torch.tensor([token for sequence, first in outputs for token in sequence[first:]])
    common = torch.bincount(tokens, minlength=target.config.vocab_size).topk(NUM_COMMON).indices.sort().values
    count, embedding = target.config.num_hidden_layers, target.model.embed_tokens.weight.bfloat16()
    layers = [2, count // 2, count - 3]
    head, lessons, tests = Head(target, common), *(Lessons(target, own, common, layers) for own in (outputs, held))
    optimizer = torch.optim.AdamW(head.parameters(), lr=given.lr, weight_decay=0.0, betas=(0.9, 0.95))
    path, spent, steps, shown = given.directory / STATE, 0.0, 0, 0.0
    if path.exists():
        state = torch.load(path)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        spent, steps = state["spent"], state["steps"]
        if (given.directory / FEATURES).exists():
            known = torch.load(given.directory / FEATURES)
            lessons.known = {number: Lesson(*values) for number, values in known.items()}
    torch.manual_seed(steps)
    written = time.monotonic()

    def keep() -> None:
        write(head, given.directory, common, layers)
        state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "spent": spent, "steps": steps}
        torch.save(state, path)
        shares = agreement(head, embedding, common, tests)
        length = sum(math.prod(shares[: place + 1]) for place in range(PLACES))
        places = " ".join(f"{share:.3f}" for share in shares)
        print(f"step {steps}, {spent:.0f} s: loss {shown:.3f}, agreement {places}, {length:.2f} of a chain", flush=True)

    while spent < seconds and time.monotonic() < deadline:
        began = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = given.lr * min(1.0, (steps + 1) / 20) * 0.5 * (1.02 + math.cos(math.pi * spent / seconds))
        unrolled = max(number for share, number in UNROLLED if spent >= share * seconds)
        loss = loss_of(head, embedding, lessons.next(), unrolled)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        steps, spent = steps + 1, spent + time.monotonic() - began
        shown = loss.item() if shown == 0 else 0.95 * shown + 0.05 * loss.item()
        if time.monotonic() - written > SECONDS_BETWEEN:
            keep()
            written = time.monotonic()
    keep()
    if spent < seconds:
        torch.save({number: tuple(lesson) for number, lesson in lessons.known.items()}, given.directory / FEATURES)
    return spent >= seconds


if __name__ == "__main__":
    train(__doc__, learn, 30.0, 1200)
