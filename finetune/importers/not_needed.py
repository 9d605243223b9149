"""Keys of other toolkits that do not change what is learned here, with what replaces them."""

import re

NOT_NEEDED = {
    "--output, --resume and --timeout are options of `finetune train` and `finetune launch`":
        "output_dir overwrite_output_dir run_name resume_from_checkpoint do_train ddp_timeout "
        "auto_resume_from_checkpoints",
    "metrics.jsonl has every step, with tokens, speed and memory; see loss.png and trackers":
        r"logging_\w+ log_\w+ include_num_input_tokens_seen include_tokens_per_second plot_loss "
        r"total_num_tokens (use_)?otel_metrics\w* metric_logger\.\w+ disable_tqdm",
    "rows are prepared once, in parallel, and read from memory-mapped files":
        r"dataloader_\w+ preprocessing_\w+ dataset_prepared_path dataset_processes "
        "dataset_num_proc dataset_keep_in_memory load_from_cache_file lazy_tokenize "
        "overwrite_cache tokenized_path trust_remote_code_dataset",
    "rows are shuffled, micro-batches are by length, packs hold whole documents that do not attend "
    "to each other, and padding is never trained":
        r"shuffle shuffle_merged_datasets shuffle_dataset group_by_length eval_sample_packing "
        r"sample_packing_(eff_est|group_size|bin_size) streaming_multipack_buffer_size "
        "pretrain_multipack_attn batch_flattening padding_free pad_to_sequence_len "
        "pad_to_multiple_of ignore_pad_token_for_loss",
    "columns that a format does not read are counted by name": "remove_unused_columns",
    "the launcher starts the processes, the backend places the model and divides it":
        r"num_processes config_file accelerate_config ddp_backend local_rank use_cpu no_cuda "
        r"ray_\w+ use_ray fsdp_\w+ device device_map max_memory low_cpu_mem_usage low_cpu_ram "
        r"experimental_skip_move_to_device custom_sharded_layers data_parallel_\w+ "
        r"tensor_parallel_plan\._component_ memory_efficient_fsdp_wrap sequence_parallel "
        "use_distributed_optimizer overlap_param_gather overlap_grad_reduce "
        "moe_token_dispatcher_type ddp_find_unused_parameters",
    "kernels of the same computation are chosen by kernels, products follow PyTorch's settings":
        r"(use_)?liger_\w+ enable_liger_kernel use_kernels lora_(mlp|qkv|o)_kernel "
        "flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_cross_entropy cut_cross_entropy "
        r"fused_attn_kernel tiled_mlp flash_optimum gemma4_hybrid_attn_impl compile "
        r"torch_compile\w* flex_attn_compile_kwargs experts_implementation experts_impl "
        "use_scattermoe use_sonicmoe use_v1_kernels bias_activation_fusion apply_rope_fusion "
        "moe_grouped_gemm tuner_backend use_logits_to_keep loss.num_output_chunks "
        "optimizer.fused optimizer_in_bwd tf32",
    "recomputation gives equal gradients":
        "gradient_checkpointing_kwargs use_reentrant_gc use_unsloth_gc ac_mode ac_option",
    "read from the files of the model and its tokenizer":
        r"tokenizer_type tokenizer_legacy tokenizer_use_fast use_fast_tokenizer "
        r"tokenizer\.(_component_|path|(vocab|merges|special_tokens)_path|\w+_file) "
        r"tokenizer\.prompt_template is_\w+_derived_model cls_model_config model_type task_type "
        "check_model eot_tokens lora_task_type lora_fan_in_fan_out resize_token_embeddings_to_32x",
    "evaluations report the loss over all held-out rows; see evaluation.metrics, `finetune eval`":
        r"do_eval do_predict predict_with_generate eval_on_each_dataset do_causal_lm_eval "
        r"eval_causal_lm_metrics eval_table_size eval_max_new_tokens eval_use_evalscope "
        r"eval_dataset(_args)? eval_limit generate_during_eval",
    "a checkpoint holds what resuming needs, final/ what other libraries load":
        r"save_only_model save_safetensors save_adapter_weights_only save_every_n_\w+ "
        "load_best_model_at_end export_hf_on_finish lora_on_cpu",
    "answers are sampled by the model that is trained, and completions.jsonl has some; "
    "vllm_server_base_url names a `vllm serve`":
        r"use_vllm vllm_\w+ move_model_batches sleep_level offload_model offload_optimizer "
        "gc_collect_after_offload ds3_gather_for_generation num_completions_to_print",
    "log-probabilities of the reference are computed once, before the first step":
        "precompute_ref_log_probs ref_model_quantization_bit",
    "the hub's own login and cache are used":
        "hf_use_auth_token cache_dir use_hf use_modelscope_hub use_openmind_hub",
    "saving.push_to names the repository; it is private": r"push_to_hub\w* hub_\w+",
    "set the tracker's own environment variables": r"(wandb|mlflow|comet)_\w+",
    "only the trackers of the recipe are used; none changes a loss":
        r"swanlab_\w+ use_swanlab use_wandb trackio_\w+",
    "see `finetune inspect`": "debug print_param_status",
    "every key is always checked": "strict",
    "axolotl does not read it": "base_model_ignore_patterns eta_min full_finetune test_value",
}  # fmt: skip
"""Patterns of keys with spaces between, by the reason."""


def reason_of(key: str) -> str | None:
    """Why a key is not needed; None if it may be."""
    found = (
        reason
        for reason, patterns in NOT_NEEDED.items()
        if any(re.fullmatch(pattern, key) for pattern in patterns.split())
    )
    return next(found, None)
