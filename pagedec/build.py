"""The composition root: from a configuration to tokenizer, worker, executor and engine."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from itertools import zip_longest

from pagedec import environment
from pagedec.config import EngineConfig, ModelConfig, draft_config, names_draft_model
from pagedec.core.limits import SchedulerLimits
from pagedec.core.scheduler import Scheduler
from pagedec.engine.adapters import AdapterRegistry, ReadAdapter
from pagedec.engine.engine import Engine, ModelLimits
from pagedec.engine.open_branches import SessionLimits
from pagedec.engine.options import Vocabulary
from pagedec.errors import OR_TOKEN_IDS, InvalidArgument, ModelFileError, PoolWarning, TokenizerWarning, within
from pagedec.executor.base import Executor
from pagedec.executor.inline import InlineExecutor
from pagedec.executor.process import ProcessExecutor
from pagedec.formats.gguf.header import headers_kept
from pagedec.formats.resolve import ModelFiles, resolve_model, resolve_tokenizer
from pagedec.runtime.adapters import adapter_reader
from pagedec.runtime.geometry import Geometry
from pagedec.runtime.loading import LoadedModel, build_worker, check_configuration, check_shares, load_whole
from pagedec.text.tokenizer import Tokenizer


def load_tokenizer(config: ModelConfig, files: ModelFiles) -> Tokenizer | None:
    """The model's tokenizer, or the one that is named; None with skip_tokenizer_init."""
    if config.skip_tokenizer_init:
        return None
    path = files.tokenizer if config.tokenizer is None else resolve_tokenizer(config.tokenizer)
    if path is None:
        raise ModelFileError(files.model, f"has no tokenizer; name one with tokenizer{OR_TOKEN_IDS}")
    try:
        return Tokenizer.from_path(path)
    except ModelFileError as error:
        problem = f"{error.problem}{OR_TOKEN_IDS}"
        raise ModelFileError(error.path, problem) from error.__cause__


def check_tokenizer(tokenizer: Tokenizer, model: str, vocab_size: int) -> None:
    """Raise `ModelFileError` for a tokenizer with words that the model does not know: it is another model's. Of tokens
    that were added, as for images, some models know not all: those that are in use are warned of."""
    words, added = tokenizer.beyond(vocab_size)
    told = f"has {len(tokenizer.byte_table)} tokens, more than the {vocab_size} of the model {model}"
    if words:
        problem = f"{told}: it is another model's; name the model's own with tokenizer{OR_TOKEN_IDS}"
        raise ModelFileError(tokenizer.path, problem)
    if added:
        warnings.warn(
            f"the tokenizer {tokenizer.path} {told}: a prompt is refused that has {' or '.join(added[:3])}"
            f"{f', or one of {len(added) - 3} others' if len(added) > 3 else ''}",
            TokenizerWarning,
            stacklevel=4,  # who made the LLM
        )


def start_executor(config: EngineConfig) -> Executor:
    """Whoever carries out steps, with everything loaded. Raises what loading raises."""
    parallel = config.parallel
    if parallel.tensor_parallel_size > 1:
        check_shares(config)  # before so many processes are started to say the same
    if parallel.executor == "process" or (parallel.executor == "auto" and parallel.tensor_parallel_size > 1):
        return ProcessExecutor(config)
    if parallel.executor == "ray":
        from pagedec.executor.ray import RayExecutor  # an extra

        return RayExecutor(config)
    return InlineExecutor(load_whole(config))


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    eos_token_ids: tuple[int, ...],
    draft: LoadedModel | None = None,
    vocabulary: Vocabulary | None = None,
) -> Engine:
    """An engine over a loaded model, in this process, with caches of its own; with `draft`, rolls run on that model's
    lane; with `vocabulary`, requests may have stop strings and bad words."""
    executor = InlineExecutor(build_worker(config, loaded, draft))
    return build_engine(config, executor, eos_token_ids, vocabulary, adapter_reader(config, loaded.arch))


def build_engine(
    config: EngineConfig,
    executor: Executor,
    eos_token_ids: tuple[int, ...],
    vocabulary: Vocabulary | None = None,
    read_adapter: ReadAdapter | None = None,
) -> Engine:
    """An engine that has its steps carried out by `executor`. `read_adapter`: None where the model takes none."""
    geometry = executor.geometry
    target, others = geometry.lanes["target"], {lane: g for lane, g in geometry.lanes.items() if lane != "target"}
    size, rows = config.cache.block_size, config.scheduler.max_num_batched_tokens
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks={lane: known.num_blocks for lane, known in geometry.lanes.items()},
            vocab_size=target.vocab_size,
            block_size=size,
            max_blocks_per_table=-(
                -(target.max_model_len + rows) // size
            ),  # a draft may reach behind the context's end
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=rows,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            num_adapter_places=config.lora.max_loras if config.lora.enable_lora else 0,
            num_offload_blocks=target.num_offload_blocks,
            max_positions={lane: known.max_model_len for lane, known in others.items()},
            vocab_sizes={lane: known.vocab_size for lane, known in others.items()},
            lags={lane: known.lag for lane, known in others.items()},
        )
    )
    limits = ModelLimits(target.vocab_size, target.max_model_len, eos_token_ids, config.scheduler.max_logprobs)
    debug = environment.read("PAGEDEC_DEBUG") == "1"
    return Engine(
        scheduler,
        executor,
        limits,
        seed=config.model.seed,
        debug=debug,
        vocabulary=vocabulary,
        speculative=config.scheduler.speculative_config,
        sessions=SessionLimits(**dataclasses.asdict(config.session)),
        is_ahead=plans_ahead(config, executor),
        target_step_time=config.scheduler.target_step_time,
        adapters=AdapterRegistry(read_adapter),
    )


