"""What the plugin hooks, overrides and calls in SGLang, with the parameters that it expects there.

Written down from the wheels of 0.5.22 and 0.5.23, annotations left out. A tuple lists what different releases
have; ``None`` in it means that a release does not have the function.
"""

from __future__ import annotations

Expected = str | tuple[str | None, ...]

_ALLOC = "self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens"

POOL = "sglang.srt.mem_cache.hisparse_memory_pool.HiSparseDSATokenToKVPool"
ALLOCATOR = "sglang.srt.mem_cache.allocator.hisparse.HiSparseTokenToKVPoolAllocator"
COORDINATOR = "sglang.srt.managers.hisparse_coordinator.HiSparseCoordinator"
KV_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
POOL_CONFIGURATOR = "sglang.srt.model_executor.pool_configurator"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
TOPK = "sglang.srt.layers.attention.dsa.dsa_topk_backend.DSATopKBackend"
GRAPH_VARIANTS = "sglang.srt.layers.attention.graph_variants"
GRAPH_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
OBSERVER = "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver"

SIGNATURES: dict[str, dict[str, Expected]] = {
    "sglang.srt.arg_groups.hisparse_hook": {
        "validate_hisparse": "server_args",
        "resolving_view": "server_args",
    },
    "sglang.srt.arg_groups.overrides": {
        "declare_resolution": "server_args, source, **fields",
        "model_config_of": "server_args",
        "record_of": "view",
    },
    "sglang.kernels.ops.attention.dsv4.topk": {
        "plan_topk_v2": (
            "seq_lens, static_threshold=-1, *, out=None",
            "seq_lens, static_threshold=-1",
        ),
        "topk_transform_paged_v2": (
            "scores, seq_lens, page_tables, out_page_indices, page_size, metadata, out_raw_indices=None"
        ),
    },
    TOPK: {
        "should_use_topk_v2": "self",
        "topk_transform": (
            "self, logits, lengths, topk, topk_transform_method, attn_metadata, cu_seqlens_q_topk=None, "
            "topk_indices_offset=None, row_starts=None, batch_idx_list=None, force_unfused_topk=False"
        ),
    },
    GRAPH_VARIANTS: {
        "create_attention_graph_variants": "hf_config",
    },
    GRAPH_RUNNER: {
        "_resolve_attention_variant": "self, forward_batch, capture_batch_size",
    },
    "sglang.srt.model_executor.runner_utils.capture_mode": {
        "get_capture_attention_variant": "",
    },
    "sglang.srt.configs.model_config": {
        "dsa_layer_skips_topk": "config, layer_id",
    },
    KV_CONFIGURATOR: {
        "_should_elide_dsa_index_k": "*, is_draft_worker",
    },
    POOL_CONFIGURATOR: {
        "_get_dsa_cache_layer_ids": "kvc, num_layers",
    },
    f"{POOL_CONFIGURATOR}.DefaultPoolConfigurator": {
        "_compute_dsa_indexer_cell_size": "self, *, kvc, num_layers, allocate_all_layers=False",
    },
    SCHEDULER: {
        "get_next_batch_to_run": "self, running_batch, last_batch",
        "get_prefill_adder_class": "self",
        "init_metrics_collector": "self",
        "init_model_worker": "self",
    },
    BATCH: {
        "prepare_for_decode": "self",
    },
    MODEL_RUNNER: {
        "_forward_raw": (
            "self, forward_batch, pp_proxy_tensors, reinit_attn_backend=False, split_forward_count=1"
        ),
    },
    OBSERVER: {
        "get_pool_stats": "self",
    },
    "sglang.srt.managers.scheduler_components.pool_stats_observer.PoolStats": {
        "get_decode_usage_msg_parts": "self",
    },
    POOL: {
        "__init__": (
            "self, size, page_size, kv_lora_rank, dtype, qk_rope_head_dim, layer_num, device, "
            "index_head_dim, enable_memory_saver, kv_cache_dim, start_layer=None, end_layer=None, "
            "index_kpool=1, index_kpool_compress=False, tail_extra_slots=0, max_running_requests=None, "
            "skip_topk_layers=None, host_to_device_ratio=2"
        ),
        "get_cpu_copy": "self, indices, mamba_indices=None, req_pool_index=None",
        "get_mla_kv_buffer": "self, layer, loc, dst_dtype=None",
        "load_cpu_copy": "self, kv_cache_cpu, indices, mamba_indices=None, req_pool_index=None",
        "register_mapping": "self, full_to_hisparse_device_index_mapping",
        "set_kv_buffer": "self, layer, loc_info, cache_k, cache_v",
        "set_mla_kv_buffer": "self, layer, loc_info, cache_k_nope, cache_k_rope",
        "translate_loc_from_full_to_hisparse_device": "self, full_indices",
        "translate_loc_to_hisparse_device": "self, compressed_indices",
    },
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool": {
        "_clear_buffers": "self",
        "_create_buffers": "self",
        "set_kv_buffer": "self, layer, loc_info, cache_k, cache_v, layer_id_override=None",
        "set_mla_kv_buffer": "self, layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override=None",
    },
    ALLOCATOR: {
        "__init__": "self, size, page_size, dtype, device, kvcache, need_sort, host_to_device_ratio=2",
        "alloc": "self, need_size",
        "alloc_decode": "self, seq_lens, seq_lens_cpu, last_loc",
        "alloc_device_buffer": "self, allocated_indices, need_size",
        "alloc_extend": _ALLOC,
        "alloc_logical_only": _ALLOC,
        "available_size": "self",
        "check_decode_capacity": "self, *, num_tokens, tree_cache, requests=None, spec_algorithm=None",
        "clear": "self",
        "configure_spec_scratch": "self, capacity, *, device_buffer_size=0",
        "create_prefill_budget": "self, tree_cache, *, num_mixed_decode_tokens=0",
        "evict_to_free_tokens": "self, tree_cache, num_tokens",
        "free": "self, free_index",
        "free_full": "self, free_index",
        "free_group_begin": "self",
        "free_group_end": "self",
        "free_hisparse": "self, free_indices",
        "free_hisparse_indices": "self, buffer_indices",
        "free_segment": "self, free_index, *, start_pos",
        "free_segments": "self, segments",
        "get_extend_allocation_demand": (
            "self, prefix_lens_cpu, seq_lens_cpu, *, conservative_num_tokens, shard_size",
            None,
        ),
        "get_kvcache": "self",
        "max_new_tokens_for_memory": (
            "self, input_tokens, max_new_tokens, *, token_capacity, sliding_window_size, chunk_size"
        ),
        "request_slot_reserve": "self, *, has_req_pool_slot, prefill_tokens=0",
    },
    COORDINATOR: {
        "__init__": (
            "self, req_to_token_pool, token_to_kv_pool_allocator, top_k, device_buffer_size, device, "
            "tp_group, host_to_device_ratio=2, swap_in_block_size=960, shared_index_layers=None, "
            "num_draft_tokens=0"
        ),
        "abort_staging_request": "self, req",
        "admit_request_direct": "self, req",
        "admit_request_into_staging": "self, req",
        "allocate_spec_scratch": "self, req_pool_indices",
        "collect_ready_reqs": "self",
        "commit_spec_accept_tokens": "self, batch, accept_indices",
        "destroy": "self",
        "get_token_stats": "self",
        "has_ongoing_staging": "self",
        "host_token_len": "self, kv_allocated_len",
        "map_last_loc_to_buffer": (
            "self, seq_lens, out_cache_loc, req_pool_indices, seq_lens_cpu, req_pool_indices_cpu"
        ),
        "prepare_spec_verify": "self, batch",
        "request_finished": "self, req",
        "retract_req": "self, req",
        "set_decode_producer_stream": "self, stream",
        "swap_in_selected_pages": "self, req_pool_indices, compressed_seq_lens, top_k_result, layer_id",
        "wait_for_pending_backup": "self",
    },
    "sglang.srt.mem_cache.registry": {
        "create_unified_radix_cache": "ctx, *, cache_class=None",
        "register_radix_cache_backend": "name, factory",
    },
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache": {
        "__init__": "self, params",
        "checkpoint": "self, req, *, up_to, **kwargs",
        "checkpoint_into_tree": "self, req, *, up_to, **kwargs",
        "claim_kv_row": "self, req",
        "dec_lock_ref": "self, node_id, params, skip_swa=False",
        "evict": "self, params",
        "evict_for_alloc": ("self, params", "self, params, *, allocation_reclaim_satisfied=None"),
        "evictable_size": "self",
        "free_kv_row": "self, kv, ranges",
        "inc_lock_ref": "self, node_id, skip_lock_components=()",
        "init_load_back": "self, params",
        "insert": "self, params",
        "lock": "self, node_id, skip_lock_components=()",
        "match_prefix": "self, params",
        "on_release": "self, req, *, checkpointed",
        "path_device_indices": "self, node",
        "prefix_device_indices": "self, req",
        "protected_size": "self",
        "reset": "self",
        "root_node_handle": "self, extra_key=None",
        "supports_prefix_sharing": "self",
        "unlock": "self, lock",
    },
    "sglang.srt.managers.schedule_policy.PrefillAdder": {
        "__init__": (
            "self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, "
            "rem_input_tokens, rem_chunk_tokens, num_mixed_decode_tokens=0, "
            "priority_scheduling_preemption_threshold=0, max_prefill_bs=0, max_running_requests=None, "
            "prefill_max_requests=None, prefill_delayer_single_pass=None, dllm_config=None, "
            "waiting_queue_len=0, prefill_tile_block_m=64"
        ),
        "_commit_prefill_admission": "self, req, admission, mamba_gap_reserve",
        "_select_prefill_admission": (
            "self, req, *, total_tokens, host_hit_length, swa_host_hit_length, truncation_align_size, "
            "has_chunked_req=False"
        ),
        "add_chunked_req": "self, req",
        "add_one_req": "self, req, has_chunked_req, truncation_align_size",
        "add_one_req_ignore_eos": "self, req",
        "preempt_to_schedule": "self, req",
    },
}
