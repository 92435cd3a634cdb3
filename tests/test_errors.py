"""What errors say."""

from __future__ import annotations

import pickle

import pytest

from pagedec.errors import RequestError, RequestsFailed, counted, unless_failed


def test_numbers_of_things() -> None:
    told = [counted(number, noun) for noun in ("token", "branch", "KV block") for number in (0, 1, 2)]
    assert told[:3] == ["0 tokens", "1 token", "2 tokens"]
    assert told[3:] == ["0 branches", "1 branch", "2 branches", "0 KV blocks", "1 KV block", "2 KV blocks"]


def test_results_among_which_errors_stand() -> None:
    assert unless_failed([1, 2]) == [1, 2]
    error = RequestError("a", "cannot be carried out")
    with pytest.raises(
        RequestsFailed, match=r"^outputs\[1\], request 'a': cannot be carried out; and 1 more of 3"
    ) as all_:
        unless_failed([1, error, RequestError("b", "neither")])
    assert all_.value.outputs == [1, *all_.value.errors] and all_.value.errors[0] is error is all_.value.__cause__
    again = pickle.loads(pickle.dumps(all_.value))
    assert str(again) == str(all_.value) and again.outputs[1] is again.errors[0]
