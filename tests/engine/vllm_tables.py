"""What becomes of vLLM's engine arguments and methods here: `python -m tests.engine.vllm_tables` writes it into
docs/vllm.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pagedec import ABSENT_NAMES
from pagedec.config import engine_rules
from pagedec.fields import Rule
from pagedec.inputs import CALL_ONLY, Only
from pagedec.llm.of_vllm import ABSENT, ALIASES, FLOAT16, NEUTRAL, ONLY, SPELLINGS, UNSET

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"
NAMES = tuple(
    """
    additional_config aggregate_engine_logging all2all_backend allowed_local_media_path allowed_media_domains
    async_scheduling attention_backend attention_config block_size calculate_kv_scales code_revision
    collect_detailed_traces compilation_config config_format convert cp_kv_cache_interleave_size cpu_offload_gb
    cpu_offload_params cuda_graph_sizes cudagraph_capture_sizes cudagraph_metrics data_parallel_address
    data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_rank data_parallel_rpc_port
    data_parallel_size data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold
    dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size decode_context_parallel_size
    default_mm_loras device disable_async_output_proc disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
    disable_logprobs_during_spec_decoding disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization
    disable_sliding_window distributed_executor_backend distributed_timeout_seconds download_dir dtype
    ec_transfer_config enable_chunked_prefill enable_dbo enable_elastic_ep enable_eplb enable_expert_parallel
    enable_flashinfer_autotune enable_layerwise_nvtx_tracing enable_log_requests enable_logging_iteration_details
    enable_lora enable_lora_bias enable_mfu_metrics enable_mm_embeds enable_mm_processor_stats
    enable_multimodal_encoder_data_parallel enable_prefix_caching enable_prompt_adapter enable_prompt_embeds
    enable_return_routed_experts enable_sleep_mode enable_tower_connector_lora enforce_eager eplb_config
    eplb_log_balancedness eplb_step_interval eplb_window_size expert_placement_strategy fail_on_environ_validation
    fully_sharded_loras generation_config gpu_memory_utilization guided_decoding_backend
    guided_decoding_disable_additional_properties guided_decoding_disable_any_whitespace
    guided_decoding_disable_fallback hf_config_path hf_overrides hf_token ignore_patterns interleave_mm_strings
    intial_incremental_detokenization_offset io_processor_plugin kernel_config kv_cache_dtype kv_cache_memory_bytes
    kv_cache_metrics kv_cache_metrics_sample kv_events_config kv_offloading_backend kv_offloading_size
    kv_sharing_fast_prefill kv_transfer_config language_model_only limit_mm_per_prompt load_format
    logits_processor_pattern logits_processors logprobs_mode long_lora_scaling_factors long_prefill_token_threshold
    lora_dtype lora_extra_vocab_size mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype
    master_addr master_port max_cpu_loras max_cudagraph_capture_size max_logprobs max_long_partial_prefills
    max_lora_rank max_loras max_model_len max_num_batched_tokens max_num_partial_prefills max_num_seqs
    max_parallel_loading_workers
    max_prompt_adapter_token max_prompt_adapters max_seq_len_to_capture media_io_kwargs mm_encoder_attn_backend
    mm_encoder_only mm_encoder_tp_mode mm_processor_cache_gb mm_processor_cache_type mm_processor_kwargs
    mm_shm_cache_max_object_size_mb model model_impl model_loader_extra_config moe_backend multi_step_stream_outputs
    ngram_prompt_lookup_max ngram_prompt_lookup_min nnodes node_rank num_gpu_blocks_override num_lookahead_slots
    num_redundant_experts num_scheduler_steps num_speculative_tokens offload_backend offload_group_size
    offload_num_in_group offload_params offload_prefetch_step optimization_level otlp_traces_endpoint
    override_attention_dtype override_generation_config override_neuron_config override_pooler_config performance_mode
    pipeline_parallel_size pooler_config preemption_mode prefill_context_parallel_size prefix_caching_hash_algo
    profiler_config pt_load_map_location qlora_adapter_name_or_path quantization ray_workers_use_nsight reasoning_parser
    reasoning_parser_plugin revision rope_scaling rope_theta runner safetensors_load_strategy scheduler_cls
    scheduler_delay_factor scheduling_policy seed served_model_name show_hidden_metrics_for_version shutdown_timeout
    skip_mm_profiling skip_tokenizer_init spec_decoding_acceptance_method specialize_active_lora speculative_config
    speculative_disable_by_batch_size speculative_disable_mqa_scorer speculative_draft_tensor_parallel_size
    speculative_max_model_len speculative_model speculative_model_quantization stream_interval structured_outputs_config
    swap_space task tensor_parallel_size tokenizer tokenizer_mode tokenizer_pool_extra_config tokenizer_pool_size
    tokenizer_pool_type tokenizer_revision tokens_only trust_remote_code typical_acceptance_sampler_posterior_alpha
    typical_acceptance_sampler_posterior_threshold ubatch_size use_tqdm_on_load use_v2_block_manager video_pruning_rate
    weight_transfer_config worker_cls worker_extension_cls
    """.split()
)
"""The fields of vLLM's EngineArgs and AsyncEngineArgs, as of 0.7 up to the newest that was looked at; the oldest names
are gone there."""
HEADS = {
    "honoured": ("argument", "values", "default", "meaning"),
    "renamed": ("argument or value of vLLM's", "here"),
    "neutral": ("arguments", "values", "why nothing depends on it"),
    "only": ("not available", "what may be said"),
    "calls": ("not available", "what may be said"),
    "absent": ("of `LLM` and `AsyncLLM`", "instead"),
    "names": ("of `vllm`", "instead"),
}


def tables() -> dict[str, str]:
    """Each table of the document by its name."""
    rows = {
        "honoured": [
            (_honoured(name), _values(rule), _code(default), rule.help)
            for name, (rule, default) in engine_rules().items()
        ],
        "renamed": _renamed(),
        "neutral": _grouped((name, (_values(rule), rule.help)) for name, rule in NEUTRAL.items()),
        "only": _only(ONLY),
        "calls": _only(CALL_ONLY),
        "absent": _grouped((name, (instead,)) for name, instead in ABSENT.items()),
        "names": _grouped((name, (instead,)) for name, instead in ABSENT_NAMES.items()),
    }
    return {name: _table(HEADS[name], rows[name]) for name in HEADS}


def documented(name: str) -> str:
    """A table as the document shows it."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.partition(_mark(name, "begin"))[2].partition(_mark(name, "end"))[0].strip()


