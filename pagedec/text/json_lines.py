"""Records as JSON, one a line, that every reader of JSON takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_line(value: Any) -> str:
    """JSON on one line, without its end. NaN and infinities, as the log-probabilities of a model whose weights have a
    NaN are, become null: Python would write names that are not JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
