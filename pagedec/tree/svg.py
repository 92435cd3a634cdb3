"""The tree as a picture: boxes of text from left to right, the KV blocks that stand in each, scores at the right."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

from pagedec.tree.outline import blocks_of, ending, summary
from pagedec.tree.widths import end_of, lines_of, visible, width

if TYPE_CHECKING:
    from pagedec.tree.nodes import AnswerTree, TreeNode

CELL, LINE, FONT = 7.8, 18, 13
"""Pixels of a column and of a line, and the size of their letters."""
COLUMNS, MIN_COLUMNS = 34, 4
"""Of a box's lines: the longest, and how wide a box is at least."""
PROMPT_LINES = 4
PAD, GAP_X, GAP_Y, MARGIN, HEAD = 9, 44, 20, 24, 84
CHIP, CHIP_STEP, MAX_CHIPS = 9, 12, 48
"""A block is a square; of more than so many their number is told."""
OWN, FEW, ALL = "#d6dae1", (147, 197, 253), (29, 78, 216)
"""The colour of a block that one answer has, and those from a block of two to one of all."""
STYLE = (
    "text{font-family:'DejaVu Sans Mono',Menlo,Consolas,ui-monospace,monospace;"
    f"font-size:{FONT}px;fill:#1f2937;white-space:pre}}"
    ".title{font-weight:bold}.small{font-size:11px;fill:#6b7280}.best{font-weight:bold;fill:#14532d}"
    ".box{fill:#ffffff;stroke:#94a3b8}.prompt{fill:#f1f5f9;stroke:#64748b}.end{stroke:#15803d}"
    ".edge{fill:none;stroke:#94a3b8}.bar{fill:#bbf7d0}.lead{stroke:#cbd5e1;stroke-dasharray:2 4}"
)


@dataclass(slots=True)
class _Box:
    """Where a node is drawn; `extent` is the height of all that is right of it and its own."""

    node: TreeNode
    lines: list[str]
    wide: float
    high: float
    x: float = 0.0
    y: float = 0.0
    extent: float = 0.0
    children: list[_Box] = field(default_factory=list)

    @property
    def middle(self) -> float:
        return self.y + self.high / 2


