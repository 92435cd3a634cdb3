"""Answers as a tree: what is merged, which blocks that takes, and how it looks."""

from __future__ import annotations

import inspect
import pickle
import random
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import pytest

from pagedec import CompletionOutput, Logprob, RequestOutput
from pagedec.tree import AnswerTree
from pagedec.tree.svg import MAX_CHIPS
from pagedec.tree.widths import lines_of, visible, width

SVG = "{http://www.w3.org/2000/svg}"


def spell(token_ids: Sequence[int]) -> bytes:
    """A vocabulary of bytes, in which 257 ends."""
    return bytes(token for token in token_ids if token < 256)


def answers(*texts: str, scores: Sequence[float] = (), end: str = "stop", logprobs: bool = False) -> RequestOutput:
    outputs = []
    for i, text in enumerate(texts):
        token_ids = [*text.encode(), 257]
        tables = [{token: Logprob(-0.5)} for token in token_ids] if logprobs else None
        score = scores[i] if scores else None
        outputs.append(CompletionOutput(i, text, token_ids, None, tables, end, score=score))
    prompt = "The sky"
    return RequestOutput("0", prompt, list(prompt.encode()), outputs, True, block_size=8).spelled(spell)


def test_common_beginnings_are_there_once() -> None:
    tree = answers(" is blue", " is black", " was red", logprobs=True).tree()
    prompt, shared, forked = tree.root, tree.root.children[0], tree.root.children[0].children
    assert (prompt.text, prompt.start, prompt.end, prompt.answers) == ("The sky", 0, 7, (0, 1, 2))
    assert (shared.text, shared.start, shared.answers, shared.cumulative_logprob) == (" ", 7, (0, 1, 2), -0.5)
    assert [(node.text, node.answers) for node in forked] == [("is bl", (0, 1)), ("was red", (2,))]
    below = forked[0].children
    assert [(node.text, node.ended, node.cumulative_logprob) for node in below] == [
        ("ue", (0,), -4.5), ("ack", (1,), -5.0),
    ]  # fmt: skip
    assert [node.text for node in tree.nodes()] == ["The sky", " ", "is bl", "ue", "ack", "was red"]
    assert tree.num_forks == 2


def test_a_sum_of_which_a_part_was_not_reported_is_none() -> None:
    """As of branches of a session, of which some calls asked for reports and others did not."""
    told, half = answers("ab", "ac", logprobs=True).outputs
    silent = CompletionOutput(2, "d", [*b"d", 257])
    assert half.logprobs is not None
    half.logprobs[1] = None
    for order in ([told, half, silent], [silent, half, told]):
        sums = {node.text: node.cumulative_logprob for node in AnswerTree("x", [1], order, None, spell).nodes()}
        assert sums == {"x": 0.0, "a": -0.5, "b": -1.5, "c": None, "d": None}


def test_answers_that_are_equal_and_answers_that_go_on_behind_another_s_end() -> None:
    same = answers("ab", "ab").tree()
    assert [node.ended for node in same.nodes()] == [(), (0, 1)] and same.num_forks == 0
    output = answers("ab", "abc", "")
    for answer in output.outputs:
        answer.token_ids.remove(257)
    tree = output.tree()
    assert [(node.text, node.ended) for node in tree.nodes()] == [("The sky", (2,)), ("ab", (0,)), ("c", (1,))]
    assert RequestOutput("0", "x", [1]).tree().draw() == '0 answers to a prompt of 1 token; 0 forks\n"x"'


def test_a_fork_in_the_middle_of_a_character() -> None:
    tree = answers("→", "↑", "é").tree()
    assert [(len(node.token_ids), node.text) for node in tree.nodes()] == [
        (7, "The sky"), (2, ""), (2, "→"), (2, "↑"), (3, "é"),
    ]  # fmt: skip


