"""Flags of `trl sft` in the words of `onefold finetune`, for hints; names alone, without TRL.

Flags of this command under another name, choices that are fixed here, and flags that it lacks.
"""

from __future__ import annotations

from onefold.pages import page

_STAGE = "--stage 0 to 3"
_RATE = "fixed: the rate rises in 3 % of the steps, and falls by a cosine to a tenth"
_OPTIMIZER = "fixed: AdamW with betas of 0.9 and 0.999, and no weight decay"
_ALL_LINEARS = "fixed: --lora R adapts all Linears, with alpha 2 R and without dropout"
_FILE = "--data FILE.jsonl, one file on this machine"
_MEASURED = "--held-out F, measured before and after training"
_SAVED = "--checkpoint DIR, with --every N for more than the last step"
_LOGGED = "fixed: every step is logged; --json prints all losses"
_BITS = "--lora 16 --rest int4, which is not NF4"
_UPLOAD = "another command: `hf upload NAME OUT` sends the folder of --out OUT"
_IN_FOLDER = "what the tokenizer in --model DIR says"

OURS = {
    "model_name_or_path": "--model DIR", "output_dir": "--out DIR",
    "model_revision": "--model DIR, with the files of that revision",
    "chat_template_path": "chat_template.jinja in --model DIR",
    "eos_token": _IN_FOLDER, "pad_token": _IN_FOLDER,
    "dataset_name": _FILE, "dataset_config": _FILE, "dataset_train_split": _FILE,
    "dataset_streaming": _FILE, "streaming": _FILE, "datasets": _FILE,
    "dataset_text_field": "fixed: rows have 'text', 'prompt' and 'completion', or 'messages'",
    "per_device_train_batch_size": "--batch N",
    "per_device_eval_batch_size": "--batch N, for held-out rows too",
    "gradient_accumulation_steps": "--accumulate N", "learning_rate": "--lr X",
    "num_train_epochs": "--epochs X", "max_steps": "--steps N", "max_grad_norm": "--clip X",
    "max_length": "--seq N", "max_seq_length": "--seq N",
    "truncation_mode": "fixed: a row keeps its first --seq tokens",
    "packing": "--packing", "eval_packing": "--packing, for held-out rows too",
    "seed": "--seed N", "data_seed": "--seed N", "shuffle_dataset": "--seed N",
    "train_sampling_strategy": "fixed: rows come in an order drawn by --seed N",
    "resume_from_checkpoint": "--checkpoint DIR --resume",
    "dataset_test_split": _MEASURED, "test_split_size": _MEASURED, "do_eval": _MEASURED,
    "eval_strategy": _MEASURED, "evaluation_strategy": _MEASURED, "eval_steps": _MEASURED,
    "eval_delay": _MEASURED, "eval_on_start": _MEASURED,
    "save_strategy": _SAVED, "save_steps": _SAVED, "save_total_limit": "--keep K",
    "report_to": "--report-to NAME", "logging_strategy": _LOGGED, "logging_steps": _LOGGED,
    "logging_first_step": _LOGGED,
    "use_peft": "--lora 16", "lora_r": "--lora R", "lora_alpha": "--lora R, with alpha 2 R",
    "lora_dropout": _ALL_LINEARS, "lora_target_modules": _ALL_LINEARS,
    "lora_target_parameters": _ALL_LINEARS, "lora_modules_to_save": _ALL_LINEARS,
    "lora_task_type": "fixed: a model that continues text", "load_in_4bit": "--lora 16 --rest int4",
    "load_in_8bit": "--lora 16 --rest int8", "bnb_4bit_quant_type": _BITS,
    "use_bnb_nested_quant": _BITS, "bnb_4bit_quant_storage": _BITS,
    "bf16": "--precision bf16", "fp16": "--precision bf16", "dtype": "--precision bf16",
    "torch_dtype": "--precision bf16", "gradient_checkpointing": "--recompute",
    "gradient_checkpointing_kwargs": "--recompute", "activation_checkpointing": "--recompute",
    "activation_checkpointing_kwargs": "--recompute",
    "no_gradient_checkpointing": "the default: without --recompute only where nothing fits",
    "deepspeed": _STAGE, "fsdp": _STAGE, "fsdp_config": _STAGE,
    "accelerate_config": _STAGE, "accelerator_config": _STAGE,
    "parallelism_config": _STAGE, "num_processes": "--ranks N",
    "use_cpu": "automatic: ranks use CPUs where they see no GPU",
    "lr_scheduler_type": _RATE, "lr_scheduler_kwargs": _RATE, "warmup_steps": _RATE,
    "warmup_ratio": _RATE, "optim": _OPTIMIZER, "optim_args": _OPTIMIZER,
    "optim_target_modules": _OPTIMIZER, "weight_decay": _OPTIMIZER, "adam_beta1": _OPTIMIZER,
    "adam_beta2": _OPTIMIZER, "adam_epsilon": _OPTIMIZER,
    "completion_only_loss": "automatic: on for rows of prompt and completion",
    "assistant_only_loss": "automatic: on for messages, if the template has {% generation %}",
    "attn_implementation": "automatic: transformers chooses it",
    "trust_remote_code": "fixed: no code from --model DIR is run",
    "push_to_hub": _UPLOAD, "hub_token": _UPLOAD, "hub_private_repo": _UPLOAD,
    "hub_model_id": _UPLOAD, "hub_strategy": _UPLOAD, "hub_always_push": _UPLOAD,
    "hub_revision": _UPLOAD,
}  # fmt: skip
"""By the flag of `trl sft`, without dashes: how this command spells it, or what it does instead."""

