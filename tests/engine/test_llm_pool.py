"""The KV pool as users meet it: how large it is, what it cuts short, and emptying its prefix cache."""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, AsyncLLM, PoolWarning, SamplingParams
from pagedec.cli import active
from pagedec.cli.main import main
from pagedec.errors import InvalidArgument, InvariantError
from pagedec.runtime.memory import Memory
from tests.core.fake import FakeEngine, LanguageModel
from tests.core.world import limits

Tiny = Callable[..., LLM]
IDS = list(range(40))
FREE = SamplingParams(temperature=0, ignore_eos=True)


def reasons(llm: LLM, **changes: Any) -> list[tuple[int, str | None, str | None]]:
    [output] = llm.generate([IDS], FREE.clone(**changes), use_tqdm=False)
    return [(len(answer.token_ids), answer.finish_reason, answer.limited_by) for answer in output.outputs]


def test_the_pool_is_described(tiny: Tiny) -> None:
    pool = tiny(num_blocks=20).kv_cache
    block = 2 * 2 * 16 * 1 * 64 * 4 + 4 * 16  # K and V, layers, tokens, heads, their size, fp32; and token ids
    assert (pool.num_blocks, pool.block_size, pool.num_tokens, pool.num_bytes) == (20, 16, 320, 20 * block)
    assert pool.reason == "as num_blocks says"
    assert str(pool) == "20 blocks, 320 tokens, 0.3 MiB"
    pool = tiny(num_blocks=None, kv_cache_memory="1MiB").kv_cache
    assert (pool.num_blocks, pool.reason) == ((1 << 20) // block, "as kv_cache_memory says")
    with pytest.raises(AttributeError):
        pool.num_blocks = 3  # type: ignore[misc]


def test_the_pool_takes_its_share(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedec.runtime.memory._of_machine", lambda root: Memory(64 << 20, "made up"))
    pool = tiny(num_blocks=None, memory_utilization=0.5).kv_cache
    assert pool.num_bytes <= 32 << 20 < pool.num_bytes + pool.num_bytes // pool.num_blocks
    assert pool.reason == "0.5 of the 64 MiB available (made up)"


def test_the_first_line_shows_the_pool(tiny: Tiny) -> None:
    pool = "KV pool: 20 blocks, 320 tokens, 0.3 MiB"
    assert active.active_line(tiny(num_blocks=20)).endswith(f" threads; {pool}")
    assert active.active_line(tiny(num_blocks=20, executor="process")).endswith(f" threads, executor process; {pool}")


def test_a_pool_below_one_context_warns_once_for_each_engine(tiny: Tiny) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PoolWarning)
        tiny(num_blocks=17)  # the context of 256 tokens, and one block for copies
    for _ in range(2):
        with pytest.warns(PoolWarning) as caught:
            llm = tiny(num_blocks=9)
            reasons(llm), reasons(llm)
        [warning] = caught
        assert str(warning.message) == (
            "the KV pool holds less than one context: sequences end at 128 tokens, max_model_len is 256; the pool has "
            "9 blocks, 144 tokens, 0.1 MiB (as num_blocks says): give it more with num_blocks, kv_cache_memory or "
            "memory_utilization, or lower max_model_len"
        )


def test_what_cut_an_answer_can_be_told(tiny: Tiny) -> None:
    with pytest.warns(PoolWarning):
        small = tiny(num_blocks=9)
    whole = tiny(num_blocks=20)
    assert reasons(small) == [(88, "length", "kv_pool")]
    assert reasons(small, max_tokens=89, n=2) == [(88, "length", "kv_pool")] * 2
    assert reasons(small, max_tokens=88) == reasons(whole, max_tokens=88) == [(88, "length", "max_tokens")]
    assert reasons(whole) == reasons(whole, max_tokens=1000) == [(216, "length", "max_model_len")]
    [output] = whole.generate([IDS], FREE.clone(stop_token_ids=list(range(131))), use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].limited_by) == ("stop", None)
    *_, last = small.stream(IDS, FREE)
    assert last.outputs[0].limited_by == "kv_pool"


