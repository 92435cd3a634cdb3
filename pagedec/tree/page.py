"""The tree as a page: the picture, and all answers in full."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from pagedec.tree.outline import summary
from pagedec.tree.svg import picture
from pagedec.tree.widths import visible

if TYPE_CHECKING:
    from pagedec.outputs import CompletionOutput
    from pagedec.tree.nodes import AnswerTree

STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:24px;color:#1f2937;background:#fff}"
    "h1{font-size:19px}h2{font-size:16px;margin-top:28px}"
    ".picture{overflow:auto;border:1px solid #e2e8f0;border-radius:8px}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;padding:6px 12px 6px 0;"
    "border-bottom:1px solid #e2e8f0}td.number,th.number{text-align:right;font-variant-numeric:tabular-nums}"
    "pre{font:13px/1.4 ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre-wrap;"
    "overflow-wrap:anywhere;margin:0}"
)
HEADS = ("", "score", "log-probability", "tokens", "ended by", "answer")


def page(tree: AnswerTree) -> str:
    """A whole HTML document."""
    title = escape(summary(tree))
    heads = "".join(f'<th class="{"number" if 0 < i < 4 else "text"}">{head}</th>' for i, head in enumerate(HEADS))
    rows = "\n".join(_row(output, tree) for output in tree.outputs)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<div class="picture">
{picture(tree)}</div>
<h2>Prompt</h2>
<pre>{_full(tree.label(tree.root))}</pre>
<h2>{"Answers" if tree.names is None else "Branches"}</h2>
<table>
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""


def _row(output: CompletionOutput, tree: AnswerTree) -> str:
    text = output.text if output.text or tree.has_text else ",".join(map(str, output.token_ids))
    reason = output.finish_reason or ("unfinished" if tree.names is None else "")
    if output.stop_reason is not None:
        reason += f": {output.stop_reason}"
    numbers = (_number(output.score), _number(output.cumulative_logprob), str(len(output.token_ids)))
    cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
    place = output.index + 1 if tree.names is None else tree.names[output.index]
    return f"<tr><td>{place}</td>{cells}<td>{_full(reason)}</td><td><pre>{_full(text)}</pre></td></tr>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _full(text: str) -> str:
    """A text as it is, but that lines and tabs alone are left of control characters."""
    kept = (part if part in '\n\t"\\' else visible(part) for part in text)
    return escape("".join(kept))