def test_text_behind_a_stop_string_is_nobody_s() -> None:
    output = answers("one END", "one EVER")
    short = CompletionOutput(0, "one ", output.outputs[0].token_ids, finish_reason="stop", stop_reason="END")
    output.outputs[0] = short
    assert [node.text for node in output.tree().nodes()] == ["The sky", "one E", "", "VER"]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_blocks_are_those_that_forked_tables_hold(size: int) -> None:
    """Against all blocks of all sequences, equal ones counted once, a block that another one goes on from not at
    all."""
    rng = random.Random(size)
    for _ in range(200):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        texts = [[rng.randrange(2) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 6))]
        tree = AnswerTree(None, prompt, [CompletionOutput(i, "", text) for i, text in enumerate(texts)], size)
        held = {tuple(prompt + text[:-1]) for text in texts}
        blocks = {(at // size, one[: at + size]) for one in held for at in range(0, len(one), size)}
        gone_on = {
            (number, part)
            for number, part in blocks
            for _, other in blocks
            if len(other) > len(part) and other[: len(part)] == part and len(part) % size
        }
        assert tree.num_blocks == len(blocks - gone_on)
        assert tree.num_blocks_unshared == sum(-(-(len(prompt) + len(text) - 1) // size) for text in texts)
        for node in tree.nodes():
            assert all(node.start < (block + 1) * size and block * size < node.end for block in node.blocks)


def test_as_lines() -> None:
    output = answers(" is blue", " is black\n", " は青い", scores=[-0.25, -0.5, -1.0])
    assert str(output.tree()) == (
        "3 answers to a prompt of 7 tokens; 2 forks; 6 KV blocks of 8 tokens, 8 without sharing\n"
        '"The sky"\n'
        '└─ " "  block 0 for 3\n'
        '   ├─ "is bl"\n'
        '   │  ├─ "ue"  block 1  #1 score -0.2500, 9 tokens, stop\n'
        '   │  └─ "ack\\n"  blocks 1-2  #2 score -0.5000, 11 tokens, stop\n'
        '   └─ "は青い"  blocks 1-2  #3 score -1.0000, 11 tokens, stop'
    )


def test_lines_end_at_the_terminal_s_edge() -> None:
    long = "日本語のとても長い文 " * 8 + "and words " * 8
    drawn = answers(long + "a", long + "b" * 90, scores=[-1.0, -2.0]).tree().draw(60)
    lines = drawn.splitlines()[1:]
    assert all(width(line) <= 60 for line in lines) and max(map(width, lines)) > 55
    inside = "".join(re.sub(r"^[│├└─ ]{0,3}", "", line) if i else line for i, line in enumerate(lines))
    assert long.replace(" ", "") in inside.replace(" ", "").replace("│", "")
    assert "│  └─" not in drawn and drawn.count("├─ ") == 1


def test_what_would_not_be_seen_is_escaped() -> None:
    hostile = 'a\x1b[31m\x00\u202e"\\\u2028\ud800\ufffe\U0010ffff\u00ad\u200d\x9b'
    shown = visible(hostile)
    assert shown == (
        'a\\x1b[31m\\x00\\u202e\\"\\\\\\u2028\\ud800\\ufffe\\U0010ffff\\xad\u200d\\x9b'
    ) and "\n" not in visible("\n\r\t\v")
    assert (
        lines_of("ab cd ef", 5) == ["ab cd", " ef"]
        and lines_of("ab cdef", 5) == ["ab ", "cdef"]
        and lines_of("", 5) == [""]
    )
    assert lines_of("漢字漢字", 5) == ["漢字", "漢字"] and "".join(lines_of("x" * 12, 5)) == "x" * 12


def test_without_a_vocabulary_there_are_token_ids() -> None:
    output = answers(" is blue", " is black")
    again = pickle.loads(pickle.dumps(output))
    assert again == output
    assert '"105,115,32,98,108"' not in str(output.tree()) and '"32,105,115,32,98,108"' in str(again.tree())
    assert "block 0" in str(again.tree())


HOSTILE = '<script>alert(1)</script> & "x" ]]> <!-- \x00\x0b\ud800\ufffe \x1b[2J '


@pytest.mark.parametrize("form", ["svg", "html"])
def test_files_are_valid_whatever_the_text(form: str) -> None:
    outputs = [
        CompletionOutput(i, HOSTILE + text, [5, *text.encode(), 257], score=-1.0 - i, stop_reason="</td>")
        for i, text in enumerate(["<b>", "&amp;", "→ 漢字"])
    ]
    output = RequestOutput("0", HOSTILE, [1, 2, 3], outputs, True, block_size=16)
    document = getattr(output.tree(), form)()
    parsed = ElementTree.fromstring(document.removeprefix("<!DOCTYPE html>\n"))
    names = {element.tag.rpartition("}")[2] for element in parsed.iter()}
    assert not names & {"script", "b", "image", "a", "link", "foreignObject"}
    assert "http" not in document.replace("http://www.w3.org/2000/svg", "") and "@import" not in document
    document.encode("utf-8")
    text = "".join(parsed.itertext())
    assert "<script>alert(1)</script>" in text and "\\x00" in text and "3 answers to a prompt of 3 tokens" in text


def boxes_of(picture: str) -> list[tuple[float, float, float, float]]:
    shapes = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    numbers = ("x", "y", "width", "height")
    return [
        tuple(float(shape.attrib[name]) for name in numbers)
        for shape in shapes
        if "box" in shape.attrib.get("class", "")
    ]


@pytest.mark.parametrize("seed", range(10))
def test_no_box_lies_over_another_and_all_lie_in_the_picture(seed: int) -> None:
    rng = random.Random(seed)
    outputs = []
    for i in range(rng.randint(1, 40)):
        letters = [rng.choice(b"ab") for _ in range(rng.randint(1, 8))]
        token_ids = [token for letter in letters for token in [letter] * rng.randint(1, 30)]
        outputs.append(CompletionOutput(i, spell(token_ids).decode(), token_ids, score=rng.random()))
    tree = AnswerTree("p" * rng.randint(1, 4000), list(range(4000)), outputs, 16, spell)
    picture = tree.svg()
    boxes = boxes_of(picture)
    assert len(boxes) == len(list(tree.nodes()))
    size = ElementTree.fromstring(picture).attrib
    for i, (x, y, w, h) in enumerate(boxes):
        assert x >= 0 and y >= 60 and x + w <= float(size["width"]) and y + h <= float(size["height"])
        for u, v, s, t in boxes[:i]:
            assert x + w <= u or u + s <= x or y + h <= v or v + t <= y
    assert f"and {4000 // 16 - MAX_CHIPS} more" in picture


def test_hundreds_of_answers_that_part_one_by_one() -> None:
    """As deep as there are answers: nothing goes down the tree by calling itself."""
    texts, limit = ["a" * i + "b" for i in range(500)], sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        tree = answers(*texts).tree()
        assert tree.num_forks == 499 and len(list(tree.nodes())) == 999
        assert len(boxes_of(tree.svg())) == 999 and "#500 " in tree.draw() and "#500 " in tree.html()
    finally:
        sys.setrecursionlimit(limit)
