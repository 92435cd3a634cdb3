"""What loading leaves in memory, and what the KV pool takes: read from /proc in processes of their own."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from pagedec import LLM
from pagedec.errors import InvalidArgument
from pagedec.kernels import host
from pagedec.kernels.arena import zeros
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.kernels.library import available_isas
from tests.models.gguf_files import write_model

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists() or not available_isas(), reason="needs Linux and the compiled kernels"
)
MIB = 1 << 20
HIDDEN, INNER, VOCAB, LAYERS, KV_WIDTH = 512, 2048, 40_000, 8, 256
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
EMBEDDING = 2 * HIDDEN * VOCAB
PACKED = EMBEDDING + 2 * LAYERS * HIDDEN * (2 * HIDDEN + 2 * KV_WIDTH + 3 * INNER)
"""Bytes in bfloat16: the output matrix and all layers, 101 MiB; the embedding beside it has 39."""
LIBRARIES = 24 * MIB
"""Of code that is mapped when first used."""
REST = 56 * MIB
"""All that is neither weights nor code: rotary tables, the pool's token ids, a step's buffers, Python's own."""
MEASURE = """
import json, sys
from pathlib import Path
import pagedec.llm
from pagedec import LLM, SamplingParams
def now():
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(value.split()[0]) << 10 for name, value in lines if name in ("VmRSS", "VmHWM", "RssFile")}
before = now()
llm = LLM(sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, **json.loads(sys.argv[2]))
found = [before, now()]
for length in json.loads(sys.argv[3]):
    llm.generate([list(range(3, 3 + length))], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    found.append(now())
print(json.dumps(found))
"""


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (KV_WIDTH, HIDDEN) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return {name: torch.full(shape, 0.01, dtype=dtype) for name, shape in shapes.items()}


def save(directory: Path, num_files: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tensors, places = weights(dtype), {}
    names = sorted(tensors)
    for i in range(num_files):
        file = "model.safetensors" if num_files == 1 else f"model-{i}.safetensors"
        part = names[i::num_files]
        save_file({name: tensors[name] for name in part}, directory / file)
        places |= dict.fromkeys(part, file)
    if num_files > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


class Models(dict[str, Path]):
    """One model in each form that weights come in, made where somebody asks for it."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def __missing__(self, form: str) -> Path:
        if form == "sharded":
            made = save(self.top / form, 5)
        elif form.endswith("gguf"):
            kind = GGMLQuantizationType.F16 if form == "gguf" else GGMLQuantizationType.Q8_0
            made = write_model(self["halves"], self.top / f"{form.split()[0]}.gguf", kind)
        else:
            made = save(self.top / form, 1, torch.float16 if form == "halves" else torch.bfloat16)
        self[form] = made
        return made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def measure(model: Path, cache: Path, lengths: tuple[int, ...] = (), **arguments: Any) -> list[dict[str, int]]:
    """Before loading, after it, and after prompts of these lengths."""
    environment = {**os.environ, "PAGEDEC_CACHE": str(cache), "PAGEDEC_DEBUG": "0"}
    settings = json.dumps({"num_blocks": 4096, **arguments})
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(model), settings, json.dumps(lengths)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, int]] = json.loads(done.stdout)
    return found


def grown(before: dict[str, int], after: dict[str, int], name: str) -> int:
    return after[name] - before[name]


@pytest.mark.long
@pytest.mark.parametrize("form", ["safetensors", "sharded", "gguf", "quantised gguf"])
def test_weights_are_in_memory_once(form: str, models: Models, tmp_path: Path) -> None:
    """Packed, and nothing of the file beside it; and loading has needed little more."""
    if form == "quantised gguf":
        measure(models[form], tmp_path)  # converts
    before, loaded = measure(models[form], tmp_path)
    kept = PACKED + (EMBEDDING if form == "gguf" else 0)  # in the file's own numbers it is read in place
    assert grown(before, loaded, "RssFile") < LIBRARIES
    assert kept < grown(before, loaded, "VmRSS") < kept + LIBRARIES + REST
    assert loaded["VmHWM"] < loaded["VmRSS"] + 128 * MIB


@pytest.mark.long
def test_int8_weights_are_in_memory_once(models: Models, tmp_path: Path) -> None:
    before, loaded = measure(models["safetensors"], tmp_path, quantization="int8")
    assert grown(before, loaded, "RssFile") < LIBRARIES
    assert PACKED / 2 < grown(before, loaded, "VmRSS") < PACKED / 2 + LIBRARIES + REST


@pytest.mark.long
def test_the_pool_takes_memory_as_blocks_are_used(models: Models, tmp_path: Path) -> None:
    """A pool of 8 GiB costs what its used blocks hold."""
    block = 2 * 2 * LAYERS * 16 * KV_WIDTH
    pool = (8 << 30) // block
    before, loaded, short, long = measure(models["safetensors"], tmp_path, (64, 2048), num_blocks=pool)
    assert grown(before, loaded, "VmRSS") < PACKED + LIBRARIES + REST
    assert grown(loaded, short, "VmRSS") < 4 * block + 48 * MIB
    assert 128 * block < grown(loaded, long, "VmRSS") < 128 * block + 64 * MIB


STARVED = """
import resource, sys, threading, warnings
from pathlib import Path
import pagedec.llm
from pagedec import LLM
from pagedec.errors import InvalidArgument
LLM(sys.argv[1], skip_tokenizer_init=True, num_blocks=2)  # all libraries are loaded, all threads run
for thread in threading.enumerate():
    if thread.name == "pagedec-huge-pages":
        thread.join()  # it holds a mapping as long as it moves a page of it
used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), -1))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        LLM(sys.argv[1], dtype="float32", skip_tokenizer_init=True, **eval(sys.argv[3]))
    except InvalidArgument as error:
        print(error)