def picture(tree: AnswerTree) -> str:
    """A whole SVG document."""
    boxes = _placed(tree)
    right = max(box.x + box.wide for box in boxes)
    column = right + GAP_X
    endings = [_endings(tree, box, column) for box in boxes]
    longest = max([width(visible(ending(tree, i))) for i in tree.root.answers], default=0)
    title = summary(tree)
    total = max(column + longest * CELL, MARGIN + len(title) * CELL) + MARGIN
    high = HEAD + max(boxes[0].extent, boxes[0].high) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="{high:.0f}" '
        f'viewBox="0 0 {total:.0f} {high:.0f}" role="img" aria-label={quoteattr(title)}>',
        f"<style>{STYLE}</style>",
        f'<rect width="{total:.0f}" height="{high:.0f}" fill="#fbfcfe"/>',
        _text(MARGIN, 34, title, "title"),
        *_legend(tree),
        *(_edge(box, child) for box in boxes for child in box.children),
        *(part for ends in endings for part in ends),
        *(part for box in boxes for part in _drawn(tree, box)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------------------------------- places
def _placed(tree: AnswerTree) -> list[_Box]:
    """A box for each node, parents before children, none over another."""
    boxes: list[_Box] = []
    by_node: dict[int, _Box] = {}
    for node in tree.nodes():
        box = by_node[id(node)] = _sized(tree, node)
        boxes.append(box)
    for box in reversed(boxes):
        box.children = [by_node[id(child)] for child in box.node.children]
        below = sum(child.extent for child in box.children) + GAP_Y * max(len(box.children) - 1, 0)
        box.extent = max(box.high, below, LINE * len(box.node.ended))
    boxes[0].x, boxes[0].y = MARGIN, HEAD + (boxes[0].extent - boxes[0].high) / 2
    for box in boxes:
        below = sum(child.extent for child in box.children) + GAP_Y * max(len(box.children) - 1, 0)
        top = box.middle - below / 2
        for child in box.children:
            child.x = box.x + box.wide + GAP_X
            child.y = top + (child.extent - child.high) / 2
            top += child.extent + GAP_Y
    return boxes


def _sized(tree: AnswerTree, node: TreeNode) -> _Box:
    text = visible(tree.label(node))
    lines = lines_of(end_of(text, COLUMNS * PROMPT_LINES) if node is tree.root else text, COLUMNS)
    columns = max(MIN_COLUMNS, *map(width, lines))
    if node.cumulative_logprob is not None and node is not tree.root:
        columns = max(columns, 8)
    num_chips = min(len(node.blocks), MAX_CHIPS)
    if num_chips and num_chips * CHIP_STEP > columns * CELL:
        columns = min(COLUMNS, max(columns, math.ceil(num_chips * CHIP_STEP / CELL)))
    wide = columns * CELL + 2 * PAD
    rows = -(-num_chips // _chips_in(wide)) + (len(node.blocks) > MAX_CHIPS)
    return _Box(node, lines, wide, len(lines) * LINE + 2 * PAD + rows * CHIP_STEP + (4 if rows else 0))


def _chips_in(wide: float) -> int:
    return max(1, int((wide - 2 * PAD + CHIP_STEP - CHIP) // CHIP_STEP))


# -------------------------------------------------------------------------------------------------------------- shapes
def _text(x: float, y: float, text: str, kind: str = "") -> str:
    """One line of text, as wide as its columns whatever font there is."""
    named = f' class="{kind}"' if kind else ""
    fitted = "" if kind else f' textLength="{width(text) * CELL:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{fitted if text else ""} xml:space="preserve">{escape(text)}</text>'


def _colour(number: int, total: int) -> str:
    """Of a block that so many answers share."""
    if number < 2:
        return OWN
    share = math.log(number / 2) / math.log(total / 2) if total > 2 else 1.0
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in zip(FEW, ALL, strict=True))


def _chip(x: float, y: float, colour: str, title: str = "") -> str:
    told = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{CHIP}" height="{CHIP}" rx="2" fill="{colour}">{told}</rect>'


def _legend(tree: AnswerTree) -> list[str]:
    total = len(tree.outputs)
    if tree.block_size is None:
        return []
    shown = [("held for one answer alone", 1)]
    shown += [("for 2", 2)] if total > 2 else []
    shown += [(f"for all {total}", total)] if total > 1 else []
    x, parts = float(MARGIN), [_text(MARGIN, 58, "KV blocks:", "small")]
    x += 11 * 6.6 + 4
    for words, number in shown:
        parts += [_chip(x, 49, _colour(number, total)), _text(x + CHIP + 5, 58, words, "small")]
        x += CHIP + 5 + len(words) * 6.6 + 18
    return parts


def _edge(parent: _Box, child: _Box) -> str:
    x0, y0, x1, y1 = parent.x + parent.wide, parent.middle, child.x, child.middle
    bend = (x0 + x1) / 2
    thick = 1.2 + 0.9 * math.log2(len(child.node.answers))
    path = f"M{x0:.1f} {y0:.1f}C{bend:.1f} {y0:.1f} {bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    return f'<path class="edge" stroke-width="{thick:.1f}" d="{path}"/>'


def _drawn(tree: AnswerTree, box: _Box) -> list[str]:
    node = box.node
    kind = "box prompt" if node is tree.root else "box end" if node.ended else "box"
    facts = [f"tokens {node.start} to {node.end - 1}" if node.token_ids else "no tokens"]
    facts += [f"log-probability {node.cumulative_logprob:.4f}"] if node.cumulative_logprob is not None else []
    facts += [f"{blocks_of(node)}"] if node.blocks else []
    shape = (
        f'<rect class="{kind}" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.wide:.1f}" height="{box.high:.1f}" rx="6">'
    )
    parts = [f"{shape}<title>{escape('; '.join(facts))}</title></rect>"]
    for i, line in enumerate(box.lines):
        parts.append(_text(box.x + PAD, box.y + PAD + LINE * i + FONT, line))
    if node.cumulative_logprob is not None and node is not tree.root:
        parts.append(_text(box.x + 2, box.y - 3, f"{node.cumulative_logprob:.3f}", "small"))
    in_row, top = _chips_in(box.wide), box.y + PAD + LINE * len(box.lines) + 4
    colour = _colour(len(node.answers), len(tree.outputs))
    for i, block in enumerate(node.blocks[:MAX_CHIPS]):
        row, place = divmod(i, in_row)
        title = f"block {block}, for {len(node.answers)} of {len(tree.outputs)} answers"
        parts.append(_chip(box.x + PAD + place * CHIP_STEP, top + row * CHIP_STEP, colour, title))
    if len(node.blocks) > MAX_CHIPS:
        row = -(-MAX_CHIPS // in_row)
        more = f"and {len(node.blocks) - MAX_CHIPS:,} more"
        parts.append(_text(box.x + PAD, top + row * CHIP_STEP + CHIP, more, "small"))
    return parts


def _endings(tree: AnswerTree, box: _Box, column: float) -> list[str]:
    """The answers that end in a box: a line to the column of scores, and there a bar as long as the score is good."""
    ended, parts = box.node.ended, []
    scores = [output.score for output in tree.outputs if output.score is not None]
    worst, best = (min(scores), max(scores)) if scores else (0.0, 0.0)
    for place, answer in enumerate(ended):
        y = box.middle + (place - (len(ended) - 1) / 2) * LINE
        told, score = visible(ending(tree, answer)), tree.outputs[answer].score
        edge = box.x + box.wide
        if column - edge > GAP_X / 2:
            parts.append(f'<line class="lead" x1="{edge:.1f}" y1="{y:.1f}" x2="{column - 6:.1f}" y2="{y:.1f}"/>')
        if score is not None and math.isfinite(score):
            good = (score - worst) / (best - worst) if best > worst else 1.0
            long = width(told) * CELL * (0.15 + 0.85 * good)
            parts.append(
                f'<rect class="bar" x="{column - 3:.1f}" y="{y - 8:.1f}" width="{long:.1f}" height="16" rx="3"/>'
            )
        parts.append(_text(column, y + 4, told, "best" if answer == 0 and scores else ""))
    return parts
