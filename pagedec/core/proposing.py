"""What a request's decoder asks in a step."""

from __future__ import annotations

from pagedec.core.checks import DECODERS_CODE, check_queries
from pagedec.core.protocol import Query
from pagedec.core.request import Request
from pagedec.errors import PagedecError, RequestError, told


def propose(request: Request, room: int, vocab_size: int) -> list[Query]:
    """What a request's decoder asks; its mistakes are the request's, by name."""
    try:
        with DECODERS_CODE:
            queries = request.decoder.propose(request.branches, room)
        check_queries(queries, request.branches, request.decoder, vocab_size)
    except PagedecError as error:
        raise RequestError(request.id, f"its decoder cannot propose: {error}") from error
    except Exception as error:
        raise RequestError(request.id, f"its decoder cannot propose: {told(error)}") from error
    return list(queries)
