"""Hub ids at a revision, or kept in a folder of one's own: found before anything is loaded, so that the engine is given
directories."""

from __future__ import annotations

from dataclasses import replace

from pagedec.config import EngineConfig, draft_config, names_draft_model
from pagedec.errors import within
from pagedec.formats.resolve import is_hub_id, resolve_model, resolve_tokenizer


def fetched(config: EngineConfig) -> EngineConfig:
    """The configuration with directories for the hub ids, where it says which revision or which folder. Raises
    `InvalidArgument` for a revision of what is no hub id, and for what the hub does not give."""
    return _fetched_target(_fetched_draft(config))


def named_files(config: EngineConfig) -> tuple[tuple[str, str | None], ...]:
    """The arguments that may name files, and what they say."""
    model, table = config.model, config.scheduler.speculative_config or {}
    of_draft = "speculative_config.model", table.get("model")
    return *((name, getattr(model, name)) for name in ("model", "tokenizer", "generation_config")), of_draft


def _fetched_draft(config: EngineConfig) -> EngineConfig:
    """The same of the draft model alone."""
    own, table = draft_config(config).model, config.scheduler.speculative_config
    if table is None or not names_draft_model(config) or (own.revision, own.download_dir) == (None, None):
        return config
    with within("speculative_config."):
        place = resolve_model(own.model, own.load_format, own.revision, own.download_dir).config
    without = {name: value for name, value in table.items() if name != "revision"}
    if is_hub_id(own.model) and place is not None:
        without["model"] = str(place.parent)
    return replace(config, scheduler=replace(config.scheduler, speculative_config=without))


def _fetched_target(config: EngineConfig) -> EngineConfig:
    given = config.model
    if (given.revision, given.tokenizer_revision, given.download_dir) == (None, None, None):
        return config
    model, tokenizer, tokenizer_revision = given.model, given.tokenizer, given.tokenizer_revision
    place = resolve_model(model, given.load_format, given.revision, given.download_dir).config
    if is_hub_id(model) and place is not None:
        model = str(place.parent)
    if tokenizer is None and tokenizer_revision not in (None, given.revision):
        tokenizer = given.model
    if tokenizer is not None and not given.skip_tokenizer_init:
        if tokenizer_revision is None and tokenizer == given.model:
            tokenizer_revision = given.revision
        tokenizer = str(resolve_tokenizer(tokenizer, tokenizer_revision, given.download_dir))
    without = replace(
        given, model=model, tokenizer=tokenizer, revision=None, tokenizer_revision=None, download_dir=None
    )
    return replace(config, model=without)
