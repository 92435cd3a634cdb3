"""The shape of the project, read from its sources: who may import whom, how long a file may be, who reads the
environment."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pagedec"
MAX_PYTHON_LINES = 400
MAX_CPP_LINES = 500
MAX_FUNCTION_LINES = 60
CPP_SUFFIXES = {".cpp", ".h", ".cu", ".cuh"}

LEAVES: dict[str, set[str]] = {
    "errors": set(),
    "environment": set(),
    "fields": {"errors"},
    "structured": {"errors", "fields"},
    "speculation": {"errors", "fields"},
    "params": {"errors", "fields", "inputs", "speculation", "structured"},
    "sampling_params": {"params", "structured"},
    "blame": {"errors", "params"},
    "certificates": {"errors"},
    "config": {"errors", "fields", "lora", "params", "speculation"},
    "inputs": {"errors", "fields", "lora"},
    "lora": {"errors", "fields"},
    "outputs": {"errors", "lora", "tree"},
}
"""They hold values and know nothing of the rest: each with what it imports."""
PURE = ("core", "constraints", "decoders")
"""They read no environment."""


def arrows_of(page: str) -> dict[str, set[str]]:
    """What each package imports, by the table of a page. The leaves are not in it."""
    section = page.partition("## Packages and arrows")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", section, re.MULTILINE)
    return {part: set(re.findall(r"`(\w+)`", imports)) for part, imports in rows}


ARROWS = arrows_of((ROOT / "docs/design.md").read_text(encoding="utf-8"))
ALLOWED = {
    **{part: imports | set(LEAVES) - ({"environment"} if part in PURE else set()) for part, imports in ARROWS.items()},
    **LEAVES,
    "__main__": {"cli"},
    "__init__": {"llm", "batch", "constraints", *LEAVES},
}
TORCH = {"runtime", "models", "kernels", "formats"}
EXEMPT = {
    ("cli/active.py", "torch"): "the doctor reports on torch itself",
    ("cli/active.py", "kernels"): "the doctor reports on the kernel libraries",
    ("cli/doctor.py", "torch"): "the doctor reports on torch itself",
    ("cli/doctor.py", "kernels"): "the doctor probes the fallback linear",
}
NOT_PURE = {"os", "socket", "subprocess", "threading", "time", "random", "torch", "asyncio", "multiprocessing", "io"}
"""What core and decoders may not import: with the same inputs they must always give the same plans."""
HOMONYMS = {
    "registry": "what there is by name: decoding algorithms in one, families of models in the other",
    "batch": "a package, and the command line's file for it",
    "serve": "a package, and the command line's file for it",
    "adapters": "which there are, a model's places for them, and their way there, a package's each",
    "lora": "what people say of adapters, their files, and their kernels, a package's each",
    "request": "one that runs, and vLLM's module of one that names an adapter",
    "Client": "who uses a server: as the server knows him in one, and what he asks with in the other",
}
"""Names that several modules or several classes share, and why they may."""
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if "v1" not in path.parts)


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: its first folder, or its own name at the top."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(tree: ast.Module, package: str = "pagedec") -> Iterator[str]:
    """Every module that a file imports anywhere in it, `from x import y` as both x and x.y. `package`: where relative
    imports start from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*kept, *filter(None, [base])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_imports(part: str, source: str, package: str = "pagedec") -> set[str]:
    """The parts of the package, and other modules, that a file of `part` imports against the arrows."""
    wrong = set()
    for name in imported(ast.parse(source), package):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "pagedec" and target in ALLOWED and target != part and target not in ALLOWED[part]:
            wrong.add(target)
        if top == "torch" and part not in TORCH:
            wrong.add("torch")
        if part in ("core", "decoders") and top in NOT_PURE:
            wrong.add(top)
    return wrong


def environment_access(source: str) -> list[int]:
    """Lines that touch the process's environment variables."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        is_attribute = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES
        is_import = isinstance(node, ast.ImportFrom) and any(alias.name in ENVIRONMENT_NAMES for alias in node.names)
        if is_attribute or is_import:
            lines.append(node.lineno)
    return sorted(lines)


def long_functions(source: str) -> list[str]:
    """Functions longer than the limit, decorators and docstring included."""
    return [
        f"{node.name} at line {node.lineno}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def nameless_todos(text: str) -> list[str]:
    """Notes to do something, without the name of who will: TODO(name) has one."""
    return [line.strip() for line in text.splitlines() if re.search(r"\b(TODO|FIXME|XXX)\b(?!\([a-z])", line)]


def module_of(path: Path) -> str:
    """The dotted name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if path.name == "__init__.py" else parts)


