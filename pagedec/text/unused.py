"""What is given with a conversation of which its chat template shows nothing."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from pagedec.errors import UnusedWarning
from pagedec.text.budget import Budget, spending

BESIDES = ("tools", "documents")


def warn_of_unused(
    template: str, rendered: str, variables: Mapping[str, Any], render: Callable[[Mapping[str, Any]], str]
) -> None:
    """Warn, once in a process, of tools and of documents without which the text is the same. A template is rendered
    again for that by the first conversation that has them. `template`: its text; `rendered`: what `render` has made of
    it with `variables`."""
    for name in BESIDES:
        if not variables[name] or name in _tried(template):
            continue
        _tried(template).add(name)
        try:
            with spending(Budget()):
                is_unused = render({**variables, name: None}) == rendered
        except Exception:  # the template's own code fails without them: it looks at them
            continue
        if is_unused:
            problem = f"{name} change nothing: the chat template shows nothing of them"
            warnings.warn(problem, UnusedWarning, stacklevel=1)  # one place for all: else each is told of anew


@functools.lru_cache(maxsize=64)
def _tried(template: str) -> set[str]:
    """What this template was rendered without."""
    return set()
