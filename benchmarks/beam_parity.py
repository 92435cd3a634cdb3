"""Whether beam search returns what transformers' returns: whole sets of answers, on questions of a Spec-Bench file.

    python benchmarks/beam_parity.py questions.jsonl [--widths 2 4 8 16] [--prompts 12] [--max-tokens 24]
        [--categories qa math] [--penalties 1.0] [--dtypes float32]

Both have the default model's weights and every question's token ids; transformers has one question at a time, pagedec
all at once. `early_stopping` and `length_penalty` go through what is asked for. "best equal": the first answers have
the same tokens; "sets": answers that both returned; "order": those that are equal at their own place; "ended": those
that an end token closed. Of questions that differ, "ties" are those where answers of both at one place have scores that
are nearer to one another than --tie, so that roundings decide, and "else" names the others. "score" is the largest
distance between the scores of equal answers.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from pathlib import Path
from typing import Any

import torch
from common import heading, table
from decode import load_transformers
from speculative import read_questions

from pagedec import LLM, BeamSearchParams

Answers = list[tuple[tuple[int, ...], float]]
STOPPING: tuple[bool | str, ...] = (False, True, "never")


def ours(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> list[Answers]:
    """Each prompt's answers, the end token that closes one included, best first."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found: list[Answers] = []
    for output in outputs:
        found.append([])
        for answer in output.outputs:
            assert answer.score is not None
            found[-1].append((tuple(answer.token_ids), answer.score))
    return found


@torch.inference_mode()
def theirs(peer: Any, prompt: list[int], width: int, stopping: bool | str, penalty: float, tokens: int) -> Answers:
    ids = torch.tensor([prompt])
    ends = peer.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    out = peer.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, do_sample=False,
        early_stopping=stopping, length_penalty=penalty, max_new_tokens=tokens, pad_token_id=ends[0],
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    found: Answers = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        found.append((tuple(row[:end]), score))
    return found


class Count:
    """What became of one configuration's questions."""

    def __init__(self, tie: float) -> None:
        self.tie, self.num, self.best, self.shared, self.placed, self.answers = tie, 0, 0, 0, 0, 0
        self.ties, self.ended, self.distance = 0, 0, 0.0
        self.unexplained: list[int] = []

    def note(self, question: int, mine: Answers, reference: Answers, most: int) -> None:
        scores = dict(reference)
        self.ended += sum(len(tokens) < most for tokens, _ in reference)
        self.num += 1
        self.answers += len(reference)
        self.best += mine[0][0] == reference[0][0]
        self.placed += sum(a[0] == b[0] for a, b in zip(mine, reference, strict=True))
        both = [(score, scores[tokens]) for tokens, score in mine if tokens in scores]
        self.shared += len(both)
        self.distance = max([self.distance, *(abs(a - b) for a, b in both)])
        if [tokens for tokens, _ in mine] != [tokens for tokens, _ in reference]:
            near = all(a[0] == b[0] or abs(a[1] - b[1]) < self.tie for a, b in zip(mine, reference, strict=True))
            self.ties += near
            if not near:
                self.unexplained.append(question)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--penalties", type=float, nargs="+", default=[1.0])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--categories", nargs="+")
    parser.add_argument("--max-prompt", type=int, default=200, help="longer questions are left out")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--tie", type=float, default=1e-4)
    arguments = parser.parse_args()
    heading(f"Beam search beside transformers', up to {arguments.max_tokens} new tokens")
    for dtype in arguments.dtypes:
        llm = LLM(dtype=dtype, max_model_len=1024, enable_prefix_caching=True)
        prompts = questions_of(llm, arguments)
        peer = load_transformers(llm, getattr(torch, dtype))
        print(f"{dtype}, {len(prompts)} questions of {min(map(len, prompts))} to {max(map(len, prompts))} tokens\n")
        rows = itertools.product(arguments.widths, STOPPING, arguments.penalties)
        columns = ["width", "early_stopping", "length_penalty", "best equal", "sets", "order", "ended"]
        columns += ["ties", "else", "score"]
        table(columns, (line(llm, peer, prompts, *row, arguments) for row in rows))
        print()
        llm.close()
        del peer
        gc.collect()


def questions_of(llm: LLM, arguments: argparse.Namespace) -> list[list[int]]:
    """By turns from all categories, those that are short enough."""
    tokenizer = llm.get_tokenizer()
    found = read_questions(arguments.questions, arguments.categories, arguments.prompts)
    prompts: list[list[int]] = []
    for texts in itertools.zip_longest(*found.values()):
        for text in filter(None, texts):
            chat = [{"role": "user", "content": text}]
            ids = [int(token) for token in tokenizer.apply_chat_template(chat, add_generation_prompt=True)]
            if len(ids) <= arguments.max_prompt:
                prompts.append(ids)
    return prompts[: arguments.prompts]


def line(
    llm: LLM, peer: Any, prompts: list[list[int]], width: int, stopping: bool | str, penalty: float,
    arguments: argparse.Namespace,
) -> list[object]:  # fmt: skip
    params = BeamSearchParams(
        beam_width=width, early_stopping=stopping, length_penalty=penalty, max_tokens=arguments.max_tokens
    )
    count = Count(arguments.tie)
    for i, (prompt, mine) in enumerate(zip(prompts, ours(llm, prompts, params), strict=True)):
        reference = theirs(peer, prompt, width, stopping, penalty, arguments.max_tokens)
        count.note(i, mine, reference, arguments.max_tokens)
    return [
        width, str(stopping).lower(), penalty, f"{count.best} of {count.num}", f"{count.shared} of {count.answers}",
        f"{count.placed} of {count.answers}", count.ended, count.ties, count.unexplained or "", f"{count.distance:.1e}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
