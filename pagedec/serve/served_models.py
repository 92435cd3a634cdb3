"""What requests may name as their model: the base model, and its adapters."""

from __future__ import annotations

import os
from collections.abc import Callable

from pagedec.errors import InvalidArgument, ModelFileError, NotFound, Shown
from pagedec.llm.async_llm import AsyncLLM
from pagedec.llm.front import renamed
from pagedec.llm.loras import KnownLora, Loras
from pagedec.lora.request import FILES, read_named
from pagedec.serve.server_config import ServerConfig
from pagedec.serve.statuses import Refusal

MOST_NAME = 200
"""Characters of an adapter's name: logs, metrics and traces have it."""
MOST_PATH = 4096
"""Bytes of an adapter's path: as many as a system takes."""


class ServedModels:
    """A model and its adapters by their names."""

    def __init__(self, base: str, loras: Loras) -> None:
        self.base, self._loras = base, loras
        self.unloaded: Callable[[str], None] | None = None
        """Is told the name of each that was unloaded, in the thread that has unloaded it."""

    @property
    def adapters(self) -> list[str]:
        """In the order in which they were loaded."""
        return [lora.lora_name for lora in self._loras.requests]

    @property
    def names(self) -> list[str]:
        """Of all that there are, the base model first."""
        return [self.base, *self.adapters]

    def check(self, name: str) -> None:
        """Raise `NotFound` for what is not served; none named is the base model."""
        if name and name not in (names := self.names):
            raise NotFound("model", name, f"known are {', '.join(names)}")

    def chosen(self, name: str) -> KnownLora | None:
        """The adapter of this name; None: it is the base model. Who has it goes through it, also where it is unloaded
        meanwhile. Raises `NotFound`."""
        self.check(name)
        return None if name in ("", self.base) else self._loras.named(name)

    def load(self, name: str, path: str) -> None:
        """Let requests name an adapter. Takes as long as its files. Raises `InvalidArgument` about name or path, and
        `ModelFileError`."""
        if not name or len(name) > MOST_NAME or not name.isprintable():
            shown = Shown(f"of {len(name)} characters") if len(name) > MOST_NAME else name
            raise InvalidArgument("name", shown, f"must be 1 to {MOST_NAME} characters that can be printed")
        if name == self.base:
            raise InvalidArgument("name", name, "must be another name than the model's")
        with renamed("lora_name", "name"), renamed("lora_path", "path"):
            self._loras.load(name, path)

    def unload(self, name: str) -> None:
        """Let no more requests name an adapter; what has chosen it goes on. Raises `NotFound`."""
        self._loras.remove(self._loras.named(name).lora_int_id)
        if self.unloaded is not None:
            self.unloaded(name)


def served_models(llm: AsyncLLM, config: ServerConfig) -> ServedModels:
    """Those of a model that was loaded."""
    return ServedModels(config.served_model_name or llm.config.model.model, llm.loras)


def check_loras(config: ServerConfig) -> None:
    """Raise `InvalidArgument` for what can be seen to be wrong before there is a model."""
    read_named(config.lora)
    if config.lora_dir is not None and not os.path.isdir(os.path.expanduser(config.lora_dir)):
        raise InvalidArgument("lora_dir", config.lora_dir, "must be a folder that is there")


def load_loras(llm: AsyncLLM, config: ServerConfig) -> None:
    """Load the adapters that there are from the start. Raises `InvalidArgument` and `ModelFileError`, which say which
    text of the option it is."""
    models = served_models(llm, config)
    for text, (name, path) in zip(config.lora, read_named(config.lora).items(), strict=True):
        try:
            models.load(name, path)
        except ModelFileError as error:
            raise ModelFileError(error.path, str(error), "lora", text) from error
        except InvalidArgument as error:
            raise InvalidArgument("lora", text, str(error)) from error


def path_below(folder: str | None, path: str) -> str:
    """A path that somebody names who may load what is below a folder. Asks the file system for each part. Raises
    `Refusal` where there is no such folder, and `InvalidArgument`."""
    if folder is None:
        raise Refusal("FAILED_PRECONDITION", "NO_LORA_DIR", "the server was started without lora_dir")
    if (size := len(path.encode())) > MOST_PATH:
        raise InvalidArgument("path", Shown(f"of {size} bytes"), f"must be of at most {MOST_PATH} bytes")
    if not path or "\0" in path:
        raise InvalidArgument("path", path, f"must be the path of {FILES}")
    root = os.path.realpath(os.path.expanduser(folder))
    found = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath((root, found)) != root:
        raise InvalidArgument("path", path, "must be below the server's lora_dir, links followed")
    return found
