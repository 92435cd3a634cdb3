"""Searches over what a model may write, on sessions: each forks branches, scores them, and goes on with the best.

Every search takes a branch of a session, of `LLM` or of a server's (`pagedec.client`), leaves it as it is, and returns
new ones. Read `scorers` first, then
`best_of_n`, `self_consistency`, `step_beam_search` and `mcts`: each is a page, to be used or to begin one's own from.
"""

from pagedec.search.best_of_n import best_of_n
from pagedec.search.mcts import Node, mcts
from pagedec.search.scorers import Found, ModelJudge, Scorer
from pagedec.search.self_consistency import Vote, self_consistency
from pagedec.search.step_beam_search import step_beam_search

__all__ = [
    "Found",
    "ModelJudge",
    "Node",
    "Scorer",
    "Vote",
    "best_of_n",
    "mcts",
    "self_consistency",
    "step_beam_search",
]
