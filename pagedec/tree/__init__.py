"""Answers to one prompt as a tree: what they share is there once.

Read `nodes` first; `outline` draws it for a terminal, `svg` as a picture, `page` as a page with that picture in it.
"""

from __future__ import annotations

from pagedec.tree.nodes import AnswerTree, TreeNode

__all__ = ["AnswerTree", "TreeNode"]
