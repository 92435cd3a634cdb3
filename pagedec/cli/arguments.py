"""Command-line arguments made from checked fields: the same names, limits and defaults as in Python and in files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pagedec.config import ENGINE_GROUPS, EngineConfig, engine_rules, read_tables
from pagedec.errors import PagedecError
from pagedec.fields import Flag, Rule, rules
from pagedec.params import SamplingParams

ENGINE = "engine."
SAMPLING = "sampling."
OPTIONS = "options."
T = TypeVar("T")
ENGINE_TITLES = {
    "model": "engine: the model",
    "cache": "engine: the KV cache",
    "scheduler": "engine: the steps",
    "parallel": "engine: the machine",
}
RENAMED = {"seed": "engine-seed"}
"""Engine arguments whose flag would collide with a request's."""


class UsageError(PagedecError):
    """The command line itself is wrong."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are errors like all others, one line long."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def _default(default: object) -> str:
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return shown.lower() if default is None or isinstance(default, bool) else shown


def _metavar(rule: Rule) -> str:
    choices = getattr(rule, "choices", ())
    return "{" + ",".join(map(str, choices)) + "}" if choices else rule.metavar


def add_fields(
    parser: argparse.ArgumentParser,
    title: str,
    fields: Mapping[str, tuple[Rule, Any]],
    prefix: str,
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Add one flag for each field. What is not given stays absent, so that files and defaults can speak."""
    group = parser.add_argument_group(title)
    for name, (rule, default) in fields.items():
        flag = "--" + (renamed or {}).get(name, name).replace("_", "-")
        shown = _default(default)
        text = rule.help.replace("%", "%%") + (f" (default: {shown})" if shown else "")
        if isinstance(rule, Flag):
            group.add_argument(
                flag, dest=prefix + name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            metavar, action = _metavar(rule), "append" if rule.repeated else "store"
            group.add_argument(
                flag, dest=prefix + name, action=action, metavar=metavar, default=argparse.SUPPRESS, help=text
            )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --config and a flag for each engine argument, in the groups of the configuration."""
    parser.add_argument_group("configuration file").add_argument(
        "--config",
        metavar="FILE",
        help="TOML file of engine arguments, named as below with underscores, and of sampling parameters in its table "
        "[sampling]; flags win over it",
    )
    for name, group in ENGINE_GROUPS.items():
        add_fields(parser, ENGINE_TITLES[name], rules(group), ENGINE, RENAMED)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    add_fields(parser, "sampling parameters", rules(SamplingParams), SAMPLING)


def _given(arguments: argparse.Namespace, prefix: str, fields: Mapping[str, tuple[Rule, Any]]) -> dict[str, Any]:
    given = {key.removeprefix(prefix): value for key, value in vars(arguments).items() if key.startswith(prefix)}
    return {name: _parsed(name, fields[name][0], value) for name, value in given.items()}


def _parsed(name: str, rule: Rule, value: object) -> object:
    if isinstance(value, list):  # of a flag that was given several times
        return tuple(item for text in value for item in rule.parse(name, text))
    return rule.parse(name, value) if isinstance(value, str) else value


def _file(arguments: argparse.Namespace) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The engine arguments and sampling parameters of --config, if it was given."""
    if getattr(arguments, "config", None) is None:
        return {}, {}
    if not hasattr(arguments, "tables"):  # a pipe can be read only once
        arguments.tables = read_tables(arguments.config)
    tables: tuple[Mapping[str, Any], Mapping[str, Any]] = arguments.tables
    return tables


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's configuration: file first, flags over it, all of it checked."""
    values = dict(_file(arguments)[0])
    return EngineConfig.from_kwargs(**{**values, **_given(arguments, ENGINE, engine_rules())})


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that the file and the flags give, the flags over the file, each checked, by name."""
    values = dict(_file(arguments)[1])
    values |= _given(arguments, SAMPLING, rules(SamplingParams))
    SamplingParams(**values)
    return values


def sampling_params(arguments: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """The sampling parameters of file and flags over `defaults`."""
    return SamplingParams(**{**defaults, **given_sampling(arguments)})


def add_options(parser: argparse.ArgumentParser, title: str, options: type[Any]) -> None:
    """Add a flag for each checked field of a command's own dataclass."""
    add_fields(parser, title, rules(options), OPTIONS)


def given_options(arguments: argparse.Namespace, options: type[T]) -> T:
    """The command's own dataclass as the flags say."""
    return options(**_given(arguments, OPTIONS, rules(options)))
