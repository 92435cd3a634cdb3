"""The engine arguments as Python shows them: typed for checkers and editors, and listed by `help` and
`inspect.signature`."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, get_type_hints

from pagedec.config import engine_rules
from pagedec.fields import Rule
from pagedec.llm.of_vllm import ALIASES, NEUTRAL, ONLY

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])
WIDTH = 118


class EngineArgs(TypedDict, total=False):
    """All keyword arguments of `LLM` and `AsyncLLM`, `model` apart."""

    tokenizer: str | None
    revision: str | None
    tokenizer_revision: str | None
    download_dir: str | None
    skip_tokenizer_init: bool
    load_format: str
    dtype: str | Any  # torch's own dtypes too
    model_impl: str
    quantization: str | None
    max_model_len: int | None
    generation_config: str | None
    override_generation_config: dict[str, Any] | None
    seed: int | None
    block_size: int | None
    num_blocks: int | None
    kv_cache_memory: int | str | None
    memory_utilization: float | None
    kv_cache_dtype: str
    enable_prefix_caching: bool | None
    kv_offload_memory: int | str | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    target_step_time: float | None
    max_logprobs: int
    async_scheduling: bool | None
    speculative_config: dict[str, Any] | None
    max_session_branches: int
    max_session_tokens: int
    max_parked_branches: int
    max_parked_tokens: int
    session_ttl: float | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    executor: str
    step_timeout: float
    tensor_parallel_size: int
    attention_backend: str
    num_threads: int | None

    # vLLM's, see pagedec/llm/of_vllm.py
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | str | None
    trust_remote_code: bool
    code_revision: str | None
    enforce_eager: bool | None
    max_seq_len_to_capture: int | None
    max_context_len_to_capture: int | None
    cudagraph_capture_sizes: Any
    cuda_graph_sizes: Any
    max_cudagraph_capture_size: Any
    compilation_config: Any
    optimization_level: int
    performance_mode: str
    enable_flashinfer_autotune: bool | None
    disable_log_stats: bool
    disable_log_requests: bool
    enable_log_requests: bool
    aggregate_engine_logging: bool
    kv_cache_metrics: bool
    cudagraph_metrics: bool
    enable_mfu_metrics: bool
    enable_logging_iteration_details: bool
    enable_mm_processor_stats: bool
    max_cpu_loras: int | None
    fully_sharded_loras: bool
    specialize_active_lora: bool
    enable_tower_connector_lora: bool
    default_mm_loras: Any
    calculate_kv_scales: bool | None
    kv_cache_metrics_sample: float
    show_hidden_metrics_for_version: str | None
    fail_on_environ_validation: bool
    served_model_name: str | list[str] | None
    use_tqdm_on_load: bool
    max_parallel_loading_workers: int | None
    safetensors_load_strategy: str
    ignore_patterns: Any
    pt_load_map_location: Any
    disable_custom_all_reduce: bool
    disable_nccl_for_dp_synchronization: bool | None
    ray_workers_use_nsight: bool
    data_parallel_backend: Any
    data_parallel_address: Any
    data_parallel_rpc_port: Any
    master_addr: Any
    master_port: Any
    distributed_timeout_seconds: Any
    dcp_comm_backend: Any
    dcp_kv_cache_interleave_size: Any
    cp_kv_cache_interleave_size: Any
    all2all_backend: Any
    dbo_decode_token_threshold: Any
    dbo_prefill_token_threshold: Any
    eplb_config: Any
    num_redundant_experts: Any
    eplb_window_size: Any
    eplb_step_interval: Any
    eplb_log_balancedness: Any
    expert_placement_strategy: Any
    disable_async_output_proc: bool
    multi_step_stream_outputs: bool
    tokenizer_pool_size: Any
    tokenizer_pool_type: Any
    tokenizer_pool_extra_config: Any
    intial_incremental_detokenization_offset: int
    max_num_partial_prefills: int
    max_long_partial_prefills: int
    long_prefill_token_threshold: int
    scheduler_delay_factor: float
    scheduling_policy: str
    use_v2_block_manager: bool
    disable_hybrid_kv_cache_manager: bool | None
    prefix_caching_hash_algo: str
    mamba_cache_dtype: Any
    mamba_ssm_cache_dtype: Any
    mamba_block_size: Any
    mamba_cache_mode: Any
    disable_cascade_attn: bool
    gpu_memory_utilization: float
    swap_space: float
    cpu_offload_gb: float
    cpu_offload_params: Any
    offload_backend: Any
    offload_group_size: Any
    offload_num_in_group: Any
    offload_prefetch_step: Any
    offload_params: Any
    kv_offloading_backend: Any
    allow_deprecated_quantization: bool
    guided_decoding_disable_fallback: bool | None
    guided_decoding_disable_any_whitespace: bool | None
    guided_decoding_disable_additional_properties: bool | None
    allowed_local_media_path: Any
    allowed_media_domains: Any
    limit_mm_per_prompt: Any
    mm_processor_kwargs: Any
    media_io_kwargs: Any
    mm_processor_cache_type: Any
    mm_shm_cache_max_object_size_mb: Any
    mm_encoder_tp_mode: Any
    mm_encoder_attn_backend: Any
    video_pruning_rate: Any
    mm_processor_cache_gb: float
    disable_mm_preprocessor_cache: bool
    skip_mm_profiling: bool
    enable_mm_embeds: bool
    interleave_mm_strings: bool
    language_model_only: bool
    disable_chunked_mm_input: bool
    enable_multimodal_encoder_data_parallel: bool
    task: str | None
    runner: str
    convert: str
    pooler_config: None
    override_pooler_config: None
    lora_dtype: str | None
    lora_extra_vocab_size: int
    enable_lora_bias: bool
    long_lora_scaling_factors: None
    qlora_adapter_name_or_path: None
    enable_prompt_adapter: bool
    max_prompt_adapters: int
    max_prompt_adapter_token: int
    enable_prompt_embeds: bool
    mm_encoder_only: bool
    io_processor_plugin: None
    pipeline_parallel_size: int
    data_parallel_size: int
    prefill_context_parallel_size: int
    decode_context_parallel_size: int
    nnodes: int
    node_rank: int
    ubatch_size: int
    data_parallel_rank: int | None
    data_parallel_start_rank: int | None
    data_parallel_size_local: int | None
    data_parallel_hybrid_lb: bool
    data_parallel_external_lb: bool
    enable_expert_parallel: bool
    enable_elastic_ep: bool
    enable_eplb: bool
    enable_dbo: bool
    worker_use_ray: bool
    distributed_executor_backend: str | None
    worker_cls: str
    worker_extension_cls: str
    device: str
    tokenizer_mode: str
    config_format: str
    hf_config_path: None
    hf_overrides: dict[str, Any] | None
    rope_scaling: dict[str, Any] | None
    override_attention_dtype: str | None
    quantization_param_path: None
    rope_theta: None
    disable_sliding_window: bool
    model_loader_extra_config: dict[str, Any] | None
    hf_token: bool | None
    kv_sharing_fast_prefill: bool
    kv_transfer_config: None
    ec_transfer_config: None
    weight_transfer_config: None
    kv_events_config: None
    kv_offloading_size: None
    attention_config: dict[str, Any] | None
    kernel_config: dict[str, Any] | None
    moe_backend: str
    enable_return_routed_experts: bool
    scheduler_cls: None
    stream_interval: int
    tokens_only: bool
    shutdown_timeout: int
    enable_chunked_prefill: bool | None
    preemption_mode: str | None
    num_scheduler_steps: int
    speculative_model: None
    num_speculative_tokens: None
    speculative_model_quantization: None
    speculative_draft_tensor_parallel_size: None
    speculative_max_model_len: None
    speculative_disable_by_batch_size: None
    ngram_prompt_lookup_max: None
    ngram_prompt_lookup_min: None
    typical_acceptance_sampler_posterior_threshold: None
    typical_acceptance_sampler_posterior_alpha: None
    speculative_disable_mqa_scorer: bool | None
    disable_logprobs_during_spec_decoding: bool | None
    spec_decoding_acceptance_method: str | None
    num_lookahead_slots: int
    guided_decoding_backend: str | None
    structured_outputs_config: dict[str, Any] | None
    reasoning_parser: str | None
    reasoning_parser_plugin: str | None
    logits_processors: list[Any] | None
    logits_processor_pattern: None
    logprobs_mode: str
    enable_sleep_mode: bool
    otlp_traces_endpoint: None
    collect_detailed_traces: None
    enable_layerwise_nvtx_tracing: bool
    profiler_config: dict[str, Any] | None
    additional_config: dict[str, Any] | None
    override_neuron_config: dict[str, Any] | None


def listed(cls: type[T]) -> type[T]:
    """Put the engine arguments, with their meanings and defaults, at the end of a class's docstring."""
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{_described()}"
    return cls


