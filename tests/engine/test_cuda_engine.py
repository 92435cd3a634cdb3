"""An engine on CUDA's kernels, on the emulated device or a real one: the processor's tokens, and bits that are a row's
own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.kernels.library import CUDA
from tests.engine.crowd import SMALL, Tiny, Tokens, assert_whole, right_answers
from tests.kernels import cuda_library

PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(params=cuda_library.cases())
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> Tiny:
    """Makes engines on it."""
    isa = request.param
    if isa == CUDA and not cuda_library.has_device():
        pytest.skip("no CUDA device")

    def make(**arguments: Any) -> LLM:
        with monkeypatch.context() as patch:
            patch.setenv("PAGEDEC_ISA", isa)
            llm = tiny(**arguments)
        assert llm.engine.executor.geometry.isa == isa
        return llm

    return make


def test_a_crowd_that_is_preempted(device: Tiny, expected: list[Tokens]) -> None:
    """Greedy, sampled, repeated and beams, in ten blocks: the tokens of the processor's kernels."""
    llm = device(**SMALL)
    assert right_answers(llm) == expected
    assert_whole(llm, expected)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(3, 131) for _ in range(40)]
    return [
        [*shared[:n], *(rng.randrange(3, 131) for _ in range(own))] for n, own in ((40, 3), (33, 1), (0, 70), (40, 9))
    ]


PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(seed=3, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.2, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=4, n=2, presence_penalty=0.5, logit_bias={5: 3.0}, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0, frequency_penalty=0.3, bad_words=None, max_tokens=12, logprobs=1, ignore_eos=True),
]


def told(llm: LLM, which: list[int]) -> list[Any]:
    own = prompts()
    outputs = llm.generate([own[i] for i in which], [PARAMS[i] for i in which], use_tqdm=False)
    return [[(a.token_ids, a.logprobs) for a in output.outputs] + [output.prompt_logprobs] for output in outputs]


def test_a_row_has_its_bits_whatever_stands_beside_it(device: Tiny) -> None:
    """In bf16: alone, together, in parts of the prompt, in blocks of another size, preempted."""
    want = [told(device(dtype="bfloat16"), [i])[0] for i in range(4)]
    assert told(device(dtype="bfloat16"), [0, 1, 2, 3]) == want
    assert (
        told(device(dtype="bfloat16", max_num_batched_tokens=17, enable_prefix_caching=False), [3, 2, 1, 0])
        == want[::-1]
    )
    assert told(device(dtype="bfloat16", block_size=32, num_blocks=12), [0, 1, 2, 3]) == want


@pytest.mark.parametrize(
    "table",
    [
        {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False},
        {"method": "lookahead", "window_size": 4, "ngram_size": 3, "num_guesses": 4, "adaptive": False},
    ],
    ids=lambda table: table["method"],
)
def test_drafts_change_no_token(device: Tiny, table: dict[str, Any]) -> None:
    """Trees of drafts, in bf16."""
    repeated = [[*range(10, 30)] * 3, [7, 8, 9] * 12]
    want = device(dtype="bfloat16").generate(repeated, PLAIN, use_tqdm=False)
    got = device(dtype="bfloat16", speculative_config=table).generate(repeated, PLAIN, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]


def test_beams_and_sessions(device: Tiny, tiny: Tiny) -> None:
    """As on the processor's kernels, in fp32."""
    found = []
    for llm in (tiny(), device()):
        beams = llm.beam_search([[5, 9, 33, 70]], BeamSearchParams(beam_width=4, max_tokens=8))
        with llm.session([5, 9, 33, 70, 12]) as session:
            first = session.generate(PLAIN)
            fork = session.fork()
            session.rollback(4)
            scores = fork.score([[3, 4], [5]])
            again = session.generate(PLAIN)
        tokens = [sequence.tokens for sequence in beams[0].sequences]
        tokens += [output.outputs[0].token_ids for output in (first, again)]
        found.append((tokens, [score.logprob for score in scores]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)
