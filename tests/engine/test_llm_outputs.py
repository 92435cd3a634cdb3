"""What `LLM.generate` returns: order, lengths, reasons, metrics, seeds, text."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedec import LLM, InvalidArgument, SamplingParams
from pagedec.kernels.library import Context, available_isas
from pagedec.kernels.native import NativeBackend
from pagedec.llm import collecting
from pagedec.outputs import RequestOutput
from pagedec.runtime import processors
from tests.algorithms.beam import BeamParams
from tests.engine.conftest import EOS

Tiny = Callable[..., LLM]
PROMPT = [5, 17, 40, 99, 3]
VOCAB = 131


def random_prompts(count: int, low: int = 1, high: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


def generate(llm: LLM, prompts: Any, params: Any = None, **arguments: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **arguments)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


# --------------------------------------------------------------------------------------------------------- many prompts
def test_sixty_prompts_through_four_seats_keep_their_order(tiny: Tiny) -> None:
    """Far more than fit at once, in a pool so small that requests give way: every answer is the one it has alone."""
    prompts = random_prompts(60)
    params = [SamplingParams(temperature=i % 3 * 0.5, seed=i, max_tokens=3 + i % 30, n=1 + i % 2) for i in range(60)]
    crowded = tiny(max_num_seqs=4, num_blocks=9, max_num_batched_tokens=24)
    outputs = generate(crowded, prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert sum(output.metrics.num_preemptions for output in outputs) > 3
    roomy = tiny()
    alone = [generate(roomy, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert tokens(outputs) == tokens(alone)
    reasons = {answer.finish_reason for output in outputs for answer in output.outputs}
    assert reasons == {"length", "stop"}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"block_size": 8, "num_blocks": 9},
        {"block_size": 64, "num_blocks": 3},
        {"block_size": 256, "num_blocks": 3},
        {"enable_prefix_caching": False, "num_blocks": 6},
        {"max_model_len": 64},
        {"kv_cache_memory": "1MiB", "num_blocks": None},
    ],
    ids=repr,
)
def test_no_engine_size_changes_an_answer(tiny: Tiny, arguments: dict[str, Any]) -> None:
    prompts = random_prompts(9, high=44)
    params = [SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=12) for i in range(9)]
    assert tokens(generate(tiny(**arguments), prompts, params)) == tokens(generate(tiny(), prompts, params))


def test_the_reference_kernels_give_the_same_greedy_answers(tiny: Tiny) -> None:
    prompts, params = random_prompts(6), SamplingParams(temperature=0, max_tokens=16)
    reference = tiny(attention_backend="reference", num_blocks=24)
    assert reference.engine.executor.worker.lanes["target"].backend.name == "reference"
    assert tokens(generate(reference, prompts, params)) == tokens(generate(tiny(), prompts, params))


def test_one_params_for_all_or_one_for_each(tiny: Tiny) -> None:
    llm, greedy = tiny(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = random_prompts(3)
    assert tokens(generate(llm, prompts, greedy)) == tokens(generate(llm, prompts, [greedy] * 3))
    each = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 5, 3)]
    assert [len(answer) for [answer] in tokens(generate(llm, prompts, tuple(each)))] == [1, 5, 3]


def test_lower_priority_numbers_run_earlier(tiny: Tiny) -> None:
    outputs = generate(
        tiny(max_num_seqs=1), random_prompts(4), SamplingParams(max_tokens=4, ignore_eos=True), priority=[2, 0, 3, 1]
    )
    finished = [output.metrics.finished_time for output in outputs]
    assert sorted(range(4), key=finished.__getitem__) == [1, 3, 0, 2]


def test_request_ids_are_never_used_again(tiny: Tiny) -> None:
    llm = tiny()
    params = SamplingParams(max_tokens=1)
    ids = [output.request_id for _ in range(3) for output in generate(llm, random_prompts(3), params)]
    assert len(set(ids)) == 9


# -------------------------------------------------------------------------------------------------------- where it ends
def test_without_max_tokens_an_answer_runs_up_to_the_context(tiny: Tiny) -> None:
    llm = tiny(max_model_len=48)
    prompts = [[7] * length for length in (1, 16, 31, 47)]
    for max_tokens in (None, 1000):
        outputs = generate(llm, prompts, SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens))
        for output in outputs:
            [answer] = output.outputs
            assert len(output.prompt_token_ids) + len(answer.token_ids) == 48
            assert (answer.finish_reason, answer.stop_reason) == ("length", None)


def test_the_end_token_ends_unless_ignored(tiny: Tiny) -> None:
    """Of many sampled answers those that end with the end token are a beginning of what they are when it is ignored."""
    llm = tiny()
    prompts = random_prompts(40)
    ends = [SamplingParams(seed=i, max_tokens=40) for i in range(40)]
    goes_on = [SamplingParams(seed=i, max_tokens=40, ignore_eos=True) for i in range(40)]
    num_stopped = 0
    for short, long in zip(generate(llm, prompts, ends), generate(llm, prompts, goes_on), strict=True):
        [[a], [b]] = short.outputs, long.outputs
        assert len(b.token_ids) == 40 and b.finish_reason == "length"
        if EOS in b.token_ids:
            num_stopped += 1
            assert a.token_ids == b.token_ids[: b.token_ids.index(EOS) + 1]
            assert (a.finish_reason, a.stop_reason) == ("stop", None)
        else:
            assert a.token_ids == b.token_ids and a.finish_reason == "length"
    assert 4 < num_stopped < 40


def test_stop_token_ids_end_an_answer_and_are_named(tiny: Tiny) -> None:
    llm = tiny()
    free = generate(llm, PROMPT, SamplingParams(seed=3, max_tokens=20, ignore_eos=True))[0].outputs[0].token_ids
    for i in (0, 4, 11):
        stop = free[i]
        cut = free[: free.index(stop) + 1]
        params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True, stop_token_ids=[stop, 130])
        [answer] = generate(llm, PROMPT, params)[0].outputs
        assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == (cut, "stop", stop)


def test_a_stop_at_the_last_token_is_a_stop(tiny: Tiny) -> None:
    llm = tiny()
    free = generate(llm, PROMPT, SamplingParams(seed=3, max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids
    assert free.index(free[4]) == 4
    [answer] = generate(llm, PROMPT, SamplingParams(seed=3, max_tokens=5, stop_token_ids=free[4:]))[0].outputs
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == (free, "stop", free[4])


def test_no_end_before_min_tokens(tiny: Tiny) -> None:
    """Neither the end token nor a stop token is drawn before `min_tokens` others; behind them both are."""
    llm = tiny()
    prompts, stops = random_prompts(50, high=12), [9, 70]
    plain = [SamplingParams(seed=i, max_tokens=30, stop_token_ids=stops) for i in range(50)]
    least = [SamplingParams(seed=i, max_tokens=30, stop_token_ids=stops, min_tokens=8) for i in range(50)]
    early = 0
    ends = set()
    for free, bound in zip(generate(llm, prompts, plain), generate(llm, prompts, least), strict=True):
        [[a], [b]] = free.outputs, bound.outputs
        early += len(a.token_ids) <= 8 and a.finish_reason == "stop"
        assert not {EOS, *stops} & set(b.token_ids[:8])
        assert len(b.token_ids) > 8
        if len(a.token_ids) > 8:
            assert a.token_ids == b.token_ids, "what was not banned changes nothing"
        if b.finish_reason == "stop":
            ends.add(b.token_ids[-1])
    assert early > 3 and ends >= {EOS}


def test_greedy_skips_a_banned_best_token(tiny: Tiny) -> None:
    """Where the best token may not be drawn yet, the next best is."""
    llm = tiny()
    [first] = generate(llm, PROMPT, SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=8, stop_token_ids=[first])
    answer = generate(llm, PROMPT, params)[0].outputs[0].token_ids
    assert first not in answer and EOS not in answer and len(answer) == 8


# --------------------------------------------------------------------------------------------------------------- seeds
def test_n_answers_are_numbered_and_their_own(tiny: Tiny) -> None:
    llm = tiny()
    params = SamplingParams(n=6, seed=5, max_tokens=12)
    [output] = generate(llm, PROMPT, params)
    assert [answer.index for answer in output.outputs] == list(range(6))
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 6
    [fewer] = generate(llm, PROMPT, SamplingParams(n=2, seed=5, max_tokens=12))
    assert fewer.outputs == output.outputs[:2]
    assert output.metrics.num_output_tokens == sum(len(answer.token_ids) for answer in output.outputs)
    [greedy] = generate(llm, PROMPT, SamplingParams(n=3, temperature=0, max_tokens=5))
    assert len({tuple(answer.token_ids) for answer in greedy.outputs}) == 1


def test_more_answers_than_seats_or_blocks(tiny: Tiny) -> None:
    params = SamplingParams(n=24, seed=1, max_tokens=20)
    [cramped] = generate(tiny(max_num_seqs=5, num_blocks=8), PROMPT, params)
    [roomy] = generate(tiny(), PROMPT, params)
    assert cramped.outputs == roomy.outputs


def test_a_seed_fixes_an_answer_and_another_one_changes_it(tiny: Tiny) -> None:
    llm = tiny()
    seeds = [3, 4, 3, 2**64 - 1, 0, 3]
    answers = tokens(generate(llm, [PROMPT] * 6, [SamplingParams(seed=seed, max_tokens=10) for seed in seeds]))
    assert answers[0] == answers[2] == answers[5]
    assert len({tuple(answer) for [answer] in answers}) == 4
    assert tokens(generate(tiny(seed=99), PROMPT, SamplingParams(seed=3, max_tokens=10))) == [answers[0]]


def test_without_seeds_the_engine_seed_fixes_a_run(tiny: Tiny) -> None:
    params = SamplingParams(max_tokens=10)

    def run(llm: LLM) -> list[list[list[int]]]:
        return [*tokens(generate(llm, [PROMPT] * 4, params)), *tokens(generate(llm, PROMPT, params))]

    first, again, other = run(tiny(seed=1)), run(tiny(seed=1)), run(tiny(seed=2))
    assert first == again != other
    assert len({tuple(answer) for [answer] in first}) == 5, "every request has a seed of its own"


# ---------------------------------------------------------------------------------------------- metrics, progress, text
def test_metrics_are_in_order_and_count(tiny: Tiny) -> None:
    llm = tiny(max_num_seqs=2)
    outputs = generate(llm, random_prompts(8), SamplingParams(max_tokens=6, ignore_eos=True))
    for output in outputs:
        m = output.metrics
        assert m.arrival_time <= m.first_token_time <= m.finished_time
        assert 0 <= m.time_to_first_token <= m.latency
        assert m.time_per_output_token == pytest.approx((m.finished_time - m.first_token_time) / 5)
        assert (m.num_prompt_tokens, m.num_output_tokens) == (len(output.prompt_token_ids), 6)
        assert (m.num_cached_tokens, m.num_preemptions, m.num_draft_tokens, m.num_accepted_tokens) == (0, 0, 0, 0)
        assert output.finished
    [one] = generate(llm, PROMPT, SamplingParams(max_tokens=1))
    assert one.metrics.time_per_output_token is None and one.metrics.time_to_first_token == one.metrics.latency
    assert llm.engine.stats.num_finished == 9 and llm.engine.stats.num_output_tokens == 49


def test_a_repeated_prompt_comes_from_the_cache(tiny: Tiny) -> None:
    prompt, params = random_prompts(1, 50, 50)[0], SamplingParams(temperature=0, max_tokens=3)
    llm = tiny()
    [first] = generate(llm, prompt, params)
    [second] = generate(llm, prompt, params)
    [longer] = generate(llm, [*prompt[:40], 3, 4], params)
    assert (first.num_cached_tokens, second.num_cached_tokens, longer.num_cached_tokens) == (0, 48, 32)
    assert first.outputs == second.outputs
    off = tiny(enable_prefix_caching=False)
    assert [generate(off, prompt, params)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_the_progress_bar_can_be_switched_off(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    llm, params = tiny(), SamplingParams(max_tokens=2)
    llm.generate(random_prompts(5), params)
    shown = capsys.readouterr()
    assert "5/5" in shown.err and "tokens/s" in shown.err and not shown.out
    llm.generate(random_prompts(5), params, use_tqdm=False)
    quiet = capsys.readouterr()
    assert not quiet.err and not quiet.out


def test_text_is_that_of_the_tokens_without_the_end(text_llm: LLM) -> None:
    chat = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    prompts = [chat, "Once upon a time", "Emoji: \N{PARTY POPPER} \N{SNOWMAN}, more:"]
    outputs = generate(text_llm, prompts, SamplingParams(temperature=0, max_tokens=30))
    tokenizer = text_llm.tokenizer
    assert tokenizer is not None
    for prompt, output in zip(prompts, outputs, strict=True):
        [answer] = output.outputs
        assert (output.prompt, output.prompt_token_ids) == (prompt, tokenizer.encode(prompt))
        assert answer.text == tokenizer.decode(answer.token_ids) and answer.text.strip()
    [answer] = outputs[0].outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.token_ids[-1] in tokenizer.eos_token_ids and "<|im_end|>" not in answer.text
    [cut] = generate(text_llm, chat, SamplingParams(temperature=0, stop_token_ids=answer.token_ids[1:2]))[0].outputs
    assert cut.token_ids == answer.token_ids[:2] and cut.stop_reason == answer.token_ids[1]
    assert answer.text.startswith(cut.text) and cut.text == tokenizer.decode(answer.token_ids[:1])


def test_tokens_without_a_tokenizer_have_no_text(tiny: Tiny) -> None:
    [output] = generate(tiny(), PROMPT, SamplingParams(max_tokens=4))
    assert output.prompt is None and output.outputs[0].text == "" and output.outputs[0].token_ids


FORK = """
import os, signal, sys
from pagedec import LLM, InvalidArgument, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, num_blocks=16, dtype="float32")
def answer():
    return llm.generate([[5, 17, 40]], SamplingParams(temperature=0.0, max_tokens=9),
    use_tqdm=False)[0].outputs[0].token_ids