def homonyms(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Last names of modules, and names of their classes, that stand for more than one; a package's main module may bear
    its name.

    `sources`: of each module, by its dotted name.
    """
    found = defaultdict(list)
    for module, source in sources.items():
        *_, package, last = ("", *module.split("."))
        if last != package:
            found[last].append(module)
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{module}.{node.name}")
    return {name: places for name, places in found.items() if len(places) > 1}


def needed(node: ast.AST, package: str, modules: Collection[str]) -> Iterator[str]:
    """What a piece of a file imports, in functions too but for what only type checkers see. `from a import b` is of
    module a.b where there is one, else of a."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.orelse:
            yield from needed(child, package, modules)
    elif isinstance(node, ast.ImportFrom):
        base, *names = imported(ast.Module([node], []), package)
        yield from (name if name in modules else base for name in names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    else:
        for child in ast.iter_child_nodes(node):
            yield from needed(child, package, modules)


def import_graph(sources: Mapping[str, str], packages: Collection[str] = ()) -> dict[str, set[str]]:
    """Which modules each module imports; the packages around an imported one, whose `__init__` runs too, are left out.

    `sources` by dotted name; `packages`: those that are an `__init__`.
    """
    graph = {}
    for module, source in sources.items():
        package = module if module in packages else module.rpartition(".")[0]
        graph[module] = {name for name in needed(ast.parse(source), package, sources) if name in sources} - {module}
    return graph


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Sets of modules of which each leads to all others."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        reached[module], waiting = set(), list(graph[module])
        while waiting:
            other = waiting.pop()
            if other not in reached[module]:
                reached[module].add(other)
                waiting += graph[other]
    found = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]}
    return [list(circle) for circle in sorted(found)]


def test_every_part_has_its_arrows() -> None:
    assert {part_of(path) for path in python_files("pagedec")} <= set(ALLOWED)


def test_every_arrow_is_used() -> None:
    """The table has no more than there is."""
    used: dict[str, set[str]] = defaultdict(set)
    for path in python_files("pagedec"):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        names = imported(ast.parse(path.read_text(encoding="utf-8")), package)
        used[part_of(path)] |= {name.split(".")[1] for name in names if name.startswith("pagedec.")}
    unused = {part: imports - used[part] for part, imports in (ARROWS | LEAVES).items()}
    assert {part: imports for part, imports in unused.items() if imports} == {}


@pytest.mark.parametrize("path", python_files("pagedec"), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_import_arrows(path: Path) -> None:
    package = ".".join(path.parent.relative_to(ROOT).parts)
    name = path.relative_to(PACKAGE).as_posix()
    wrong = wrong_imports(part_of(path), path.read_text(encoding="utf-8"), package)
    assert sorted(target for target in wrong if (name, target) not in EXEMPT) == []


def test_environment_is_read_in_one_module() -> None:
    touched = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in python_files("pagedec")
        if path.name != "environment.py" and (lines := environment_access(path.read_text(encoding="utf-8")))
    }
    assert touched == {}
    in_cpp = [path.name for path in cpp_files() if "getenv" in path.read_text(encoding="utf-8")]
    assert in_cpp == []