def signed(init: F) -> F:
    """Give a constructor that takes `EngineArgs` a signature that shows them, with their types and defaults."""
    hints = get_type_hints(EngineArgs) | {"model": str}
    named = [
        inspect.Parameter(name, _kind(name), default=default, annotation=hints[name])
        for name, (_, default) in engine_rules().items()
    ]
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    others = inspect.Parameter("of_vllm", inspect.Parameter.VAR_KEYWORD, annotation=Any)
    signature = inspect.Signature([self, *named, others], return_annotation=None)
    setattr(init, "__signature__", signature)  # noqa: B010  which type checkers do not know of
    return init


def _kind(name: str) -> Any:
    return inspect.Parameter.POSITIONAL_OR_KEYWORD if name == "model" else inspect.Parameter.KEYWORD_ONLY


def _described() -> str:
    entries = [f"{name}: {_help(rule, default)}" for name, (rule, default) in engine_rules().items()]
    theirs = [
        "Arguments of vLLM that are another's name here: " + ", ".join(f"{a} ({b})" for a, b in ALIASES.items()),
        f"Those that are checked and change nothing: {', '.join(NEUTRAL)}",
        f"Those of which some values alone are taken, which ask for nothing: {', '.join(ONLY)}",
    ]
    return "\n".join(["Args:", *(_entry(entry) for entry in entries), "", *map(_paragraph, theirs)])


def _help(rule: Rule, default: Any) -> str:
    if rule.available == (default,):
        return f"{rule.help}; only {default!r} in this version"
    choices = f"; one of {', '.join(map(repr, rule.offered))}" if len(rule.offered) > 1 else ""
    return f"{rule.help}{choices} (default: {default!r})"


def _entry(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)


def _paragraph(text: str) -> str:
    return textwrap.fill(f"{text}.", WIDTH, subsequent_indent=" " * 4, break_on_hyphens=False)
