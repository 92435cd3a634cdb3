"""Nothing in the package is there for nobody: what it defines it also uses, or somebody outside does, by a list with
reasons."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pagedec"
OUTSIDE = {
    "assemble": "engines over models that were made in memory",
    "apply_chat_template": "of transformers' tokenizers",
    "batch_decode": "of transformers' tokenizers",
    "convert_ids_to_tokens": "of transformers' tokenizers",
    "convert_tokens_to_ids": "of transformers' tokenizers",
    "retract": "for a conversation whose turn was given up",
    **dict.fromkeys(("check_health", "remove_lora", "list_loras", "pin_lora", "adapter_id"), "vLLM's name"),
    "allow_vnni": "for tests and benchmarks",
    "read_rate": "for benchmarks",
    "dot_rate": "for benchmarks",
    "run_batch": "what people import",
    "GenerateStage": "what people import",
    "greedy": "what people ask of parameters",
    "token_logprobs": "what people ask of a score",
    "eos_token": "of transformers' tokenizers",
    "bos_token": "of transformers' tokenizers",
    "pad_token": "of transformers' tokenizers",
    "pad_token_id": "of transformers' tokenizers",
    "all_special_ids": "of transformers' tokenizers",
    "num_chunks": "what a router remembers, for tests",
    "_lists": "C has their addresses",
    "_plans": "C has their addresses",
    "best_of_n": "what people import",
    "self_consistency": "what people import",
    "step_beam_search": "what people import",
    "mcts": "what people import",
    "intercept_service": "gRPC calls it",
    "describe": "prometheus_client calls it",
    "emit": "logging calls it",
    "get_stderr": "wsgiref calls it",
    "handle_error": "socketserver calls it",
    "_print_message": "argparse calls it",
    "log_message": "http.server calls it",
    "app": "Ray Serve calls it, by its import path",
    "ListSessions": "gRPC calls it",
    "record_replica_metadata": "Ray Serve calls it",
    "record_routing_stats": "Ray Serve calls it",
    "record_autoscaling_stats": "Ray Serve calls it",
    "PrefixRouter": "Ray Serve makes one, by its import path",
    "initialize_state": "Ray Serve calls it",
    "choose_replicas": "Ray Serve calls it",
    "on_request_routed": "Ray Serve calls it",
    "on_request_completed": "Ray Serve calls it",
}
TRANSPARENT = {"property", "classmethod", "staticmethod", "functools.cached_property", "functools.cache"}
"""Decorators that call nothing by themselves."""
CALLED_BY_NAME = "visit_"
"""Methods of syntax-tree visitors."""


def is_of_a_service(node: ast.AST | None) -> bool:
    """gRPC calls the methods of a service by their names."""
    return isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Servicer") for base in node.bases)


def unused(sources: dict[str, str]) -> list[str]:
    """Functions, classes, methods and constants whose name is read nowhere, and private attributes that are only
    written or added to. Names under a decorator belong to whoever decorates, but for properties and the like."""
    reads, defined, written = Counter[str](), list[tuple[str, str]](), dict[str, str]()
    for path, text in sources.items():
        tree = ast.parse(text)
        above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                reads[node.id] += 1
            elif isinstance(node, ast.Attribute):
                if node.attr.startswith("_") and is_written(node, above):
                    written.setdefault(node.attr, path)
                elif isinstance(node.ctx, ast.Load):
                    reads[node.attr] += 1
            elif is_of_a_service(above.get(node)):
                continue
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if {ast.unparse(decorator) for decorator in node.decorator_list} <= TRANSPARENT:
                    defined.append((node.name, path))
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            defined += [(target.id, path) for target in targets if isinstance(target, ast.Name)]
    names = [*defined, *written.items()]
    return [f"{path}: {name}" for name, path in names if not reads[name] and not name.startswith("__")]


def is_written(node: ast.Attribute, above: dict[ast.AST, ast.AST]) -> bool:
    """Whether an attribute is assigned, or something is added to it and nothing read."""
    call = above.get(above[node])
    method = above[node]
    grows = isinstance(method, ast.Attribute) and method.attr in ("append", "extend", "add")
    return isinstance(node.ctx, ast.Store) or (
        grows and isinstance(call, ast.Call) and isinstance(above[call], ast.Expr)
    )


def test_nothing_is_there_for_nobody() -> None:
    sources = {
        str(path.relative_to(PACKAGE)): path.read_text("utf-8")
        for path in PACKAGE.rglob("*.py")
        if "v1" not in path.parts
    }
    found = {entry.split(": ")[1]: entry for entry in unused(sources)}
    usage = {"USAGE"}  # read by its module's parser, through the module
    left = [entry for name, entry in found.items() if name not in {*OUTSIDE, *usage} and CALLED_BY_NAME not in name]
    assert left == []
    assert set(OUTSIDE) <= set(found), "these are used after all"


def test_the_scan_finds_what_is_dead() -> None:
    text = "\n".join(
        [
            "LIMIT = 3",
            "def called(): return 1",
            "def forgotten(): return called()",
            "class Box:",
            "    def __init__(self): self._kept, self._lost = [], []",
            "    def add(self, x): self._kept.append(x); self._lost.append(x); return self._kept",
            "    @property",
            "    def size(self): return 1",
            "    @hook",
            "    def on_change(self): return 1",
            "Box().add(1)",
        ]
    )
    assert unused({"a.py": text}) == ["a.py: forgotten", "a.py: size", "a.py: LIMIT", "a.py: _lost"]
