"""Decoders of one's own, for `CustomDecoder` to name."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from pagedec.decoders.registry import decoder_classes
from pagedec.errors import InvalidArgument

ENDING = ".py"
BUILT_IN = "pagedec."


def load_decoders(places: Sequence[str]) -> None:
    """Import files and modules that register decoders. Raises `InvalidArgument` for what cannot be imported,
    registers none, or is a file with the name of another module."""
    for place in places:
        if place.endswith(ENDING):
            _check_name(place)
        try:
            module = _of_file(place) if place.endswith(ENDING) else importlib.import_module(place)
        except Exception as error:  # somebody's own code may raise anything
            raise InvalidArgument("decoder", place, f"cannot be imported: {type(error).__name__}: {error}") from error
        if not _registers(module):
            raise InvalidArgument("decoder", place, "must register a decoder; it registers none")


def _check_name(place: str) -> None:
    """Raise `InvalidArgument` for a file by whose name others would no longer find their own module."""
    path = Path(place)
    known = importlib.machinery.PathFinder.find_spec(path.stem)
    is_other = known is not None and known.origin is not None and Path(known.origin).resolve() != path.resolve()
    if is_other or path.stem in sys.builtin_module_names:
        whose = "built in" if known is None else f"that of {known.origin}"
        raise InvalidArgument("decoder", place, f"must have a name of its own: the module {path.stem} is {whose}")


def _registers(module: ModuleType) -> bool:
    """It has defined a decoder, or one below it has, or it has imported one of another file. Those that there are
    anyway do not count: one's own may be derived of them."""
    held = {id(value) for value in vars(module).values()}
    for kind in decoder_classes():
        origin = kind.__module__
        if f"{origin}.".startswith(f"{module.__name__}."):
            return True
        if not origin.startswith(BUILT_IN) and held & {id(kind), id(sys.modules.get(origin))}:
            return True
    return False


def _of_file(place: str) -> ModuleType:
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError("there is no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module
