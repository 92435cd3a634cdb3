"""Command-line arguments made from checked fields: the same names, limits and defaults as in Python and in files."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeVar

from pagedec.cli.structured_flags import add_structured_arguments, given_structured
from pagedec.cli.texts import unescaped
from pagedec.config import ENGINE_GROUPS, EngineConfig, engine_rules, over_file, read_tables
from pagedec.errors import InvalidArgument, Shown
from pagedec.fields import Flag, Rule, Texts, field_names, rules
from pagedec.params import BeamSearchParams, RequestParams, SamplingParams

ENGINE = "engine."
SAMPLING = "sampling."
BEAMS = "beams."
OPTIONS = "options."
T = TypeVar("T")
ENGINE_TITLES = {
    "model": "engine: the model",
    "cache": "engine: the KV cache",
    "scheduler": "engine: the steps",
    "session": "engine: sessions",
    "lora": "engine: LoRA adapters",
    "parallel": "engine: the machine",
}
RENAMED = {"seed": "engine_seed"}
"""Engine arguments whose flag would collide with a request's."""
DRAWING = ("temperature", "top_p", "top_k", "min_p")
"""Parameters of sampling that beam sampling has too. `--speculative` is another: a search drafts where it is given."""
BEAM_RULES = {
    name: rule
    for name, rule in rules(BeamSearchParams).items()
    if name not in (*DRAWING, "speculative") and name not in rules(RequestParams)
}
_WIDTH = BEAM_RULES["beam_width"][0]
_ASKED = f"beam search: {_WIDTH.help}; none: sampling"
BEAM_FLAGS = BEAM_RULES | {"beam_width": (dataclasses.replace(_WIDTH, help=_ASKED, optional=True), None)}
BEAM_TOKENS = 128
BEAM_TITLE = f"beam search (with the flags above; --max-tokens is {BEAM_TOKENS} where nothing says more)"
SEVERAL = "; give it again for several, or once as a JSON list"
SAME_AGAIN = "drawn from --engine-seed, so that the same command gives the same answers"
ESCAPES = r"; \n, \t, \r, \" and \uXXXX are read as in C, and \\ is a backslash"


def _default(default: object) -> str:
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return shown.lower() if default is None or isinstance(default, bool) else shown


def _metavar(rule: Rule) -> str:
    return "{" + ",".join(map(str, rule.offered)) + "}" if rule.offered else rule.metavar


def _help(name: str, rule: Rule, default: object, flag_name: str) -> str:
    """What --help says of a flag."""
    text = rule.help + (SEVERAL if rule.repeated else "") + (ESCAPES if isinstance(rule, Texts) else "")
    if flag_name != name:
        text += f"; in files and in Python it is named {name}"
    shown = _default(default)
    return text.replace("%", "%%") + (f" (default: {shown})" if shown else "")