expected = answer()
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if answer() == expected else 1)
print(os.waitpid(child, 0)[1], answer() == expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_llm_answers_in_a_forked_child(tiny_path: Path) -> None:
    """Of the parent's threads the child has none."""
    command = [sys.executable, "-c", FORK, str(tiny_path)]
    environ = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environ)
    assert done.stdout.split() == ["0", "True"], done.stderr[-2000:]


@pytest.mark.skipif(not available_isas(), reason="no kernel library is built")
def test_the_number_of_threads_holds_in_every_thread(tiny: Tiny) -> None:
    """And is that engine's alone."""
    before = torch.get_num_threads()
    try:
        contexts = [kernel_context(tiny(num_threads=n)) for n in (1, 2)]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: [context.num_threads for context in contexts]).result() == [1, 2]
    finally:
        torch.set_num_threads(before)


def test_more_threads_than_the_machine_can_run_are_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for one another at each kernel's end, and nothing be said of it."""
    monkeypatch.setattr(processors.os, "cpu_count", lambda: 32)
    for too_many in (129, 4096):
        with pytest.raises(InvalidArgument, match=f"^num_threads is {too_many}: must be at most 128 .* 32 processors$"):
            tiny(num_threads=too_many)
    processors.check_threads(128)
    monkeypatch.setattr(processors.os, "cpu_count", lambda: 1)
    with pytest.raises(InvalidArgument, match="at most 64 on this machine, which has 1 processor$"):
        tiny(num_threads=65)