@pytest.mark.filterwarnings("always:the KV pool")
def test_the_command_line_says_what_cut_an_answer(tiny_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--model",
        str(tiny_path),
        "--skip-tokenizer-init",
        "--dtype",
        "float32",
        "--num-blocks",
        "3",
        "--ignore-eos",
    ]
    assert main(["generate", "5,6,7", *flags]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1] == "--- 29 tokens, length (the KV pool holds no more)"
    assert err.splitlines()[0].startswith(
        "pagedec: warning: the KV pool holds less than one context: sequences end at 32 "
    )
    assert main(["generate", "5,6,7", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["limited_by"] == "kv_pool"


# ------------------------------------------------------------------------------------------------- the prefix cache
def cached(llm: LLM, prompt: list[int] = IDS) -> int:
    [output] = llm.generate([prompt], FREE.clone(max_tokens=2), use_tqdm=False)
    return output.num_cached_tokens


def test_an_idle_prefix_cache_is_emptied(tiny: Tiny) -> None:
    llm = tiny()
    assert [cached(llm), cached(llm)] == [0, 32]
    assert llm.reset_prefix_cache() is True
    pool = llm.engine.scheduler.pools["target"]
    assert len(pool.free) == pool.num_blocks and not pool.evictable and not pool.block_of
    llm.engine.scheduler.check()
    assert [cached(llm), cached(llm)] == [0, 32]
    assert tiny().reset_prefix_cache() is True


def test_running_requests_keep_what_they_hold(tiny: Tiny) -> None:
    """Their answers are the same; what they have computed is found by nobody."""
    llm = tiny()
    params = SamplingParams(seed=5, max_tokens=60, ignore_eos=True, n=2)
    [expected] = tiny().generate([IDS], params, use_tqdm=False)
    stream = llm.stream(IDS, params)
    for _ in range(20):
        next(stream)
    assert llm.reset_prefix_cache() is False
    llm.engine.scheduler.check()
    assert cached(llm) == 0
    next(stream)
    assert llm.reset_prefix_cache() is False
    *_, last = stream
    assert [answer.token_ids for answer in last.outputs] == [answer.token_ids for answer in expected.outputs]
    llm.engine.scheduler.check()
    assert llm.reset_prefix_cache() is True


def test_coroutines_await_that_the_prefix_cache_is_emptied(tiny_path: Path) -> None:
    """As in vLLM; an event loop goes on while a step is out."""
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 16, "max_model_len": 128}
    turning, going_on = threading.Event(), threading.Event()

    async def run() -> None:
        with AsyncLLM(str(tiny_path), **settings) as llm:
            requests = llm.engine.scheduler.requests
            llm.loop.after_step.append(lambda: requests and (turning.set(), going_on.wait(60)))
            outputs = llm.generate(IDS, FREE.clone(max_tokens=60))
            first = asyncio.ensure_future(anext(outputs))
            await asyncio.to_thread(turning.wait, 60)
            resetting = asyncio.ensure_future(llm.reset_prefix_cache())
            await asyncio.sleep(0)
            assert not resetting.done()
            going_on.set()
            assert await resetting is False and await first
            await outputs.aclose()
            while not await llm.reset_prefix_cache():
                await asyncio.sleep(0.01)
            [again] = [output async for output in llm.generate(IDS, FREE.clone(max_tokens=1))]
            assert again.num_cached_tokens == 0

    asyncio.run(run())


def test_a_closed_engine_has_no_prefix_cache(tiny: Tiny) -> None:
    llm = tiny()
    llm.close()
    with pytest.raises(InvalidArgument, match="LLM is closed: must be open"):
        llm.reset_prefix_cache()


def test_the_prefix_cache_is_not_reset_within_a_step() -> None:
    scheduler = FakeEngine({"target": LanguageModel(7, 3)}, limits(16)).scheduler
    plan = scheduler.plan()
    with pytest.raises(InvariantError, match="reset_prefix_cache while step 1 is out"):
        scheduler.reset_prefix_cache()
    scheduler.settle(plan, {})
    assert scheduler.reset_prefix_cache() is True