def add_fields(
    parser: argparse.ArgumentParser,
    title: str,
    fields: Mapping[str, tuple[Rule, Any]],
    prefix: str,
    renamed: Mapping[str, str] | None = None,
    hidden: Container[str] = (),
) -> None:
    """Add one flag for each field. What is not given stays absent, so that files and defaults can speak. --help does
    not list the `hidden` ones, nor those that have only their default in this version."""
    group = parser.add_argument_group(title)
    for name, (rule, default) in fields.items():
        flag_name = (renamed or {}).get(name, name)
        flag, text = "--" + flag_name.replace("_", "-"), _help(name, rule, default, flag_name)
        if name in hidden or rule.available == (default,):
            text = argparse.SUPPRESS
        if type(rule) is Flag:
            group.add_argument(
                flag, dest=prefix + name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            metavar, action = _metavar(rule), "append" if rule.repeated else "store"
            group.add_argument(
                flag, dest=prefix + name, action=action, metavar=metavar, default=argparse.SUPPRESS, help=text
            )


def add_engine_arguments(parser: argparse.ArgumentParser, hidden: Container[str] = ()) -> None:
    """Add --config and a flag for each engine argument, in the groups of the configuration. `hidden`: those all of
    whose values but the default this command refuses."""
    parser.add_argument_group("configuration file").add_argument(
        "--config",
        metavar="FILE",
        help="TOML file of engine arguments, named as below with underscores (but seed for --engine-seed), of sampling "
        "parameters in its table [sampling], which for serve are those of --override-generation-config, and for "
        "generate, chat and batch of beam search in its table [beams], where a beam_width asks for one; flags win over "
        "it",
    )
    for name, group in ENGINE_GROUPS.items():
        add_fields(parser, ENGINE_TITLES[name], rules(group), ENGINE, RENAMED, hidden)


def add_sampling_arguments(
    parser: argparse.ArgumentParser, without_seed: str = SAME_AGAIN, hidden: Container[str] = ()
) -> None:
    """Add a flag for each sampling parameter. `without_seed`: what this command does where no seed is given; `hidden`:
    as for engine arguments."""
    fields = rules(SamplingParams)
    rule, default = fields["seed"]
    seed = dataclasses.replace(rule, help=f"{rule.help.partition(';')[0]}; none: {without_seed}")
    add_fields(parser, "sampling parameters", fields | {"seed": (seed, default)}, SAMPLING, hidden=hidden)
    add_structured_arguments(parser)


def add_beam_arguments(parser: argparse.ArgumentParser, hidden: Container[str] = ()) -> None:
    """Add a flag for each parameter of beam search that sampling has not. `hidden`: as for engine arguments."""
    add_fields(parser, BEAM_TITLE, BEAM_FLAGS, BEAMS, hidden=hidden)


def given_beams(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parameters in the file's table [beams], each checked, by name; those that a sampling flag gives, as it
    does."""
    known, flags = rules(BeamSearchParams), _given(arguments, SAMPLING, rules(SamplingParams))
    table = file_tables(arguments)[2]

    def check(**values: Any) -> dict[str, Any]:
        return {name: known[name][0].check(name, value) for name, value in values.items()}

    with _of_file(arguments, check, table, {}, known):
        return {name: flags.get(name, value) for name, value in check(**table).items()}


def beam_params(
    arguments: argparse.Namespace, recommended: SamplingParams, num_return_sequences: int | None = None
) -> BeamSearchParams | None:
    """The beam search that the file's table [beams] and the flags ask for, over the sampling parameters of file and
    flags, over what is recommended; None: they ask for none. `num_return_sequences` is where nothing says it. Raises
    `InvalidArgument` for flags that change nothing together."""
    given, flags = _given(arguments, BEAMS, BEAM_FLAGS), _given(arguments, SAMPLING, rules(SamplingParams))
    table = given_beams(arguments)
    beams = {"num_return_sequences": num_return_sequences, **table, **given}
    if beams.get("beam_width") is None:
        for name, value in given.items():
            if name != "beam_width":
                raise InvalidArgument(name, value, "must be given with --beam-width")
        return None
    if "n" in flags:
        limit = "must not be given with --beam-width: --num-return-sequences says how many answers are returned"
        raise InvalidArgument("n", flags["n"], limit)
    drawing = [name for name in DRAWING if flags.get(name)]
    if drawing and not beams.get("do_sample"):
        limit = "must be given with --do-sample: a beam search draws nothing without it"
        raise InvalidArgument(drawing[0], flags[drawing[0]], limit)
    merged = recommended.clone(**given_sampling(arguments))
    unused = () if beams.get("do_sample") else DRAWING
    values = {name: getattr(merged, name) for name in field_names(RequestParams)}
    values |= {name: getattr(merged, name) for name in DRAWING if name not in unused}
    values |= {name: flags[name] for name in ("speculative",) if name in flags}
    if values["max_tokens"] is None:
        values["max_tokens"] = BEAM_TOKENS
    with _of_file(arguments, lambda **own: BeamSearchParams(**values | own), table, given, rules(BeamSearchParams)):
        return BeamSearchParams(**values | beams)


def _given(
    arguments: argparse.Namespace,
    prefix: str,
    fields: Mapping[str, tuple[Rule, Any]],
    renamed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    given = {key.removeprefix(prefix): value for key, value in vars(arguments).items() if key.startswith(prefix)}
    return {name: _parsed((renamed or {}).get(name, name), fields[name][0], value) for name, value in given.items()}


def _parsed(name: str, rule: Rule, value: object) -> object:
    if isinstance(value, list):  # of a flag that was given several times
        return tuple(item for text in value for item in _texts(name, rule, text))
    return rule.parse(name, value) if isinstance(value, str) else value


def _texts(name: str, rule: Rule, text: str) -> tuple[str, ...]:
    """The texts of a JSON list, or the one text that is no such list, its escapes read."""
    texts: tuple[str, ...] = rule.parse(name, text)
    if texts == (text,):
        texts = rule.check(name, unescaped(name, text))
    return texts


def file_tables(arguments: argparse.Namespace) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
    """The engine arguments of --config, if it was given, and its tables [sampling] and [beams]."""
    if getattr(arguments, "config", None) is None:
        return {}, {}, {}
    if not hasattr(arguments, "tables"):  # a pipe can be read only once
        arguments.tables = _read(arguments.config, getattr(arguments, "flags", {}))
    tables: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]] = arguments.tables
    return tables


@contextlib.contextmanager
def _of_file(
    arguments: argparse.Namespace,
    make: Callable[..., object],
    file: Mapping[str, Any],
    flags: Mapping[str, Any],
    fields: Mapping[str, tuple[Rule, Any]],
) -> Iterator[None]:
    """Errors about what the file says, and flags say nothing of, say so where flags are against it: `make` takes the
    file's values alone."""
    try:
        yield
    except InvalidArgument as error:
        name = error.field.partition(".")[0]
        if name not in file or name in flags:
            raise
        limit = error.limit
        if _is_taken(make, file):
            flag, rule = RENAMED.get(name, name).replace("_", "-"), fields[name][0]
            lift = f"--{flag} none lifts it" if rule.optional else f"the flag --{flag} wins over it"
            limit += f"; it is in {arguments.config}, and {lift}"
        raise type(error)(error.field, quoted(error.value), limit) from error.__cause__


def quoted(value: object) -> object:
    """A value of a file as it is written there: a text in quotes is no number."""
    return Shown(repr(value)) if isinstance(value, str) and value else value


def _is_taken(make: Callable[..., object], values: Mapping[str, Any]) -> bool:
    try:
        make(**values)
    except InvalidArgument:
        return False
    return True


def _read(path: str, flags: Mapping[str, str]) -> tuple[Mapping[str, Any], ...]:
    """A file's tables. `flags`: what each of the command's is."""
    fields = {*engine_rules(), *rules(SamplingParams), *rules(BeamSearchParams), *RENAMED.values()}
    elsewhere = {name: text for name, text in flags.items() if name not in fields}
    elsewhere |= {name.replace("_", "-"): text for name, text in elsewhere.items()}
    try:
        return read_tables(path, elsewhere)
    except InvalidArgument as error:
        value = error.value if error.field == "config" else quoted(error.value)
        raise type(error)(error.field, value, error.limit) from error.__cause__


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's configuration: file first, flags over it, all of it checked."""
    values, flags = file_tables(arguments)[0], _given(arguments, ENGINE, engine_rules(), RENAMED)
    if getattr(arguments, "lora", None) and not flags.setdefault("enable_lora", True):
        raise InvalidArgument("lora", arguments.lora, "must not be given with --no-enable-lora")
    with _of_file(arguments, EngineConfig.from_kwargs, values, flags, engine_rules()):
        return EngineConfig.from_kwargs(**over_file(values, flags))


def has_engine_seed(arguments: argparse.Namespace) -> bool:
    """Whether the file or a flag gives the engine's seed."""
    return "seed" in file_tables(arguments)[0] or hasattr(arguments, ENGINE + "seed")


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that the file and the flags give, the flags over the file, each checked, by name."""
    table, flags = file_tables(arguments)[1], _given(arguments, SAMPLING, rules(SamplingParams))
    structured = given_structured(arguments)
    if structured is not None:
        flags["structured_outputs"] = structured
    with _of_file(arguments, SamplingParams, table, flags, rules(SamplingParams)):
        SamplingParams(**{**table, **flags})
    return {**table, **flags}


def sampling_params(arguments: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """The sampling parameters of file and flags over `defaults`."""
    return SamplingParams(**{**defaults, **given_sampling(arguments)})


def add_options(parser: argparse.ArgumentParser, title: str, options: type[Any]) -> None:
    """Add a flag for each checked field of a command's own dataclass."""
    add_fields(parser, title, rules(options), OPTIONS)


def given_options(arguments: argparse.Namespace, options: type[T]) -> T:
    """One of the command's own dataclasses as the flags say."""
    known = rules(options)
    names = {f"{OPTIONS}{name}" for name in known}
    own = argparse.Namespace(**{key: value for key, value in vars(arguments).items() if key in names})
    return options(**_given(own, OPTIONS, known))
