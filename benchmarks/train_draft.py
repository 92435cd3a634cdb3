"""A draft model out of the default model: a few of its layers, distilled on its own outputs, in minutes on two cores.

    python benchmarks/train_draft.py DIR --minutes 10
    python benchmarks/train_draft.py DIR --minutes 10 --at-once 4      # again and again, until it says that it is done

First the model writes questions to itself, and answers them. Then the first and the last layers of a copy, with the
model's own embedding, learn to give its distribution of each answer's tokens. DIR is a model's directory afterwards,
for `LLM(speculative_config={"method": "draft_model", "model": DIR})`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

from pagedec import LLM, SamplingParams
from pagedec.formats.resolve import resolve_model
from pagedec.models.registry import load_architecture, open_model_weights

SHARE_OF_OUTPUTS = 0.25
"""Of the time: the rest is for learning."""
BATCH, LONGEST = 8, 320
NUM_COMMON = 6144
"""Tokens that the loss is over, the commonest of the outputs: all 49,152 would cost more than all layers."""
TOKENS = "tokens.json"
STATE = "training.pt"


Outputs = list[tuple[list[int], int]]
"""Sequences of a question and its answer, and where the answer begins."""


# ---- its outputs
def write_outputs(seconds: float, passages: list[str]) -> Outputs:
    """Sequences of a question and its answer, and where the answer begins. Where there are passages, every third
    question is about one."""
    llm = LLM(max_model_len=1024, max_num_seqs=64)
    tokenizer, began, found = llm.get_tokenizer(), time.monotonic(), list[tuple[list[int], int]]()
    empty = tokenizer.apply_chat_template([{"role": "user", "content": "@"}], add_generation_prompt=False)
    opening = list(empty[: list(empty).index(tokenizer.encode("@", add_special_tokens=False)[0])])
    turn = 0
    while time.monotonic() - began < seconds:
        asked = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=80, n=48, seed=turn)
        questions = [answer.text.strip() for answer in llm.generate([opening], asked, use_tqdm=False)[0].outputs]
        for i in range(0, len(questions) if passages else 0, 3):
            questions[i] = f"Summarize: {passages[(turn * 16 + i // 3) % len(passages)]}"
        prompts = [
            list(tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True))
            for question in questions
            if question
        ]
        params = [
            SamplingParams(temperature=(0.0, 0.7, 1.0)[(i + turn) % 3], seed=i, max_tokens=160)
            for i in range(len(prompts))
        ]
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            found.append(([*prompt, *output.outputs[0].token_ids][:LONGEST], len(prompt)))
        turn += 1
        print(f"{len(found)} answers, {sum(len(s) - first for s, first in found)} tokens", flush=True)
    return [(sequence, first) for sequence, first in found if first + 8 < len(sequence)]


def read_passages(path: Path | None) -> list[str]:
    """Pieces of some 600 characters of a text."""
    if path is None:
        return []
    words = path.read_text(encoding="utf-8").split()
    return [" ".join(words[i : i + 110]) for i in range(0, len(words) - 110, 110)]


# ---- the models
def load_default() -> transformers.LlamaForCausalLM:
    """The default model in transformers' hands, fp32."""
    files = resolve_model("smollm2", "auto")
    arch = load_architecture(files)
    source = open_model_weights(arch, files, torch.float32)
    config = transformers.LlamaConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_kv_heads,
        max_position_embeddings=arch.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": arch.rope_theta},
        rms_norm_eps=arch.rms_norm_eps,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=list(arch.eos_token_ids)[0] if arch.eos_token_ids else 2,
    )
    model = transformers.LlamaForCausalLM(config)
    missing = model.load_state_dict({name: source.load(name) for name in source.names()}, strict=False)
    assert not missing.unexpected_keys and missing.missing_keys in ([], ["lm_head.weight"]), missing
    model.tie_weights()
    return model.eval().requires_grad_(False)


def cut(teacher: transformers.LlamaForCausalLM, first: int, last: int) -> transformers.LlamaForCausalLM:
    """The teacher with its first and last layers alone; the embedding, which is the output matrix too, stays as it
    is."""
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = first + last
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: first + last]
    draft = transformers.LlamaForCausalLM(config)
    count = teacher.config.num_hidden_layers
    for own, number in enumerate([*range(first), *range(count - last, count)]):
        draft.model.layers[own].load_state_dict(teacher.model.layers[number].state_dict())
    draft.model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(teacher.model.norm.state_dict())
    draft.tie_weights()
    draft.model.embed_tokens.requires_grad_(False)
    return draft


