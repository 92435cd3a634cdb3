"""What prompts begin with: whole chunks, chained, of what a chat says, and never more than is needed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pagedec.serve.routing import Key, prefix_keys
from pagedec.serve.routing_config import RoutingConfig

SMALL = RoutingConfig(chunk_bytes=8, chunk_ids=4, max_chunks=4)


def keys(text: str) -> tuple[Key, ...]:
    """One key for each 8 characters."""
    return prefix_keys(text, config=SMALL)


def shared(one: tuple[Key, ...], other: tuple[Key, ...]) -> int:
    """Leading keys that two prompts share; behind those, none is the same."""
    count = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert not {*one[count:]} & {*other[count:]}
    return count


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_only_whole_chunks_have_keys(count: int, more: int) -> None:
    length = 8 * count + more
    if length < 0:
        return
    whole = min(4, length // 8)
    assert len(keys("x" * length)) == whole
    ids = prefix_keys([7] * length, config=RoutingConfig(chunk_ids=8, max_chunks=4))
    assert len(ids) == whole
    assert len({*keys("x" * length), *ids}) == 2 * whole  # equal chunks at other places are not equal prefixes


def test_a_change_shows_from_its_chunk_on() -> None:
    text = "0123456789abcdefghijklmnopqrstuv"
    for place in range(len(text)):
        assert shared(keys(text), keys(text[:place] + "!" + text[place + 1 :])) == place // 8
    assert keys(text + "anything") == keys(text)  # behind the bound


def test_nothing_is_shared_with_another_salt_model_kind_or_context() -> None:
    found = [
        prefix_keys("x" * 64, config=SMALL),
        prefix_keys("x" * 64, salt="a", config=SMALL),
        prefix_keys("x" * 64, model="a", config=SMALL),
        prefix_keys("x" * 64, salt='a", "', config=SMALL),
        prefix_keys("x" * 64, context={"tools": []}, config=SMALL),
        prefix_keys("x" * 64, config=RoutingConfig(chunk_bytes=16, max_chunks=4)),
        prefix_keys([ord("x")] * 64, config=SMALL),
        prefix_keys([{"role": "x" * 64}], config=SMALL),
    ]
    assert [len(one) for one in found] == [4] * 8
    assert len({key for one in found for key in one}) == 32


def test_chunks_may_end_inside_a_character() -> None:
    one, other = keys("abcdefg\N{SNOWMAN}abcdefghijk"), keys("abcdefg\N{CLOUD}abcdefghijk")  # E2 98 83, E2 98 81
    assert len(one) == 2 and shared(one, other) == 1
    assert len(keys("\ud800" * 8)) == 3  # half a pair has three bytes, and is somebody else's error
    assert len(prefix_keys([{"role": "user", "content": "\ud800" * 30}], config=SMALL)) == 4


def test_a_next_turn_begins_with_the_chain_of_the_one_before() -> None:
    config = RoutingConfig(chunk_bytes=8)
    first = [{"role": "system", "content": "You help."}, {"role": "user", "content": "How tall is a giraffe?"}]
    then = [*first, {"role": "assistant", "content": "Five metres."}, {"role": "user", "content": "And a mouse?"}]
    one, two = prefix_keys(first, config=config), prefix_keys(then, config=config)
    assert two[: len(one)] == one and len(two) > len(one) + 5
    turned = [{name: message[name] for name in reversed(message)} for message in first]
    assert prefix_keys(turned, config=config) == one
    assert prefix_keys([{**first[0], "name": None}, first[1]], config=config) == one
    assert shared(one, prefix_keys([{**first[0], "role": "user"}, first[1]], config=config)) == 0
    parts = [{"role": "user", "content": [{"type": "text", "text": "a" * 50}, {"type": "image", "data": "b" * 50}]}]
    other = [{"role": "user", "content": [{"type": "text", "text": "a" * 50}, {"type": "image", "data": "c" * 50}]}]
    assert shared(prefix_keys(parts, config=config), prefix_keys(other, config=config)) > 5


def test_hostile_chats_are_read_up_to_the_bound() -> None:
    deep: object = "end"
    for _ in range(100_000):
        deep = [deep]
    assert len(prefix_keys([{"role": "user", "content": deep}], config=SMALL)) == 4
    assert len(prefix_keys([{"role": "user", "content": "x"}], context=deep, config=SMALL)) > 0
    assert prefix_keys([], config=SMALL) == () == prefix_keys("", config=SMALL)
    text = "x" * 10**8
    began = time.thread_time()
    for prompt in (text, [{"role": "user", "content": text}], range(10**8)):
        assert len(prefix_keys(prompt)) == 256
    assert time.thread_time() - began < 0.1  # reading all of any takes longer


def test_long_names_hide_nothing_behind_them() -> None:
    found = [
        prefix_keys("x" * 64, model=model, salt=salt, context=context, config=SMALL)
        for model in ("\x01" * 99_999 + "a", "\x01" * 99_999 + "b")
        for salt in ("\U0001f600" * 99_999, "\U0001f600" * 99_998 + "b")
        for context in ({"tools": ["x" * 9999 + "a"]}, {"tools": ["x" * 9999 + "b"]})
    ]
    assert len({one[0] for one in found}) == 8


def test_a_name_cannot_be_made_to_look_like_two() -> None:
    one, two = ([{"role": "user", "content": "", "x": x}] for x in ({"a": "x", "b": "y"}, {'a:"x",b': "y"}))
    config = RoutingConfig(chunk_bytes=1)
    assert len({prefix_keys(one, config=config)[20], prefix_keys(two, config=config)[20]}) == 2


def test_what_is_no_prompt_is_left_to_its_reader() -> None:
    for ids in ([2**63] * 9, [-(2**63) - 1] * 9, [1, "a", 2, 3], [1, None, 2, 3], [[1], [2, 3]]):
        assert prefix_keys(ids, config=SMALL) == ()  # type: ignore[arg-type]
    mixed: list[Any] = [{"role": "user", "content": "x"}, "y" * 40, None]
    assert len(prefix_keys(mixed, config=SMALL)) == 4


def test_of_many_pieces_no_more_are_read_than_are_needed() -> None:
    class Counted(list[str]):
        num_read = 0

        def __iter__(self) -> Iterator[str]:
            for one in super().__iter__():
                Counted.num_read += 1
                yield one

    assert len(prefix_keys([{"role": "user", "content": Counted([""] * 10**6)}], config=SMALL)) == 4
    assert Counted.num_read <= 32


def test_keys_are_the_same_in_every_process() -> None:
    program = "from pagedec.serve.routing import prefix_keys; print(prefix_keys('x' * 600, salt='s')[1].hex())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == prefix_keys("x" * 600, salt="s")[1].hex() == "5eec218ece82ab7039a8e5f761884fec"
