"""SmolLM2-135M on two processes, two of its three KV heads and one: the tokens of one process, in fp32, but for ties.

Each tie is printed. Prompts end before, at and behind the ends of blocks (16), tiles (64) and chunks (512)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams, TokenTrie
from pagedec.outputs import BranchOutput, RequestOutput
from pagedec.structured import StructuredOutputsParams
from tests.parallel.ties import TIE, Tie, beams_parting, parting

pytestmark = pytest.mark.long
LENGTHS = (3, 15, 16, 17, 63, 64, 65, 129, 511, 512, 513, 700)
DRAFT = {"model": "smollm2", "dtype": "bfloat16", "quantization": "int8", "num_speculative_tokens": 3}
SEED = 5
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=5, seed=SEED, ignore_eos=True, speculative=False)
SAMPLED = GREEDY.clone(temperature=0.9)
TRIE = TokenTrie([[list(range(40 + i, 52 + i))[j] for j in range(2 + i % 9)] for i in range(60)])


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[LLM, LLM]]:
    """One process, and two that share the model; both draft with the same model in int8."""
    made = [
        LLM("smollm2", dtype="float32", num_blocks=400, max_model_len=1024, max_num_batched_tokens=600,
            speculative_config=DRAFT, tensor_parallel_size=world)
        for world in (1, 2)
    ]  # fmt: skip
    yield made[0], made[1]
    for llm in made:
        llm.engine.scheduler.check()
        assert all(pool.num_available == pool.num_blocks for pool in llm.engine.scheduler.pools.values())
        llm.close()


@pytest.fixture(scope="module")
def prompts(engines: tuple[LLM, LLM]) -> list[list[int]]:
    """Parts of a text, each beginning somewhere else."""
    tokens = engines[0].get_tokenizer().encode((Path(__file__).parents[2] / "LICENSE").read_text())
    return [tokens[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]


FIXED = {"adaptive": False}  # on a busy machine drafts may not pay
MODES: dict[str, Any] = {
    "greedy": GREEDY,
    "sampled": SAMPLED.clone(n=2),
    "penalties": GREEDY.clone(repetition_penalty=1.3, no_repeat_ngram_size=3),
    "ngram": GREEDY.clone(speculative=FIXED | {"method": "ngram", "num_candidates": 3, "num_speculative_tokens": 4}),
    "lookahead": SAMPLED.clone(
        speculative=FIXED | {"method": "lookahead", "window_size": 8, "ngram_size": 3, "num_guesses": 8}
    ),
    "draft model": SAMPLED.clone(speculative=FIXED | {"method": "draft_model", "num_speculative_tokens": 3}),
    "trie": GREEDY.clone(token_trie=TRIE, ignore_eos=False),
    "grammar": SAMPLED.clone(
        structured_outputs=StructuredOutputsParams(regex=r"[A-Z][a-z]{2,8} [0-9]{3}-[0-9]{3}!"), ignore_eos=False
    ),
    "beams": BeamSearchParams(beam_width=4, max_tokens=16),
    "beams in a trie": BeamSearchParams(beam_width=3, max_tokens=8, token_trie=TRIE),
}


def ties_of(name: str, left: RequestOutput, right: RequestOutput, params: Any) -> list[Tie]:
    if isinstance(params, BeamSearchParams):
        return beams_parting(name, left.outputs, right.outputs)
    start = len(left.prompt_token_ids)
    pairs = zip(left.outputs, right.outputs, strict=True)
    found = [parting(f"{name}, answer {a.index}", a, b, start, params, SEED) for a, b in pairs]
    return [tie for tie in found if tie is not None]


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_say_what_one_says(engines: tuple[LLM, LLM], prompts: list[list[int]], mode: str) -> None:
    params, ties = MODES[mode], list[Tie]()
    said = [llm.generate(prompts, params, use_tqdm=False) for llm in engines]
    for left, right in zip(*said, strict=True):
        ties += ties_of(f"{mode}, {len(left.prompt_token_ids)} tokens", left, right, params)
    answers = {tuple(answer.token_ids) for output in said[1] for answer in output.outputs}
    num_tokens = sum(len(answer.token_ids) for output in said[1] for answer in output.outputs)
    print(f"\n{mode}: {num_tokens} tokens of {len(prompts)} prompts, {len(ties)} ties below {TIE:g}", *ties, sep="\n  ")
    assert len(answers) > len(prompts) / 2, "answers differ, so that something is compared"
    assert len(ties) <= 3, "too many to be chance"
    if mode in ("ngram", "lookahead", "draft model"):
        name = {"draft model": "draft_model"}.get(mode, mode)
        counts = [llm.engine.stats.drafts[name] for llm in engines]
        assert min(sum(count.accepted) for count in counts) > 0, "drafts were verified, and some accepted"


def test_sessions(engines: tuple[LLM, LLM], prompts: list[list[int]]) -> None:
    """Forks, rollbacks and scores; where a session has parted at a tie, the rest of it is another's."""
    ties = list[Tie]()
    for prompt in prompts[::2]:
        left, right = (_session(llm, prompt) for llm in engines)
        for i, ((start, params, a), (_, _, b)) in enumerate(zip(left[0], right[0], strict=True)):
            name = f"session of {len(prompt)} tokens, call {i}"
            found = parting(name, a.outputs[0], b.outputs[0], start, params, SEED) if i < 1 else None
            if found is not None:
                ties.append(found)
                break
            assert a.outputs[0].token_ids == b.outputs[0].token_ids, name
        else:
            assert left[1] == pytest.approx(right[1], abs=TIE * 10)
    print(f"\nsessions: {len(ties)} ties below {TIE:g}", *ties, sep="\n  ")
    assert len(ties) <= 1


def _session(llm: LLM, prompt: list[int]) -> tuple[list[tuple[int, Any, BranchOutput[Any]]], list[float]]:
    """What calls have answered, each with the length before it, and what tokens scored."""
    said: list[tuple[int, Any, BranchOutput[Any]]] = []
    with llm.session(prompt, seed=SEED) as root:

        def call(branch: Any, params: SamplingParams) -> None:
            length = len(branch.token_ids)
            said.append((length, params, branch.generate(params.clone(max_tokens=12, seed=None))))

        call(root, GREEDY)
        forks = root.fork(3)
        for fork in forks:
            call(fork, SAMPLED)
        forks[0].rollback(7)
        forks[0].append([40, 41, 42])
        call(forks[0], GREEDY)
        root.rollback(5)
        call(root, SAMPLED)
        scores = [score.logprob for score in forks[1].score([[5, 6, 7], [50, 60, 80]])]
    return said, scores
