"""Where the long comparison finds its prompts."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--prompts", default=None, help='file of prompts for the long comparison, lines of {"turns": [text]}'
    )
