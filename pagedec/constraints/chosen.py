"""From a request's parameters to its constraint."""

from __future__ import annotations

from pagedec.constraints.function import FunctionConstraint
from pagedec.constraints.grammar import Grammars
from pagedec.constraints.trie import TokenTrie, TrieConstraint
from pagedec.core.constraint import Constraint
from pagedec.core.stopping import Stopping
from pagedec.errors import InvalidArgument, counted
from pagedec.params import RequestParams


def constraint_of(
    params: RequestParams, stopping: Stopping, vocab_size: int, grammars: Grammars | None, room: int
) -> Constraint | None:
    """What `params` allow; None: anything. `stopping` has the tokens that end an answer, which may have `room` in all.
    Raises `InvalidArgument` for a trie that does not fit the model or the room, and for grammars without a tokenizer or
    that nobody can carry out."""
    if params.allowed_tokens_fn is not None:
        return FunctionConstraint(params.allowed_tokens_fn, vocab_size)
    if params.token_trie is not None:
        trie = params.token_trie
        assert isinstance(trie, TokenTrie)
        _check_room(trie, params.max_tokens, room)
        return _of_trie(trie, stopping, vocab_size)
    asked = params.structured_outputs
    if asked is None:
        return None
    if grammars is None:
        raise InvalidArgument("structured_outputs", asked, "must be None: the engine has no tokenizer")
    return grammars.constraint(asked, stopping.ends)


def _check_room(trie: TokenTrie, max_tokens: int | None, room: int) -> None:
    if room >= trie.shortest:
        return
    least = f"the shortest sequence of token_trie has {counted(trie.shortest, 'token')}"
    if max_tokens is not None and max_tokens <= room:
        raise InvalidArgument("max_tokens", max_tokens, f"must be {trie.shortest} or more: {least}")
    raise InvalidArgument("token_trie", trie, f"must fit behind the prompt, which leaves {room}: {least}")


def _of_trie(trie: TokenTrie, stopping: Stopping, vocab_size: int) -> TrieConstraint:
    if trie.max_token >= vocab_size:
        limit = f"must be of token ids from 0 to {vocab_size - 1}; it has token {trie.max_token}"
        raise InvalidArgument("token_trie", trie, limit)
    if trie.splits and not stopping.ends:
        limit = "must have no sequence that begins another one: no token ends an answer here, so it could not be chosen"
        raise InvalidArgument("token_trie", trie, limit)
    return TrieConstraint(trie, stopping.ends)
