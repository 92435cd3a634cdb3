"""What `import pagedec` offers: vLLM's names in vLLM's places, listed without loading what is heavy, and typed for
checkers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pagedec
from pagedec.errors import AbsentFeature

LAZY = ("LLM", "AsyncLLM")


def in_a_new_process(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_names_are_listed_and_typed_prompts_made_without_torch() -> None:
    program = (
        "import pagedec, sys\n"
        "print(sorted(set(pagedec.__all__) - set(dir(pagedec))))\n"
        "from pagedec import RequestOutput, SamplingParams, TextPrompt, TokensPrompt\n"
        "import pagedec.inputs, pagedec.outputs, pagedec.sampling_params\n"
        "print('torch' in sys.modules, 'tokenizers' in sys.modules)"
    )
    assert in_a_new_process(program).splitlines() == ["[]", "False False"]


@pytest.mark.parametrize("name", pagedec.__all__)
def test_every_name_is_there(name: str) -> None:
    assert name in dir(pagedec) and getattr(pagedec, name) is not None


def test_unknown_names_are_said_as_python_says_them() -> None:
    with pytest.raises(AttributeError, match="^module 'pagedec' has no attribute 'LLMM'$"):
        _ = pagedec.LLMM


@pytest.mark.parametrize("name", pagedec.ABSENT_NAMES)
def test_names_of_vllm_that_there_are_not_are_said_with_what_there_is(name: str) -> None:
    """Whichever way they are looked for."""
    instead = pagedec.ABSENT_NAMES[name]
    with pytest.raises(ImportError) as caught:
        exec(f"from pagedec import SamplingParams, {name}")
    assert str(caught.value) == f"cannot import name {name!r} from 'pagedec': {instead}"
    assert not hasattr(pagedec, name) and getattr(pagedec, name, 3) == 3 and name not in dir(pagedec)
    with pytest.raises(AbsentFeature, match=f"^{name} is not available in this version: "):
        getattr(pagedec, name)


def test_a_name_that_nobody_knows_is_imported_as_python_says_it() -> None:
    with pytest.raises(ImportError, match=r"^cannot import name 'LLMM' from 'pagedec' \("):
        exec("from pagedec import LLMM")


def test_the_modules_of_vllm_are_where_scripts_look_for_them() -> None:
    from pagedec import inputs, outputs, sampling_params

    assert sampling_params.SamplingParams is pagedec.SamplingParams
    assert sampling_params.RequestOutputKind is pagedec.RequestOutputKind
    assert (inputs.TextPrompt, inputs.TokensPrompt) == (pagedec.TextPrompt, pagedec.TokensPrompt)
    assert inputs.PromptType is inputs.Prompt is pagedec.PromptType
    assert (outputs.RequestOutput, outputs.CompletionOutput) == (pagedec.RequestOutput, pagedec.CompletionOutput)
    assert sampling_params.BeamSearchParams is pagedec.BeamSearchParams
    assert (outputs.BeamSearchOutput, outputs.BeamSearchSequence) == (
        pagedec.BeamSearchOutput,
        pagedec.BeamSearchSequence,
    )
    assert sampling_params.StructuredOutputsParams is pagedec.StructuredOutputsParams


@pytest.mark.long
def test_checkers_read_the_package_s_types(tmp_path: Path) -> None:
    """A checker outside of the checkout takes the package for typed, and knows the names that are loaded late. It is
    spared torch, half a minute of work that says nothing of ours."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        from pagedec import LLM, AsyncLLM, SamplingParams, TextPrompt
        from pagedec.inputs import PromptType

        prompts: list[PromptType] = ["a", [1, 2], TextPrompt(prompt="b"), {"prompt_token_ids": [3]}]
        reveal_type(LLM().generate(prompts, SamplingParams(n=2), use_tqdm=False)[0].outputs[0].text)
        reveal_type(AsyncLLM)
        """)
    )
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n[mypy-torch.*,transformers.*,ray.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    told = [line.partition(": note: ")[2] for line in done.stdout.splitlines() if ": note: " in line]
    assert told[0] == 'Revealed type is "str"' and told[1].endswith('pagedec.llm.async_llm.AsyncLLM"'), done.stdout
    assert "py.typed" not in done.stdout


@pytest.mark.sampled(2)
@pytest.mark.parametrize("before", ["enable", "disable"])
def test_importing_leaves_the_collector_as_it_was(before: str) -> None:
    """While torch is imported nothing is looked at, and afterwards what came with it counts as old."""
    program = (
        f"import gc; gc.collect(); gc.{before}(); seen = []\n"
        "def note(phase, _): phase == 'start' and seen.append(len(gc.get_objects(generation=0)))\n"
        "gc.callbacks.append(note)\n"
        "import pagedec.runtime.torch_first, sys; assert 'torch' in sys.modules\n"
        "gc.callbacks.clear(); old = len(gc.get_objects(generation=2))\n"
        "print(gc.isenabled(), old > 100_000, max(seen, default=0) < 10_000)"
    )
    assert in_a_new_process(program) == f"{before == 'enable'} {before == 'enable'} True"


def test_names_are_listed_before_and_after_they_are_used_and_importing_thaws_nothing_that_was_frozen() -> None:
    """As programs do that fork after they have loaded what they need."""
    program = (
        "import gc, sys; gc.freeze(); frozen = gc.get_freeze_count()\n"
        "import pagedec; a = dir(pagedec); assert 'torch' not in sys.modules\n"
        "pagedec.LLM; print(a == sorted(a), set(a) <= set(dir(pagedec)), 'torch' in sys.modules)\n"
        "print(gc.get_freeze_count() > 0.9 * frozen > 0, gc.isenabled())"
    )
    assert in_a_new_process(program).splitlines() == ["True True True", "True True"]