def kernel_context(llm: LLM) -> Context:
    backend = llm.engine.executor.worker.lanes["target"].backend  # type: ignore[attr-defined]
    assert isinstance(backend, NativeBackend)
    return backend.context


def test_the_bar_counts_tokens_before_the_first_prompt_has_ended(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """And when all have ended it has counted each of them once, those of beams too, which come at their ends."""
    seen: list[tuple[int, str]] = []

    class Bar(collecting.tqdm):  # type: ignore[misc]
        def set_postfix_str(self, text: str, *_: object) -> None:
            seen.append((self.n, text))

    monkeypatch.setattr(collecting, "tqdm", Bar)
    monkeypatch.setattr(collecting, "REFRESH_SECONDS", 0.0)
    counted: list[int] = []
    count = collecting.Collection.count
    monkeypatch.setattr(
        collecting.Collection, "count", lambda self, number: (counted.append(number), count(self, number))[1]
    )
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(n=2, max_tokens=9),
        BeamParams(2, max_tokens=5),
    ]
    outputs = tiny().generate([[5, 17, 40]] * 3, params, use_tqdm=True)
    assert seen[0][0] == 0 and seen[0][1].endswith(" tokens/s")
    assert sum(counted) == sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    monkeypatch.setattr(collecting, "tqdm", None)  # a bar that is hidden has a thread and locks all the same
    assert len(tiny().generate([[5, 17, 40]], params[0], use_tqdm=False)) == 1
