"""What a beam search cannot have is refused in its caller's words, and what is said to be possible is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedec import LLM, BeamSearchParams, InvalidArgument
from tests.algorithms.beam import BeamParams

Tiny = Callable[..., LLM]
PROMPT = {"prompt_token_ids": list(range(3, 23))}


def ask(llm: LLM, width: int, max_tokens: int) -> int:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    return len(output.outputs[0].token_ids)


def test_too_many_tokens_for_the_pool(tiny: Tiny) -> None:
    llm = tiny(num_blocks=20, block_size=16)
    message = (
        r"^max_tokens is 40: must be at most 28 with beam_width 6 behind 20 tokens: the KV pool has 20 blocks of 16 "
        "tokens; kv_cache_memory and num_blocks size it$"
    )
    with pytest.raises(InvalidArgument, match=message):
        ask(llm, 6, 40)
    with pytest.raises(InvalidArgument, match="^max_tokens is 29: "):
        ask(llm, 6, 29)
    assert ask(llm, 6, 28) == 28


def test_too_many_tokens_for_a_gang_of_one_s_own(tiny: Tiny) -> None:
    llm, limit = tiny(num_blocks=20, block_size=16), "must need at most 20 blocks, the target lane's; 6 x 60 tokens"
    with pytest.raises(InvalidArgument, match=f"^max_tokens is 40: {limit}"):
        llm.generate([PROMPT], BeamParams(6, max_tokens=40), use_tqdm=False)


def test_too_many_beams_for_the_pool(tiny: Tiny) -> None:
    llm = tiny(num_blocks=20, block_size=16)
    with pytest.raises(
        InvalidArgument, match=r"^beam_width is 12: must be at most 9 behind 20 tokens: the KV pool has 20"
    ):
        ask(llm, 12, 4)
    with pytest.raises(InvalidArgument, match="^beam_width is 10: "):
        ask(llm, 10, 1)
    assert ask(llm, 9, 1) == 1


def test_too_many_beams_for_a_step(tiny: Tiny) -> None:
    with pytest.raises(InvalidArgument, match="^beam_width is 9: must be at most max_num_batched_tokens, 8$"):
        ask(tiny(num_blocks=64, max_num_batched_tokens=8), 9, 2)


def test_a_session_s_beams(tiny: Tiny) -> None:
    with tiny(num_blocks=20, block_size=16).session(PROMPT) as session:
        for width, max_tokens, message in (
            (6, 40, "^max_tokens is 40: must be at most 28 with beam_width 6 behind 20 tokens: the KV pool has 20"),
            (12, 4, "^beam_width is 12: must be at most 9 behind 20 tokens: the KV pool has 20 blocks of 16 tokens"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                session.generate(BeamSearchParams(beam_width=width, max_tokens=max_tokens))
        output = session.generate(BeamSearchParams(beam_width=6, max_tokens=28, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 28
