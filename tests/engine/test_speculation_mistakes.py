"""What users of speculation mistype, and what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedec import LLM, BeamSearchParams, SamplingParams
from pagedec.cli.generate import summary
from pagedec.errors import InvalidArgument
from pagedec.fields import rules
from tests.engine.crowd import Tiny

REPEATED = [5, 6, 7] * 6


def told(act: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        act()
    return str(caught.value)


def test_a_table_whose_method_is_mistyped() -> None:
    message = told(lambda: SamplingParams(speculative={"methd": "ngram"}))
    assert message.startswith("speculative.methd is 'ngram': not a field of speculation; known are method, ")
    assert message.endswith("; did you mean method?")
    message = told(lambda: LLM("smollm2", speculative_config={"modle": "x"}))
    assert message.startswith("speculative_config.modle is 'x'") and message.endswith("; did you mean model?")


def test_names_of_the_engine_s_and_of_a_request_s() -> None:
    for kind in (SamplingParams, BeamSearchParams):
        message = told(lambda kind=kind: kind(max_tokens=4, speculative_config={"method": "ngram"}))
        assert message.endswith(f"not a field of {kind.__name__}; a request's own is named speculative")


def test_false_as_it_is_written_in_python() -> None:
    rule, _ = rules(SamplingParams)["speculative"]
    assert rule.parse("speculative", "False") is rule.parse("speculative", "false") is False
    assert told(lambda: rule.parse("speculative", "no")) == (
        "speculative is 'no': must be False, or a table of names and values, on the command line false, or a JSON "
        'object such as {"method": "ngram"}'
    )


def test_a_table_that_is_written_to(tiny: Tiny) -> None:
    """As if it had been given so."""
    params, llm = SamplingParams(max_tokens=4, speculative={"method": "ngram"}), tiny()
    assert isinstance(params.speculative, dict)
    params.speculative["candidates"] = 2
    message = told(lambda: llm.generate([REPEATED], params, use_tqdm=False))
    assert message.startswith("speculative.candidates is 2: not a field of the method ngram")
    params.speculative.update(method="n-gram")
    message = told(lambda: llm.generate([REPEATED], params, use_tqdm=False))
    assert message.startswith("speculative.method is 'n-gram': must be one of ngram, ")


def test_more_than_a_draft_model_s_context(tiny: Tiny, tiny_path: Path) -> None:
    own = {"model": str(tiny_path), "max_model_len": 16}
    limit = "must be less than 16, the draft model's context: it drafts 16 tokens ahead"
    asked = {"method": "draft_model", "num_speculative_tokens": 16}
    assert told(lambda: tiny(speculative_config={**own, **asked})) == (
        f"speculative_config.num_speculative_tokens is 16: {limit}"
    )
    llm = tiny(speculative_config={**own, "max_model_len": 8})  # nobody has said 14
    params = SamplingParams(temperature=0, max_tokens=4, speculative=asked)
    message = told(lambda: llm.generate([REPEATED], params, use_tqdm=False))
    assert message == f"speculative.num_speculative_tokens is 16: {limit.replace('16,', '8,')}"
    assert llm.generate([[5]], params.clone(speculative=None), use_tqdm=False)[0].finished


def test_beams_say_which_ways_they_have(tiny: Tiny) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, speculative={"method": "jacobi"})
    message = told(lambda: tiny().generate([REPEATED], params, use_tqdm=False))
    ways = (
        "must be None, False, or a table of draft_model, eagle3, lookahead or ngram: the decoder beam does not draft so"
    )
    assert message == f"speculative is {{'method': 'jacobi'}}: {ways}"


def test_what_drafts_is_shown(tiny: Tiny, tiny_path: Path) -> None:
    llm = tiny(speculative_config={"method": "ngram", "adaptive": False})
    assert repr(llm).endswith(", speculation ngram>")
    with_model = tiny(speculative_config={"model": str(tiny_path)})
    assert repr(with_model).endswith(f", speculation draft_model {tiny_path}>")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([REPEATED], params, use_tqdm=False)
    metrics = outputs[0].metrics
    assert metrics is not None and metrics.num_draft_tokens > 0
    counts = f"; {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted tokens accepted"
    assert summary(outputs, 1.0).endswith(f" 12.0 tokens/s{counts}")
    assert "whole" not in repr(llm.engine.stats.drafts)
    [plain] = llm.generate([REPEATED], params.clone(speculative=False), use_tqdm=False)
    assert summary([plain], 1.0).endswith(" 12.0 tokens/s")