def step_calls(source: str) -> list[int]:
    """Lines that have an engine make a step."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == "step" and ast.unparse(node.value).endswith("engine")
    ]


def test_one_loop_steps_the_engine() -> None:
    stepping = {module for module, source in package_sources().items() if step_calls(source)}
    assert stepping == {"pagedec.engine.loop"}


def test_lines_are_narrow() -> None:
    """A formatter holds Python's, but for what it is told to skip, and nobody C++'s."""
    files = [*python_files("pagedec", "tests", "benchmarks", "examples"), *cpp_files()]
    wide = [path.name for path in files if any(len(line) > 120 for line in path.read_text("utf-8").splitlines())]
    assert wide == []


def cpp_files() -> list[Path]:
    return sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in CPP_SUFFIXES)


def test_files_are_short() -> None:
    sizes = dict.fromkeys(python_files("pagedec", "tests", "benchmarks", "examples"), MAX_PYTHON_LINES)
    sizes |= dict.fromkeys(cpp_files(), MAX_CPP_LINES)
    long = {
        str(path.relative_to(ROOT)): lines
        for path, limit in sizes.items()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > limit
    }
    assert long == {}


def test_functions_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): found
        for path in python_files("pagedec", "tests", "benchmarks", "examples")
        if (found := long_functions(path.read_text(encoding="utf-8")))
    }
    assert long == {}


def test_notes_have_names() -> None:
    files = [*python_files("pagedec", "tests", "benchmarks", "examples"), *cpp_files(), ROOT / "Makefile"]
    nameless = {
        str(path.relative_to(ROOT)): found
        for path in files
        if path != Path(__file__).resolve() and (found := nameless_todos(path.read_text(encoding="utf-8")))
    }
    assert nameless == {}


def package_sources() -> dict[str, str]:
    return {module_of(path): path.read_text(encoding="utf-8") for path in python_files("pagedec")}


def test_names_mean_one_thing() -> None:
    found = homonyms(package_sources())
    assert {name: places for name, places in found.items() if name not in HOMONYMS} == {}
    assert sorted(HOMONYMS.keys() - found) == []


def test_the_core_is_read_file_by_file() -> None:
    page = ast.get_docstring(ast.parse((PACKAGE / "core" / "__init__.py").read_text(encoding="utf-8"))) or ""
    files = {path.stem for path in (PACKAGE / "core").glob("*.py")} - {"__init__"}
    assert sorted(re.findall(r"`(\w+)`", page)) == sorted(files)


def test_no_import_goes_in_circles() -> None:
    packages = {module_of(path) for path in python_files("pagedec") if path.name == "__init__.py"}
    assert circles(import_graph(package_sources(), packages)) == []


@pytest.mark.parametrize(
    ("part", "source", "wrong"),
    [
        ("core", "from pagedec.errors import InvariantError\nimport numpy", set()),
        ("core", "import torch.nn", {"torch"}),
        ("core", "def f():\n    import time", {"time"}),
        ("core", "from pagedec.engine.engine import Engine", {"engine"}),
        ("core", "from pagedec import engine", {"engine"}),
        ("decoders", "from ..runtime import runner", {"runtime"}),
        ("decoders", "from pagedec.core.protocol import Query", set()),
        ("text", "import torch", {"torch"}),
        ("models", "from pagedec.kernels.library import load", set()),
        ("models", "from pagedec.runtime.runner import ModelRunner", {"runtime"}),
        ("kernels", "from pagedec.models import packing", {"models"}),
        ("runtime", "if TYPE_CHECKING:\n    from pagedec.engine import engine", {"engine"}),
        ("params", "from pagedec.config import EngineConfig", {"config"}),
    ],
)
def test_the_arrow_check_sees(part: str, source: str, wrong: set[str]) -> None:
    assert wrong_imports(part, source, f"pagedec.{part}") == wrong


def test_the_other_checks_see() -> None:
    assert environment_access("import os\nx = os.environ['A']\ny = os.getenv('B')\nfrom os import environ") == [2, 3, 4]
    assert environment_access("import os\nos.cpu_count()") == []
    assert len(long_functions("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES)) == 1
    assert long_functions("def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)) == []
    assert step_calls("engine.step()\nself.llm.engine.step()\nfeeder.step()\nf(engine.step)") == [1, 2, 4]
    assert len(nameless_todos("# TODO later\n# TODO(ada): later\n# FIXME\n")) == 2
    homonymous = {"p.a.x": "class A: ...", "p.b.x": "class B: ...", "p.b": "class A: ...", "p.c": "", "p.c.c": ""}
    assert homonyms(homonymous) == {"x": ["p.a.x", "p.b.x"], "A": ["p.a.x.A", "p.b.A"]}
    cyclic = {
        "p": "", "p.a": "from p import b", "p.b": "def f():\n    from p.c import x", "p.c": "from . import a",
        "p.d": "if TYPE_CHECKING:\n    import p.e", "p.e": "import p.d, os", "p.f": "from p import x",
    }  # fmt: skip
    assert circles(import_graph(cyclic, {"p"})) == [["p.a", "p.b", "p.c"]]
    assert import_graph(cyclic, {"p"})["p.f"] == {"p"}
    assert circles(import_graph(cyclic | {"p": "from p.f import x"}, {"p"})) == [["p", "p.f"], ["p.a", "p.b", "p.c"]]