def write() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, table in tables().items():
        before, begin, rest = text.partition(_mark(name, "begin"))
        _, end, after = rest.partition(_mark(name, "end"))
        assert begin and end, f"no place for the table of {name}"
        text = f"{before}{begin}\n{table}\n{end}{after}"
    DOCUMENT.write_text(text, encoding="utf-8")


def _mark(name: str, side: str) -> str:
    return f"<!-- {name}: {side} -->"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _code(value: Any) -> str:
    return f"`{value!r}`"


def _honoured(name: str) -> str:
    return f"`{name}`" if name in NAMES else f"`{name}` (ours)"


def _values(rule: Rule) -> str:
    """What may be given; "or None" where that is taken."""
    said = ", ".join(map(_code, rule.available or rule.offered)) or rule.limit
    return f"{said} or None" if rule.optional and None not in rule.available else said


def _renamed() -> list[tuple[str, str]]:
    known = engine_rules()
    rows = [(f"`{name}`", f"`{ours}`") for name, ours in ALIASES.items()]
    rows += [
        (f"`{name}={theirs!r}`", f"`{name}={ours!r}`")
        for name, spellings in SPELLINGS.items()
        for theirs, ours in spellings.items()
    ]
    rows += [
        (f"`dtype={name!r}`", "`dtype='bfloat16'` on a CPU, with a `DtypeWarning`; `dtype='float16'` on a CUDA device")
        for name in FLOAT16
    ]
    rows.append(("a `dtype` of torch's, as `torch.bfloat16`", "its name"))
    return rows + [(f"`{name}=None`", f"`{name}={known[name][1]!r}`") for name in UNSET]


def _grouped(entries: Iterable[tuple[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """A row for each of the things said, with all names of which it is."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, said in entries:
        rows.setdefault(said, []).append(f"`{name}`")
    return [(", ".join(names), *said) for said, names in rows.items()]


def _only(names: Mapping[str, Only]) -> list[tuple[str, str]]:
    rows: dict[str, list[str]] = {}
    for name, only in names.items():
        feature = only.missing.removesuffix(" are").removesuffix(" is")
        rows.setdefault(feature, []).append(f"`{name}` {' or '.join(map(_code, only.values))}")
    return [(feature, "; ".join(said)) for feature, said in rows.items()]


if __name__ == "__main__":
    write()
