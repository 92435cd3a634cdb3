"""How a request ends: by itself, or because its time is over, with the answers that it has by then."""

from __future__ import annotations

from pagedec.core.checks import DECODERS_CODE, check_verdict
from pagedec.core.protocol import Hypothesis, Verdict
from pagedec.core.request import Ended, Failed, Request
from pagedec.errors import InvalidArgument, PagedecError, RequestError, told


def conclusion(request: Request, vocab_size: int) -> list[Hypothesis]:
    """The answers of a request that ends now, besides those that are done: its decoder's, or each living branch as it
    stands. Raises `RequestError` for what the decoder does wrong; nothing has changed then."""
    decoder, branches = request.decoder, request.branches
    try:
        with DECODERS_CODE:
            answers = decoder.conclude(branches)
        if answers is None:
            answers = [
                Hypothesis(
                    branch.tip,
                    (),
                    decoder.rank(branch.state),
                    branch.score,
                    "length",
                    prompt_length=branch.prompt_length,
                )  # fmt: skip
                for branch in branches
            ]
        if not isinstance(answers, (list, tuple)):
            raise InvalidArgument("conclude", answers, "must return a list or a tuple of hypotheses, or None")
        check_verdict(
            request.history, branches, {}, Verdict(done=tuple(answers)), vocab_size, decoder, 0, request.limit
        )
    except PagedecError as error:
        raise RequestError(request.id, f"its decoder cannot conclude: {error}") from error
    except Exception as error:
        raise RequestError(request.id, f"its decoder cannot conclude: {told(error)}") from error
    return list(answers)


def ending(request: Request) -> Ended | Failed:
    """Let the decoder of a request that is over leave something to later ones; what is to be told of the request."""
    try:
        with DECODERS_CODE:
            request.decoder.ended(request.done)
    except Exception as error:
        if request.home is not None:
            request.home.end()
        failure = RequestError(request.id, f"its decoder cannot end: {told(error)}")
        failure.__cause__ = error
        return Failed(request, failure)
    return Ended(request)