# ---- learning
class Lessons:
    """Batches of sequences, with what the teacher's last layer says at each of an answer's tokens, known once."""

    def __init__(
        self, teacher: transformers.LlamaForCausalLM, outputs: Outputs, known: dict[int, torch.Tensor]
    ) -> None:
        self._teacher, self.known = teacher, known
        self._batches = [outputs[i : i + BATCH] for i in range(0, len(outputs), BATCH)]
        self._order: list[int] = []
        counts = torch.bincount(
            torch.tensor([token for sequence, first in outputs for token in sequence[first:]]),
            minlength=teacher.config.vocab_size,
        )
        common = counts.topk(NUM_COMMON).indices.sort().values
        self.head = teacher.model.embed_tokens.weight[common].bfloat16()

    def next(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens [batch, length], which rows' next token is an answer's (bool), the teacher's states of these rows."""
        if not self._order:
            self._order = torch.randperm(len(self._batches)).tolist()
        number = self._order.pop()
        batch = self._batches[number]
        length = max(len(sequence) for sequence, _ in batch)
        tokens = torch.zeros(len(batch), length, dtype=torch.long)
        rows = torch.zeros(len(batch), length, dtype=torch.bool)
        for i, (sequence, first) in enumerate(batch):
            tokens[i, : len(sequence)] = torch.tensor(sequence)
            rows[i, first - 1 : len(sequence) - 1] = True
        if number not in self.known:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                self.known[number] = self._teacher.model(tokens).last_hidden_state[rows].bfloat16()
        return tokens, rows, self.known[number]


def loss_of(draft: Any, head: torch.Tensor, lesson: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
    """Divergence from the teacher's distributions over the common tokens, with a pull towards its states; and the share
    of mass that both give alike, which is how often rejection accepts a token."""
    tokens, rows, states = lesson
    with torch.autocast("cpu", torch.bfloat16):
        own = draft.model(tokens).last_hidden_state[rows]
        logits, wanted = functional.linear(own, head), functional.linear(states, head)
    p, log_q = wanted.float().softmax(-1), logits.float().log_softmax(-1)
    divergence = -(p * log_q).sum(-1).mean()
    with torch.no_grad():
        alike = float(torch.minimum(p[::8], log_q[::8].exp()).sum(-1).mean())
    return divergence + 0.1 * functional.smooth_l1_loss(own.float(), states.float()), alike


def learn(given: argparse.Namespace, seconds: float, deadline: float) -> bool:
    """Go on with what is in the directory until it is time; whether it is done."""
    teacher = load_default()
    draft = cut(teacher, given.first, given.last)
    weights = [weight for weight in draft.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=given.lr, weight_decay=0.0, betas=(0.9, 0.98))
    path, spent, steps, known = given.directory / STATE, 0.0, 0, dict[int, torch.Tensor]()
    if path.exists():
        state = torch.load(path)
        draft.load_state_dict(state["draft"])
        optimizer.load_state_dict(state["optimizer"])
        spent, steps, known = state["spent"], state["steps"], state["known"]
    torch.manual_seed(steps)
    outputs, shown = json.loads((given.directory / TOKENS).read_text()), 0.0
    lessons = Lessons(teacher, outputs[: given.sequences], known)
    while spent < seconds and time.monotonic() < deadline:
        began = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = given.lr * min(1.0, (steps + 1) / 20) * 0.5 * (1.02 + math.cos(math.pi * spent / seconds))
        loss, alike = loss_of(draft, lessons.head, lessons.next())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        steps, spent = steps + 1, spent + time.monotonic() - began
        shown = alike if shown == 0 else 0.95 * shown + 0.05 * alike
        if steps % 20 == 0:
            print(f"step {steps}, {spent:.0f} s: loss {float(loss):.3f}, mass in common {shown:.3f}", flush=True)
    draft.to(torch.bfloat16).save_pretrained(given.directory)
    state = {"draft": draft.float().state_dict(), "optimizer": optimizer.state_dict(), "spent": spent, "steps": steps}
    torch.save({**state, "known": known}, path)
    return spent >= seconds


def train(
    description: str | None,
    learn: Callable[[argparse.Namespace, float, float], bool],
    minutes: float,
    sequences: int,
    add: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """The model's outputs, then learning from them, by the command line: its defaults, and what `add` adds to it.
    `learn` is given the arguments, the seconds that it has in all, and when this run must end."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=minutes, help="of all runs together")
    parser.add_argument(
        "--at-once", type=float, default=math.inf, help="most minutes of this run; the next one goes on"
    )
    parser.add_argument("--sequences", type=int, default=sequences, help="answers to learn from, at most")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--passages", type=Path, help="a text, for questions about pieces of it")
    add(parser)
    given = parser.parse_args()
    began, seconds = time.monotonic(), 60 * given.minutes
    given.directory.mkdir(parents=True, exist_ok=True)
    if not (given.directory / TOKENS).exists():
        outputs = write_outputs(SHARE_OF_OUTPUTS * seconds, read_passages(given.passages))
        (given.directory / TOKENS).write_text(json.dumps(outputs))
    done = learn(given, (1 - SHARE_OF_OUTPUTS) * seconds, began + 60 * given.at_once - 15)
    print("done" if done else "not done: run it again")


def add_layers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first", type=int, default=2, help="layers kept from the beginning")
    parser.add_argument("--last", type=int, default=1, help="and from the end")


if __name__ == "__main__":
    train(__doc__, learn, 10.0, 600, add_layers)
