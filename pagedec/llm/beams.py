"""What `beam_search` gives, in vLLM's form."""

from __future__ import annotations

from pagedec.outputs import BeamSearchOutput, RequestOutput
from pagedec.params import BeamSearchParams
from pagedec.text.tokenizer import Tokenizer


def beam_output(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """One prompt's answers as whole sequences, the best first."""
    prompt = output.prompt
    if prompt is None and tokenizer is not None:
        prompt = tokenizer.decode(output.prompt_token_ids)
    return BeamSearchOutput.of(output, prompt if params.detokenize else None, params.include_stop_str_in_output)
