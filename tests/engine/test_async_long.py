"""What takes long is not done in an event loop: other coroutines would wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, AsyncLLM, BeamSearchParams, RequestOutput, RequestOutputKind, SamplingParams
from pagedec.engine import options
from pagedec.engine.completion import Completion
from pagedec.llm.readers import MANY_REPORTED
from pagedec.llm.writer import Writer
from tests.models.checkpoints import VOCAB

IDS = [5, 17, 40, 99, 3]
LOOP = "the loop"
MANY: dict[str, Any] = {
    "answer": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=-1),
    "answers": SamplingParams(n=40, seed=1, max_tokens=20, ignore_eos=True, logprobs=1),
    "prompt": SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1),
    "beams": BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True, logprobs=50),
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Whether it was in an event loop's thread that tables were made."""
    found, table = set[bool](), Writer._table

    def noted(*given: Any) -> Any:
        found.add(threading.current_thread().name == LOOP)
        return table(*given)

    monkeypatch.setattr(Writer, "_table", noted)
    return found


def run(what: Callable[[AsyncLLM], Any], path: Path) -> Any:
    results: list[Any] = []

    async def asked() -> None:
        settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_blocks": 128}
        async with AsyncLLM(str(path), max_logprobs=VOCAB, **settings) as llm:
            results.append(await asyncio.wait_for(what(llm), 120))

    thread = threading.Thread(target=lambda: asyncio.run(asked()), name=LOOP)
    thread.start()
    thread.join()
    return results[0]


async def last(llm: AsyncLLM, params: Any) -> RequestOutput:
    return [output async for output in llm.generate([*IDS, *range(3, 30)], params)][-1]


@pytest.mark.parametrize("name", MANY)
def test_many_reports_are_read_in_a_thread(tiny_path: Path, threads: set[bool], name: str) -> None:
    params = MANY[name].clone(output_kind=RequestOutputKind.FINAL_ONLY)
    got = run(lambda llm: last(llm, params), tiny_path)
    assert threads == {False}
    with LLM(str(tiny_path), dtype="float32", skip_tokenizer_init=True, num_blocks=128, max_logprobs=VOCAB) as llm:
        [want] = llm.generate([[*IDS, *range(3, 30)]], params, use_tqdm=False)
    assert got.outputs == want.outputs and got.prompt_logprobs == want.prompt_logprobs


