"""Engine arguments and methods of vLLM's, of all its versions since 0.7, by what becomes of each here. docs/vllm.md
shows all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedec.fields import Flag, Integer, Number, Rule, Text, Texts
from pagedec.inputs import Only

ALIASES = {
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "distributed_executor_backend": "executor",
}
"""vLLM's names of arguments that have another one here."""
UNSET = (
    "seed",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "generation_config",
    "attention_backend",
    "executor",
)
"""Arguments for which None, that vLLM takes, means the default."""
SPELLINGS = {
    "attention_backend": {"FLASH_ATTN": "flash-attn", "XFORMERS": "xformers"},
    "dtype": {"float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"bitsandbytes": "auto"},
    "quantization": {"gptq_marlin": "gptq", "awq_marlin": "awq"},
    "model_impl": {"vllm": "native"},
    "executor": {"mp": "process", "uni": "inline"},
}
"""vLLM's names of values that have another one here."""
FLOAT16 = ("half", "float16")
"""Numbers that a CPU does not compute in: bfloat16 has their size."""


@dataclass(frozen=True, slots=True)
class Unread(Rule):
    """Any value: nothing depends on it, and nothing reads it."""

    @property
    def limit(self) -> str:
        return "anything"

    def accept(self, value: object) -> Any:
        return value


_NO_MEDIA = "no prompt has images or sound: one that brings some is refused"
_NO_GRAPHS = "a CPU has no graphs; a device's are made anyway, and serve steps of every size"
_ONE_OF_EACH = "one engine has one model, and it tells its workers what they need of one another"
_IN_MEMORY = "all weights stay in the memory of what computes"
NEUTRAL: dict[str, Rule] = {
    "trust_remote_code": Flag("a permission that is never used: no code that comes with a model is run"),
    "code_revision": Text("no code that comes with a model is run", optional=True),
    "enforce_eager": Flag(_NO_GRAPHS, optional=True),
    "max_seq_len_to_capture": Integer(_NO_GRAPHS, low=1, optional=True),
    "max_context_len_to_capture": Integer(_NO_GRAPHS, low=1, optional=True),
    **dict.fromkeys(("cudagraph_capture_sizes", "cuda_graph_sizes", "max_cudagraph_capture_size"), Unread(_NO_GRAPHS)),
    "compilation_config": Unread("nothing is compiled while it runs"),
    "optimization_level": Integer("nothing is compiled while it runs", high=3),
    "performance_mode": Text("there is one way to run"),
    "enable_flashinfer_autotune": Flag("each kernel is chosen by what the machine has", optional=True),
    **dict.fromkeys(
        (
            "disable_log_stats",
            "disable_log_requests",
            "enable_log_requests",
            "aggregate_engine_logging",
            "kv_cache_metrics",
            "cudagraph_metrics",
            "enable_mfu_metrics",
            "enable_logging_iteration_details",
            "enable_mm_processor_stats",
        ),
        Flag("nothing is logged"),
    ),
    "max_cpu_loras": Integer(
        "any number of adapters may be known; their files are read when they are needed", low=1, optional=True
    ),
    "fully_sharded_loras": Flag("ranks have of an adapter what they have of the layer"),
    "specialize_active_lora": Flag("kernels look at the adapters that a step's rows have"),
    "enable_tower_connector_lora": Flag(_NO_MEDIA),
    "default_mm_loras": Unread(_NO_MEDIA),
    "calculate_kv_scales": Flag("each token and head has a scale of its own, made when it is written", optional=True),
    "kv_cache_metrics_sample": Number("nothing is logged", above=0, high=1),
    "show_hidden_metrics_for_version": Text("nothing is logged", optional=True),
    "fail_on_environ_validation": Flag("no variables of vLLM's are read from the environment"),
    "served_model_name": Texts("nothing is served", optional=True),
    "use_tqdm_on_load": Flag("loading shows no bar"),
    "max_parallel_loading_workers": Integer("one process loads all weights", low=1, optional=True),
    "safetensors_load_strategy": Text("files are mapped, and packed as they are read"),
    **dict.fromkeys(("ignore_patterns", "pt_load_map_location"), Unread("safetensors and GGUF are all that is read")),
    "disable_custom_all_reduce": Flag(_ONE_OF_EACH),
    "disable_nccl_for_dp_synchronization": Flag(_ONE_OF_EACH, optional=True),
    "ray_workers_use_nsight": Flag(_ONE_OF_EACH),
    **dict.fromkeys(
        (
            "data_parallel_backend",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "master_addr",
            "master_port",
            "distributed_timeout_seconds",
            "dcp_comm_backend",
            "dcp_kv_cache_interleave_size",
            "cp_kv_cache_interleave_size",
            "all2all_backend",
            "dbo_decode_token_threshold",
            "dbo_prefill_token_threshold",
            "eplb_config",
            "num_redundant_experts",
            "eplb_window_size",
            "eplb_step_interval",
            "eplb_log_balancedness",
            "expert_placement_strategy",
        ),
        Unread(_ONE_OF_EACH),
    ),
    "disable_async_output_proc": Flag("texts are made apart from the steps"),
    "multi_step_stream_outputs": Flag("each step's tokens are reported when it is done"),
    **dict.fromkeys(
        ("tokenizer_pool_size", "tokenizer_pool_type", "tokenizer_pool_extra_config"),
        Unread("the tokenizer has threads of its own"),
    ),
    "intial_incremental_detokenization_offset": Integer("text is made of the tokens' bytes, whatever stood before"),
    **dict.fromkeys(
        ("max_num_partial_prefills", "max_long_partial_prefills", "long_prefill_token_threshold"),
        Integer("prompts share steps by priority and age, short ones beside long ones; answers do not depend on it"),
    ),
    "scheduler_delay_factor": Number("prompts share steps by priority and age; answers do not depend on it", low=0),
    "scheduling_policy": Text(
        "by priority, then by age; without priorities that is fcfs", choices=("fcfs", "priority")
    ),
    "use_v2_block_manager": Flag("there is one kind of block table"),
    "disable_hybrid_kv_cache_manager": Flag("there is one kind of block table", optional=True),
    "prefix_caching_hash_algo": Text("how blocks are found is the prefix cache's own"),
    **dict.fromkeys(
        ("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size", "mamba_cache_mode"),
        Unread("no model here keeps a state besides KV"),
    ),
    "disable_cascade_attn": Flag("answers do not depend on how attention is shared"),
    "gpu_memory_utilization": Number(
        "a share of a GPU's whole memory, weights included; memory_utilization is one of what is free when they are "
        "loaded",
        above=0,
        high=1,
    ),
    "swap_space": Number("nothing is swapped: what was preempted is computed again", low=0),
    "cpu_offload_gb": Number(_IN_MEMORY, low=0),
    **dict.fromkeys(
        (
            "cpu_offload_params",
            "offload_backend",
            "offload_group_size",
            "offload_num_in_group",
            "offload_prefetch_step",
            "offload_params",
        ),
        Unread(_IN_MEMORY),
    ),
    "kv_offloading_backend": Unread("kv_offload_memory says how much of the host's memory keeps KV, in one way"),
    "allow_deprecated_quantization": Flag("what quantization may be is said there"),
    **dict.fromkeys(
        (
            "guided_decoding_disable_fallback",
            "guided_decoding_disable_any_whitespace",
            "guided_decoding_disable_additional_properties",
        ),
        Flag("each request says it itself, in its structured_outputs", optional=True),
    ),
    **dict.fromkeys(
        (
            "allowed_local_media_path",
            "allowed_media_domains",
            "limit_mm_per_prompt",
            "mm_processor_kwargs",
            "media_io_kwargs",
            "mm_processor_cache_type",
            "mm_shm_cache_max_object_size_mb",
            "mm_encoder_tp_mode",
            "mm_encoder_attn_backend",
            "video_pruning_rate",
        ),
        Unread(_NO_MEDIA),
    ),
    "mm_processor_cache_gb": Number(_NO_MEDIA, low=0),
    **dict.fromkeys(
        (
            "disable_mm_preprocessor_cache",
            "skip_mm_profiling",
            "enable_mm_embeds",
            "interleave_mm_strings",
            "language_model_only",
            "disable_chunked_mm_input",
            "enable_multimodal_encoder_data_parallel",
        ),
        Flag(_NO_MEDIA),
    ),
}
"""Each with the reason why it changes nothing. Values are checked, so that a mistake is not missed."""
_POOLING = "embeddings, classification and scores are"
_PROCESSES, _OWN_CONFIG = "several processes or devices are", "changing a model's own configuration is"
_STRUCTURED = "structured outputs by others than llguidance are"
_SPECULATION = "speculation outside speculative_config is"
ONLY: dict[str, Only] = {
    "task": Only((None, "auto", "generate"), _POOLING),
    "runner": Only(("auto", "generate"), _POOLING),
    "convert": Only(("auto", "none"), _POOLING),
    "pooler_config": Only((None,), _POOLING),
    "override_pooler_config": Only((None,), _POOLING),
    "lora_dtype": Only(("auto", None), "adapters in other numbers than the model's are"),
    "lora_extra_vocab_size": Only((256, 0), "adapters with tokens of their own are"),
    "enable_lora_bias": Only((False,), "biases of adapters are"),
    "long_lora_scaling_factors": Only((None,), "adapters for longer contexts are"),
    "qlora_adapter_name_or_path": Only((None,), "an adapter that is loaded with the model (requests name theirs) is"),
    "enable_prompt_adapter": Only((False,), "prompt adapters are"),
    "max_prompt_adapters": Only((1,), "prompt adapters are"),
    "max_prompt_adapter_token": Only((0,), "prompt adapters are"),
    "enable_prompt_embeds": Only((False,), "prompts as embeddings are"),
    "mm_encoder_only": Only((False,), "an encoder without its model is"),
    "io_processor_plugin": Only((None,), "plugins are"),
    **dict.fromkeys(
        (
            "pipeline_parallel_size",
            "data_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "nnodes",
        ),
        Only((1,), _PROCESSES),
    ),
    **dict.fromkeys(("node_rank", "ubatch_size"), Only((0,), _PROCESSES)),
    **dict.fromkeys(("data_parallel_rank", "data_parallel_start_rank"), Only((None, 0), _PROCESSES)),
    "data_parallel_size_local": Only((None, 1), _PROCESSES),
    **dict.fromkeys(
        (
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
            "enable_expert_parallel",
            "enable_elastic_ep",
            "enable_eplb",
            "enable_dbo",
            "worker_use_ray",
        ),
        Only((False,), _PROCESSES),
    ),
    "worker_cls": Only(("auto",), _PROCESSES),
    "worker_extension_cls": Only(("",), _PROCESSES),
    "device": Only(("cpu", "auto"), "any device but the CPU, or 'cuda' where PAGEDEC_ISA names it, is"),
    "tokenizer_mode": Only(("auto", "hf"), "any tokenizer but the fast kind is"),
    "config_format": Only(("auto", "hf"), "any form of configuration but Hugging Face's is"),
    "hf_config_path": Only((None,), _OWN_CONFIG),
    "hf_overrides": Only((None, {}), _OWN_CONFIG),
    "rope_scaling": Only((None, {}), _OWN_CONFIG),
    "override_attention_dtype": Only((None, "auto"), _OWN_CONFIG),
    "quantization_param_path": Only((None,), _OWN_CONFIG),
    "rope_theta": Only((None,), _OWN_CONFIG),
    "disable_sliding_window": Only((False,), _OWN_CONFIG),
    "model_loader_extra_config": Only((None, {}), "a loader with options is"),
    "hf_token": Only(
        (None, True), "a token among the arguments (log in with hf auth login, or set HF_TOKEN) is", is_secret=True
    ),
    "kv_sharing_fast_prefill": Only((False,), "prefill that leaves out layers is"),
    **dict.fromkeys(("kv_transfer_config", "ec_transfer_config"), Only((None,), "KV of other engines is")),
    "weight_transfer_config": Only((None,), "a change of weights while running is"),
    "kv_events_config": Only((None,), "news of the KV pool's blocks are"),
    "kv_offloading_size": Only((None,), "another name of kv_offload_memory, in GiB, is"),
    **dict.fromkeys(("attention_config", "kernel_config"), Only((None, {}), "a table of kernels' settings is")),
    "moe_backend": Only(("auto",), "a choice among kernels for experts is"),
    "enable_return_routed_experts": Only((False,), "a report of the experts that were asked is"),
    "scheduler_cls": Only((None,), "a scheduler of one's own is"),
    "stream_interval": Only((1,), "a pause between the outputs of a stream is"),
    "tokens_only": Only((False,), "another name of skip_tokenizer_init is"),
    "shutdown_timeout": Only((0,), "waiting for what runs when closing is"),
    "enable_chunked_prefill": Only((True, None), "prefill in one piece is"),
    "preemption_mode": Only((None, "recompute"), "swapping is"),
    "num_scheduler_steps": Only((1,), "several steps at once are"),
    **dict.fromkeys(
        (
            "speculative_model",
            "num_speculative_tokens",
            "speculative_model_quantization",
            "speculative_draft_tensor_parallel_size",
            "speculative_max_model_len",
            "speculative_disable_by_batch_size",
            "ngram_prompt_lookup_max",
            "ngram_prompt_lookup_min",
            "typical_acceptance_sampler_posterior_threshold",
            "typical_acceptance_sampler_posterior_alpha",
        ),
        Only((None,), _SPECULATION),
    ),
    **dict.fromkeys(
        ("speculative_disable_mqa_scorer", "disable_logprobs_during_spec_decoding"), Only((None, False), _SPECULATION)
    ),
    "spec_decoding_acceptance_method": Only((None, "rejection_sampler"), _SPECULATION),
    "num_lookahead_slots": Only((0,), _SPECULATION),
    "guided_decoding_backend": Only((None, "auto", "guidance"), _STRUCTURED),
    "structured_outputs_config": Only((None, {}), _STRUCTURED),
    **dict.fromkeys(
        ("reasoning_parser", "reasoning_parser_plugin"), Only((None, ""), "telling thoughts from answers is")
    ),
    "logits_processors": Only((None, []), "logits processors of one's own are"),
    "logits_processor_pattern": Only((None,), "logits processors of one's own are"),
    "logprobs_mode": Only(("raw_logprobs",), "any report but the model's own log-probabilities is"),
    "enable_sleep_mode": Only((False,), "sleeping is"),
    "otlp_traces_endpoint": Only((None,), "tracing is"),
    "collect_detailed_traces": Only((None,), "tracing is"),
    "enable_layerwise_nvtx_tracing": Only((False,), "tracing is"),
    "profiler_config": Only((None, {}), "a profiler is"),
    **dict.fromkeys(
        ("additional_config", "override_neuron_config"), Only((None, {}), "configuration for other platforms is")
    ),
}
"""Those of which some values alone mean what is done here."""
ON_DEVICE = Only(("cuda", "auto"), "any device but 'cuda', which PAGEDEC_ISA names, is")
"""What `device` may be there."""
_TEXT_ONLY, _ONE_PROCESS = "models write text here, and nothing else", "there are no workers; `llm.engine` is at hand"
ABSENT = {
    **dict.fromkeys(
        ("from_engine_args", "from_vllm_config"), "engine arguments are given by name: `AsyncLLM(model, dtype=...)`"
    ),
    **dict.fromkeys(("embed", "encode", "classify", "score", "reward"), _TEXT_ONLY),
    **dict.fromkeys(
        ("sleep", "wake_up", "is_sleeping"), "`close` gives all memory back, and a new one loads the model again"
    ),
    **dict.fromkeys(("collective_rpc", "apply_model", "llm_engine"), _ONE_PROCESS),
    **dict.fromkeys(
        ("start_profile", "stop_profile"), "`llm.engine.stats` has the seconds of all steps by their parts"
    ),
    **dict.fromkeys(
        ("pause_generation", "resume_generation"), "what is not to run yet is not sent yet; closing a stream aborts it"
    ),
    **dict.fromkeys(
        ("model_config", "get_model_config", "get_vllm_config"), "`llm.config` has the engine arguments by their groups"
    ),
    "get_metrics": "`llm.engine.stats` has the engine's counts and seconds, `output.metrics` a request's",
    "set_tokenizer": "the argument `tokenizer` names another one",
    "preprocess_chat": "`llm.get_tokenizer().apply_chat_template` makes a chat's prompt",
    **dict.fromkeys(("reset_mm_cache", "reset_encoder_cache"), _NO_MEDIA),
}
"""Methods of vLLM's that there are not, with what there is."""
