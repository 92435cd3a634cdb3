"""From a request's parameters to its constraint."""

from __future__ import annotations

from pagedec.constraints.function import FunctionConstraint
from pagedec.constraints.grammar import Grammars
from pagedec.constraints.trie import TokenTrie, TrieConstraint
from pagedec.core.constraint import Constraint
from pagedec.core.stopping import Stopping
from pagedec.errors import InvalidArgument
from pagedec.params import RequestParams


def constraint_of(
    params: RequestParams, stopping: Stopping, vocab_size: int, grammars: Grammars | None
) -> Constraint | None:
    """What `params` allow; None: anything. `stopping` has the tokens that end an answer. Raises `InvalidArgument` for a
    trie that does not fit the model, and for grammars without a tokenizer or that nobody can carry out."""
    if params.allowed_tokens_fn is not None:
        return FunctionConstraint(params.allowed_tokens_fn, vocab_size)
    if params.token_trie is not None:
        return _of_trie(params.token_trie, stopping, vocab_size)
    asked = params.structured_outputs
    if asked is None:
        return None
    if grammars is None:
        raise InvalidArgument("structured_outputs", asked, "must be None: the engine has no tokenizer")
    return grammars.constraint(asked, stopping.ends)


def _of_trie(trie: object, stopping: Stopping, vocab_size: int) -> TrieConstraint:
    if not isinstance(trie, TokenTrie):
        raise InvalidArgument("token_trie", trie, "must be a TokenTrie, or None")
    if trie.max_token >= vocab_size:
        limit = f"must be of token ids from 0 to {vocab_size - 1}; it has token {trie.max_token}"
        raise InvalidArgument("token_trie", trie, limit)
    if trie.splits and not stopping.ends:
        limit = "must have no sequence that begins another one: no token ends an answer here, so it could not be chosen"
        raise InvalidArgument("token_trie", trie, limit)
    return TrieConstraint(trie, stopping.ends)