def test_an_answers_own_end_is_read_in_a_thread_too(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others still run: what each token has told before comes once more, in one piece."""
    found, completion = set[str](), Writer.completion

    def noted(self: Writer, index: int, answer: Completion, params: Any) -> Any:
        if len(answer.logprobs or ()) * 61 >= MANY_REPORTED:
            found.add(threading.current_thread().name)
        return completion(self, index, answer, params)

    monkeypatch.setattr(Writer, "completion", noted)
    params = SamplingParams(n=2, seed=1, max_tokens=60, logprobs=60, ignore_eos=True, min_tokens=17)
    ends = params.clone(stop_token_ids=range(3, 40), output_kind=RequestOutputKind.DELTA)
    run(lambda llm: last(llm, ends), tiny_path)
    assert found and LOOP not in found


def test_few_are_read_where_they_are_wanted(tiny_path: Path, threads: set[bool]) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=5, output_kind=RequestOutputKind.DELTA)
    assert MANY_REPORTED > 6 * 20
    run(lambda llm: last(llm, params), tiny_path)
    assert threads == {True}


def test_many_reports_of_a_session(tiny_path: Path, threads: set[bool]) -> None:
    async def asked(llm: AsyncLLM) -> Any:
        async with llm.session(IDS) as session:
            return await session.generate(MANY["answer"])

    assert len(run(asked, tiny_path).outputs[0].logprobs) == 20 and threads == {False}


async def generated_all(branches: list[Any]) -> int:
    return sum(len(one.outputs[0].logprobs) for one in await branches[0].generate_all(branches, MANY["answer"]))


async def scored(branches: list[Any]) -> int:
    return sum(len(one.logprobs) for one in await branches[0].score([IDS, IDS[:1]], logprobs=-1))


async def scored_all(branches: list[Any]) -> int:
    many = await branches[0].score_all(branches, [[IDS], [IDS]], logprobs=-1)
    return sum(len(one.logprobs) for each in many for one in each)


@pytest.mark.parametrize(("what", "count"), [(generated_all, 40), (scored, 6), (scored_all, 10)])
def test_many_reports_of_calls_on_several_branches(
    tiny_path: Path, threads: set[bool], what: Callable[[list[Any]], Any], count: int
) -> None:
    async def asked(llm: AsyncLLM) -> Any:
        async with llm.session(IDS) as session:
            return await what([session, await session.fork()])

    assert run(asked, tiny_path) == count and threads == {False}


def test_a_call_that_is_cancelled_while_its_reports_are_read_leaves_its_branch_as_it_was(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, table = threading.Event(), threading.Event(), Writer._table

    def waiting(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return table(*given)

    async def asked(llm: AsyncLLM) -> Any:
        async with llm.session(IDS) as session:
            monkeypatch.setattr(Writer, "_table", waiting)
            task = asyncio.create_task(session.generate(MANY["answer"]))
            await asyncio.to_thread(begun.wait, 60)
            task.cancel()
            await asyncio.wait([task])
            go_on.set()
            held = await session.blocks()
            after = await session.generate(MANY["answer"])
            return task.cancelled(), held.branches[0].num_tokens, len(after.outputs[0].token_ids), session.num_tokens

    assert run(asked, tiny_path) == (True, len(IDS), 20, len(IDS) + 20)


def test_a_call_that_is_aborted_when_it_was_over_is_kept(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output says nothing of an abort, so the branch stands where the output ends."""
    begun, go_on, table = threading.Event(), threading.Event(), Writer._table

    def waiting(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return table(*given)

    async def asked(llm: AsyncLLM) -> Any:
        async with llm.session(IDS) as session:
            monkeypatch.setattr(Writer, "_table", waiting)
            task = asyncio.create_task(session.generate(MANY["answer"], request_id="mine"))
            await asyncio.to_thread(begun.wait, 60)
            await llm.abort("mine")
            await session.blocks()  # the loop has seen it
            go_on.set()
            [answer] = (await task).outputs
            return answer.finish_reason, session.num_tokens

    assert run(asked, tiny_path) == ("length", len(IDS) + 20)


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_long_tables_are_read_in_a_thread(tiny_path: Path, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    found, read = set[str](), options._token_ids

    def noted(*given: Any) -> Any:
        found.add(threading.current_thread().name)
        return read(*given)

    monkeypatch.setattr(options, "_token_ids", noted)
    table: Any = dict.fromkeys(range(VOCAB), 0.5) if field == "logit_bias" else list(range(3, VOCAB)) * 10
    monkeypatch.setattr("pagedec.llm.slow.LONG_TABLES", 100)
    run(lambda llm: last(llm, SamplingParams(max_tokens=2, **{field: table})), tiny_path)
    assert found and LOOP not in found


@pytest.mark.parametrize("given", ["as fields", "as parameters", "for all"])
def test_a_session_s_are_too_and_not_by_the_engine(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Whoever is in the same batch would wait for them."""
    found, read = set[str](), options._token_ids

    def noted(*values: Any) -> Any:
        found.add(threading.current_thread().name)
        return read(*values)

    async def ask(llm: AsyncLLM) -> None:
        table = dict.fromkeys(range(VOCAB), 0.5)
        async with llm.session(IDS) as session:
            found.clear()
            if given == "for all":
                await session.generate_all([session], SamplingParams(max_tokens=2, logit_bias=table))
            elif given == "as fields":
                await session.generate(max_tokens=2, logit_bias=table)
            else:
                await session.generate(SamplingParams(max_tokens=2, logit_bias=table))

    monkeypatch.setattr(options, "_token_ids", noted)
    monkeypatch.setattr("pagedec.llm.slow.LONG_TABLES", 100)
    run(ask, tiny_path)
    assert found and not found & {LOOP, "pagedec-engine"}
