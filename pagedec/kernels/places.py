"""Where the libraries of compiled kernels are."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from pathlib import Path

from pagedec import environment


def library_directories() -> list[Path]:
    """Return where libraries are looked for, in order: PAGEDEC_LIB_DIR alone, else the package's own lib."""
    forced = environment.read("PAGEDEC_LIB_DIR")
    if forced is not None:
        return [Path(forced)]
    return list(_own_directories())


@functools.cache
def _own_directories() -> tuple[Path, ...]:
    """Return the package's own, and where an editable install keeps its libraries, away from the sources."""
    own = Path(__file__).resolve().parents[1] / "lib"
    try:
        installed = Path(str(importlib.metadata.distribution("pagedec").locate_file("pagedec/lib"))).resolve()
    except importlib.metadata.PackageNotFoundError:
        return (own,)
    return (own,) if installed == own else (own, installed)


def library_paths(directory: Path | None) -> dict[str, Path]:
    """The libraries that are there: in a directory, or where they are looked for."""
    paths: dict[str, Path] = {}
    for place in [directory] if directory is not None else library_directories():
        for isa in (*environment.ISAS, *environment.EMULATED_ISAS, *environment.DEVICES):
            path = place / f"libpagedec_{isa}.so"
            if isa not in paths and path.is_file():
                paths[isa] = path.resolve()
    return paths


def nccl_path(library: Path) -> Path | None:
    """NCCL for the kernels of a library: PAGEDEC_NCCL, else what stands in for it beside the emulated device's, else
    that of the package which torch's CUDA builds need. None: the system knows."""
    forced = environment.read("PAGEDEC_NCCL")
    if forced is not None:
        return Path(forced)
    if library.name == f"libpagedec_{environment.EMULATED_DEVICE}.so":
        return library.with_name("libnccl_emulated.so")
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no package of NVIDIA's
        return None
    places = [] if found is None else list(found.submodule_search_locations or ())
    return next((path for place in places if (path := Path(place) / "lib" / "libnccl.so.2").is_file()), None)
