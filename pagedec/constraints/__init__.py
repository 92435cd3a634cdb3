"""What answers may be: callables, tries of token sequences, and grammars. All are `core.constraint.Constraint`s, so
every decoder has them.

Read `function.py`, the smallest, then `trie.py`, then `grammar.py`; `chosen.py` makes a request's of its parameters.
"""

from pagedec.constraints.chosen import constraint_of
from pagedec.constraints.grammar import Grammars
from pagedec.constraints.trie import TokenTrie

__all__ = ["Grammars", "TokenTrie", "constraint_of"]