print(*(f"{one.category.__name__}: {one.message}" for one in caught), sep="\\n")
"""


def starved(model: Path, num_bytes: int, **arguments: object) -> list[str]:
    """What is said where so much address space is left."""
    done = subprocess.run(
        [sys.executable, "-c", STARVED, str(model), str(num_bytes), repr(arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_weights_that_do_not_fit_are_told(models: Models) -> None:
    error, warning = starved(models["safetensors"], 150 * MIB, num_blocks=2)
    size = "has weights of 276 MiB, which this machine does not give; 150 MiB available (limit of "
    assert error.startswith(f"model is '{models['safetensors']}': {size}")
    assert warning.startswith(
        f"WeightsWarning: the weights of {models['safetensors']} take 276 MiB, more than the 150 MiB"
    )
    assert warning.endswith("the system may end the process; quantization int8 takes a byte a weight, int4 half of one")


def test_a_pool_that_does_not_fit_is_told(models: Models) -> None:
    error, *_ = starved(models["safetensors"], 1024 * MIB, kv_cache_memory="4GiB")
    assert error.startswith("kv_cache_memory is 4294967296: must be less: the KV pool would take 4.00 GiB, which this ")


@pytest.mark.long
def test_a_pool_that_fits_is_not(models: Models) -> None:
    assert not [line for line in starved(models["safetensors"], 1024 * MIB) if "must be less" in line]


def test_the_pool_is_not_shared_with_a_forked_child() -> None:
    """What the child writes would be the parent's KV."""
    pool = zeros((4096,), torch.int32)
    child = os.fork()
    if child == 0:
        pool.fill_(7)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(pool.sum()) == 0


def test_a_large_step_takes_memory_as_its_rows_are_used() -> None:
    """Of a mixture of experts each row stands there several times."""

    def resident() -> int:
        return os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])

    before = resident()
    rows = ReferenceBackend(torch.float32).zeros((1 << 18, 1 << 10), torch.float32)
    rows[:64] = 1.0
    assert resident() - before < 64 * MIB
    assert rows[:65, 5].sum() == 64 and rows[-1, -1] == 0


def test_a_step_for_which_there_is_no_memory_is_told(tiny: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if len(shape) == 2:  # of rows, not of a cache
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return zeros(shape, dtype)

    monkeypatch.setattr(host, "zeros", refuse)
    monkeypatch.setattr(host, "LARGE", 1 << 16)
    with pytest.raises(InvalidArgument) as caught:
        tiny(num_blocks=8, max_num_batched_tokens=300)
    told = (
        "max_num_batched_tokens is 300: must be less, or the KV pool: this machine has no room for a step beside 0 MiB"
    )
    assert str(caught.value).startswith(f"{told} of KV: 76800 bytes are not given ([Errno 12] ")
