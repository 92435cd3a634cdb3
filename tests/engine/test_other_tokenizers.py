"""Tokenizers from elsewhere: of another model, with tokens that the model does not know, or none at all."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from string import ascii_lowercase

import pytest
import tokenizers

from pagedec import LLM, SamplingParams, TokenizerWarning
from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.executor.inline import InlineExecutor
from tests.models.checkpoints import VOCAB

GREEDY = SamplingParams(temperature=0, max_tokens=4)
PROMPT = [5, 6, 7]


@pytest.fixture
def others_tokenizer(tmp_path: Path) -> Path:
    """One that knows a token more than the model: letters, and tokens that were added to them."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(ascii_lowercase)}, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([f"<{i}>" for i in range(len(ascii_lowercase), VOCAB + 1)])
    place = tmp_path / "tokenizer"
    place.mkdir()
    made.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"<{VOCAB}>"}))
    return place


def test_end_tokens_that_the_model_cannot_write_end_nothing(tiny_path: Path, others_tokenizer: Path) -> None:
    """A tokenizer may know more tokens than the model's vocabulary has; banning them must not reach behind the logits.
    What it knows more is told when it is loaded."""
    said = f"the tokenizer {others_tokenizer / 'tokenizer.json'} has {VOCAB + 1} tokens, more than the {VOCAB} of the "
    said += f"model {tiny_path}: a prompt is refused that has <{VOCAB}>"
    with pytest.warns(TokenizerWarning, match=f"^{re.escape(said)}$") as caught:
        llm = LLM(str(tiny_path), tokenizer=str(others_tokenizer), num_blocks=16, dtype="float32")
    assert caught[0].filename == __file__ and llm.get_tokenizer().eos_token_ids == (VOCAB,)
    [output] = llm.generate([PROMPT], SamplingParams(temperature=0, min_tokens=6, max_tokens=6), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6 and llm.engine.limits.eos_token_ids == (2,)
    with pytest.raises(InvalidArgument, match=f"^prompts\\[0\\] is {VOCAB}: token ids must be from 0 to {VOCAB - 1}$"):
        llm.generate(f"a<{VOCAB}>", GREEDY)
    llm.close()


@pytest.mark.parametrize("template", ["", f"{{{{ messages }}}}<{VOCAB}>"], ids=["not used", "written"])
def test_added_tokens_matter_where_they_are_used(tiny_path: Path, others_tokenizer: Path, template: str) -> None:
    """A text model's tokenizer may have tokens for images, which nobody misses."""
    config = {"eos_token": "<30>"} | ({"chat_template": template} if template else {})
    (others_tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LLM(str(tiny_path), tokenizer=str(others_tokenizer), num_blocks=16, dtype="float32").close()
    assert sum(warning.category is TokenizerWarning for warning in caught) == bool(template)


def test_another_model_s_tokenizer(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, only texts told so whose ids were too large, and all others were read as something else."""
    stopped: list[InlineExecutor] = []
    monkeypatch.setattr(InlineExecutor, "stop", lambda executor: stopped.append(executor))
    with pytest.raises(ModelFileError) as caught:
        LLM(str(tiny_path), tokenizer="smollm2", num_blocks=16, dtype="float32")
    assert caught.value.problem == (
        f"has 49152 tokens, more than the {VOCAB} of the model {tiny_path}: it is another model's; name the model's "
        "own with tokenizer; or set skip_tokenizer_init=True and pass token ids"
    )
    assert len(stopped) == 1


@pytest.mark.filterwarnings("ignore::pagedec.TokenizerWarning")
@pytest.mark.parametrize("is_none", [True, False], ids=["none", "another"])
def test_the_models_own_ends_need_no_tokenizer_of_its_own(
    tiny_path: Path, tmp_path: Path, others_tokenizer: Path, is_none: bool
) -> None:
    """generation_config.json names more end tokens than config.json, and a tokenizer from elsewhere knows of
    neither."""
    settings = {"skip_tokenizer_init": True} if is_none else {"tokenizer": str(others_tokenizer)}
    copy = Path(shutil.copytree(tiny_path, tmp_path / "model"))
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    with LLM(str(copy), num_blocks=16, dtype="float32", **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, logit_bias={5: 100})
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
        [answer] = output.outputs
        assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == ([5], "stop", None)
