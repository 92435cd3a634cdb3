"""Requests that go on where another server, or this one before it was started anew, was interrupted: the tokens that
their answers had are taken for drawn, and what follows is as if nothing had happened.

The prompt is evaluated first, as ever. The generation behind it has, in place of what was drawn there, all that was
told before; so stops, constraints, lengths and reports are fed with it as with tokens that were just drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedec.core.constraint import Forbidden, cut_within
from pagedec.core.limits import check_token_ids
from pagedec.core.logprobs import TokenLogprobs
from pagedec.core.protocol import Answer, Child, Query, Verdict
from pagedec.errors import InvalidArgument, PagedecError, Shown, counted, told

if TYPE_CHECKING:
    from pagedec.core.request import Request


@dataclass(frozen=True, slots=True)
class ToldAnswer:
    """What was told of one answer: its tokens, how many characters of text (Unicode code points), and the
    log-probability of each token, where they are reported."""

    token_ids: tuple[int, ...] = ()
    num_characters: int = 0
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Resume:
    """What was told of a request's answers, in the order of their ranks; of those that are left out, nothing."""

    answers: tuple[ToldAnswer, ...] = ()


def check_resume(resume: Resume, num_answers: int, longest: int, vocab_size: int, reports: bool) -> None:
    """Raise `InvalidArgument` for what a request of so many answers, none longer than `longest`, cannot have told.
    `reports`: of each token."""
    if len(resume.answers) > num_answers:
        limit = f"must be at most {num_answers}: the request has no more answers"
        raise InvalidArgument("resume.answers", Shown(f"{len(resume.answers)} of them"), limit)
    for i, answer in enumerate(resume.answers):
        field, count = f"resume.answers[{i}]", len(answer.token_ids)
        if count > longest:
            limit = f"must be at most {longest} tokens long: the answer ends there"
            raise InvalidArgument(f"{field}.token_ids", Shown(counted(count, "token")), limit)
        check_token_ids(f"{field}.token_ids", answer.token_ids, vocab_size)
        if answer.logprobs or reports:
            if len(answer.logprobs) != count:
                limit = f"must be {count}, one for each token" if reports else f"must be {count}, or none"
                raise InvalidArgument(f"{field}.logprobs", Shown(f"{len(answer.logprobs)} of them"), limit)
            odd = next((number for number in answer.logprobs if math.isnan(number)), None)
            if odd is not None:
                raise InvalidArgument(f"{field}.logprobs", odd, "must be numbers")


def begin_resumed(request: Request, resume: Resume) -> None:
    """Have a request that was just admitted go on behind what was told of it. Raises `InvalidArgument` for tokens that
    its answers cannot have: forbidden by its constraint, or behind an answer's end."""
    stop, state = request.branches[0].stop_state, request.branches[0].constraint_state
    room = request.limit - request.prompt_length
    for i, answer in enumerate(resume.answers):
        field, given = f"resume.answers[{i}].token_ids", answer.token_ids
        try:
            if request.constraint is None:
                cut = request.stopping.cut(stop, given, room)
            else:
                cut, _ = cut_within(request.constraint, request.stopping, stop, state, given, room)
        except PagedecError:
            raise
        except Exception as error:  # of somebody's own constraint, too
            problem = str(error) if isinstance(error, Forbidden) else told(error)
            raise InvalidArgument(field, Shown(counted(len(given), "token")), problem) from error
        if len(cut.tokens) < len(given):
            limit = f"must have nothing behind its end: the answer ends with token {len(cut.tokens)}"
            raise InvalidArgument(field, Shown(counted(len(given), "token")), limit)
    if any(answer.token_ids for answer in resume.answers):
        request.resume = resume


def resumed(request: Request, query: Query, answer: Answer) -> Verdict:
    """The generation behind the prompt: each answer with what was told of it, or with what was drawn."""
    assert request.resume is not None
    known, request.resume = request.resume.answers, None
    root, drawn = query.branch, answer.values[0]
    live = []
    for i, stream in enumerate(root.state):
        one = known[stream] if stream < len(known) else ToldAnswer()
        if one.token_ids:
            _note_reports(request, root.tip, one)
        live.append(Child(root, one.token_ids or (int(drawn[0, i]),), state=(stream,)))
    return Verdict(tuple(live))


def _note_reports(request: Request, tip: int, answer: ToldAnswer) -> None:
    """Keep what answers' sums need of the tokens that were told; the rest of their reports was told, too."""
    reports, history = request.reports, request.history
    if reports is None or not answer.logprobs:
        return
    for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True):
        reports.edges.setdefault(tip << 32 | token, TokenLogprobs(token, logprob, 0))
        tip = history.append_one(tip, token)