ELSEWHERE = (
    "activation_offloading", "auto_find_batch_size", "average_tokens_across_devices",
    "batch_eval_metrics", "bf16_full_eval", "dataloader_drop_last", "dataloader_in_order",
    "dataloader_multiprocessing_context", "dataloader_num_workers",
    "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    "dataset_kwargs", "dataset_num_proc", "ddp_backend", "ddp_broadcast_buffers",
    "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout",
    "debug", "disable_tqdm", "do_predict", "do_train", "enable_jit_checkpoint",
    "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object",
    "fp16_full_eval", "full_determinism", "greater_is_better", "ignore_bias_buffers",
    "ignore_data_skip", "include_for_metrics", "include_num_input_tokens_seen", "label_names",
    "label_smoothing_factor", "length_column_name", "liger_kernel_config",
    "load_best_model_at_end", "local_rank", "log_level", "log_level_replica",
    "log_on_each_node", "logging_nan_inf_filter", "loss_type", "metric_for_best_model",
    "model_init_kwargs", "neftune_noise_alpha", "no_average_tokens_across_devices",
    "no_dataloader_in_order", "no_dataloader_pin_memory", "no_eval_do_concat_batches",
    "no_log_on_each_node", "no_logging_nan_inf_filter", "no_remove_unused_columns",
    "no_skip_memory_metrics", "packing_strategy", "pad_to_multiple_of", "padding_free",
    "prediction_loss_only", "project", "remove_unused_columns",
    "restore_callback_states_from_checkpoint", "router_aux_loss_coef", "run_name",
    "save_on_each_node", "save_only_model", "skip_memory_metrics", "tf32", "torch_compile",
    "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps",
    "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id", "use_cache", "use_dora",
    "use_liger_kernel", "use_rslora",
)  # fmt: skip
"""Flags of `trl sft` that this command lacks."""


def spellings() -> dict[str, str]:
    """Return what a hint says about each flag of `trl sft`, written with `_` or with `-`."""
    lacks = (
        "not offered, though `trl sft` has it: write a script with SFTTrainer and onefold.hf, as "
        f"{page('docs/guides/trl.md')} shows"
    )
    words = {**dict.fromkeys(ELSEWHERE, lacks), **OURS}
    return {
        f"--{name}": hint for flag, hint in words.items() for name in (flag, flag.replace("_", "-"))
    }
