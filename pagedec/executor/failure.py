"""Errors on their way to another process, which may lack their class, or call it with other arguments."""

from __future__ import annotations

import pickle

from pagedec.errors import MAX_PROBLEM, cut, told


def pack_error(error: Exception) -> bytes:
    """The error, and what it says as text."""
    try:
        own = pickle.dumps(error)
        if type(pickle.loads(own)) is not type(error):
            own = b""
    except Exception:  # of its class, or of what it holds
        own = b""
    return pickle.dumps((own, cut(told(error), MAX_PROBLEM), getattr(error, "__notes__", [])))


def unpack_error(payload: bytes | memoryview) -> Exception:
    """The error that `pack_error` was given; a RuntimeError that says the same where it cannot be made here."""
    own, text, notes = pickle.loads(payload)
    try:
        error = pickle.loads(own)
        if isinstance(error, Exception):
            return error
    except Exception:  # a class of a module that was made there, or that is not installed here
        pass
    error = RuntimeError(text)
    for note in notes:
        error.add_note(note)
    return error