def plans_ahead(config: EngineConfig, executor: Executor) -> bool:
    """Whether steps are planned while others are carried out."""
    asked = config.scheduler.async_scheduling
    return executor.overlaps if asked is None else asked


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """What the engine needs to know of a tokenizer."""
    table = tokenizer.byte_table
    return Vocabulary(table.pieces, table.special_ids, partial(tokenizer.encode, add_special_tokens=False))


def end_tokens(own: tuple[int, ...], vocab_size: int, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's and the model's `own`, of which a tokenizer from elsewhere need
    not know. Those that the model cannot write are left out."""
    known = () if tokenizer is None else tokenizer.eos_token_ids
    return tuple(token for token in dict.fromkeys((*known, *own)) if token < vocab_size)


def writes_alike(tokenizer: Tokenizer | None, draft: ModelConfig) -> bool:
    """Whether a draft model's tokenizer gives the same meaning to token ids as the target's; False: it cannot be told.
    Raises `InvalidArgument` where they differ."""
    with within("speculative_config."):
        files = resolve_model(draft.model, draft.load_format)
    if tokenizer is None or files.tokenizer is None:
        return False
    try:
        other = Tokenizer.from_path(files.tokenizer)
    except ModelFileError:
        return False  # only its weights are there
    ours, theirs = tokenizer.byte_table.pieces, other.byte_table.pieces
    pairs = enumerate(zip_longest(ours, theirs, fillvalue=b""))
    different = next((token for token, (left, right) in pairs if left != right), None)
    if different is not None:
        limit = f"must have the target's tokenizer: token {different} is another one in it"
        raise InvalidArgument("speculative_config.model", draft.model, limit)
    return True


def check_vocabularies(geometry: Geometry, config: EngineConfig, is_alike: bool) -> None:
    """Raise `InvalidArgument` for a draft model that has not as many token ids as the target, unless it is known that
    they mean the same (`is_alike`): then one of them is only padded further."""
    lanes = geometry.lanes
    if not names_draft_model(config) or is_alike or lanes["draft"].vocab_size == lanes["target"].vocab_size:
        return
    model = draft_config(config).model.model
    limit = (
        f"must know the target's tokens: it has {lanes['draft'].vocab_size} token ids, the target "
        f"{lanes['target'].vocab_size}, and without both tokenizers it cannot be told whether they mean the same"
    )
    raise InvalidArgument("speculative_config.model", model, limit)


def load_engine(config: EngineConfig) -> tuple[Engine, Tokenizer | None]:
    """An engine ready for requests, and its tokenizer. Raises what loading raises; nothing is left of the executor
    then."""
    with headers_kept():  # here, not around: a decorator would be one more who called, and warnings be of this package
        files = resolve_model(config.model.model, config.model.load_format)
        try:
            tokenizer = load_tokenizer(config.model, files)
        except ModelFileError:
            check_configuration(config.model, files)  # where no model can be run, no tokenizer is what is missing
            raise
        is_alike = not names_draft_model(config) or writes_alike(tokenizer, draft_config(config).model)
        executor = start_executor(config)
        try:
            if tokenizer is not None:
                check_tokenizer(tokenizer, config.model.model, executor.geometry.lanes["target"].vocab_size)
            check_vocabularies(executor.geometry, config, is_alike)
            return _engine_over(config, executor, tokenizer), tokenizer
        except BaseException:  # a warning that is an error, or Ctrl-C: nobody must be left with a process
            executor.stop()
            raise


def _engine_over(config: EngineConfig, executor: Executor, tokenizer: Tokenizer | None) -> Engine:
    geometry = executor.geometry
    target = geometry.lanes["target"]
    ends = end_tokens(geometry.eos_token_ids, target.vocab_size, tokenizer)
    complaint = geometry.kv_cache.complaint(target.max_model_len)
    if complaint is not None:
        warnings.warn(complaint, PoolWarning, stacklevel=4)  # who made the LLM
    vocabulary = None if tokenizer is None else vocabulary_of(tokenizer)
    return build_engine(config, executor, ends, vocabulary, adapter_reader(config))
