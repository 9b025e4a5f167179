"""Every key of a DeepSpeed configuration, and what stands for it here.

The one source of `onefold.from_deepspeed` and of the table in docs/coming-from/deepspeed.md. Names
are those of DeepSpeed 0.19.8, and older ones that configurations still hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Fate(StrEnum):
    """What `from_deepspeed` does with a key that is set."""

    ARGUMENT = "argument"  # it becomes a part of an argument of `shard`
    LOOP = "loop"  # the script has to do it; the warning says how
    NONE = "none"  # it has no counterpart; the warning says why
    SILENT = "silent"  # as NONE, and nothing of the training depends on it
    REFUSED = "refused"  # without it another model or mean would be trained: an error


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key.

    `name` is dotted; one that ends with ".*" is a section whose keys are not looked at. `here`
    says, in Markdown, what stands for it.
    """

    name: str
    fate: Fate
    here: str


_ZERO, _PARAM, _OPTIMIZER = (
    "zero_optimization",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
)
_UNIT = "none: a unit travels in one message, and one unit is gathered ahead"
_ALWAYS = "none: always so"
_POOL = "none: buffers follow the units' sizes"
_COPIES = "none: copies and compute overlap where the device can"
_AIO = "none: files are mapped, without libaio"
_SCALER = "`onefold.GradScaler(...)` in your loop"
_OWN = "your script"


def _under(section: str, fate: Fate, here: str, *names: str) -> tuple[ConfigKey, ...]:
    return tuple(ConfigKey(f"{section}.{name}" if section else name, fate, here) for name in names)


_STAGES = (
    ConfigKey(f"{_ZERO}.stage", Fate.ARGUMENT, '`stage=`; `"auto"` is the lowest that fits'),
    *_under(_ZERO, Fate.SILENT, _UNIT, "reduce_bucket_size", "allgather_bucket_size",
            "allgather_partitions", "use_multi_rank_bucket_allreduce",
            "stage3_prefetch_bucket_size",
            "prefetch_bucket_size", "stage3_allgather_sequential", "allgather_sequential",
            "stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params"),
    *_under(_ZERO, Fate.SILENT, _ALWAYS, "contiguous_gradients", "reduce_scatter", "overlap_comm",
            "round_robin_gradients", "parameter_alignment", "ignore_unused_parameters",
            "load_from_fp32_weights", "memory_efficient_linear"),
    *_under(_ZERO, Fate.SILENT, "none: nothing of torch is patched", "override_module_apply"),
    *_under(_ZERO, Fate.SILENT, "none: `clip_grad_norm_` returns the norm", "compute_grad_norm"),
    *_under(_ZERO, Fate.SILENT, "none: a unit is resharded after its last use",
            "stage3_max_live_parameters", "max_live_parameters", "stage3_max_reuse_distance",
            "max_reuse_distance"),
    *_under(_ZERO, Fate.SILENT, "none: small parameters travel with their unit",
            "stage3_param_persistence_threshold", "param_persistence_threshold",
            "stage3_model_persistence_threshold", "model_persistence_threshold"),
    *_under(_ZERO, Fate.NONE, "`units=`: a list of modules, or a predicate",
            "stage3_module_granularity_threshold", "module_granularity_threshold",
            "leaf_module.classes", "leaf_module.names", "leaf_module.name_suffixes"),
    *_under(_ZERO, Fate.SILENT, "`onefold.save_pretrained` gathers when you call it",
            "stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save"),
    *_under(_ZERO, Fate.SILENT, "none: steps go unit by unit", "sub_group_size"),
    *_under(_ZERO, Fate.SILENT, "`onefold.load`: any number of ranks", "elastic_checkpoint",
            "pipeline_loading_checkpoint"),
    *_under(_ZERO, Fate.SILENT, "none: there is no trace, and checks always run",
            "log_trace_cache_warnings", "enable_sanity_checks", "legacy_stage1"),
)  # fmt: skip

_OFFLOAD = (
    ConfigKey(f"{_PARAM}.device", Fate.ARGUMENT,
              '`offload=Offload(parameters="cpu")`, or `"disk"`'),
    ConfigKey(f"{_PARAM}.nvme_path", Fate.ARGUMENT, "`offload=Offload(disk=PATH)`"),
    *_under(_PARAM, Fate.SILENT, _POOL, "buffer_count", "buffer_size", "max_in_cpu"),
    *_under(_PARAM, Fate.SILENT, "none: staging buffers are pinned on GPUs", "pin_memory"),
    ConfigKey(f"{_OPTIMIZER}.device", Fate.ARGUMENT,
              '`offload=Offload(optimizer="cpu")`, or `"disk"`'),
    ConfigKey(f"{_OPTIMIZER}.nvme_path", Fate.ARGUMENT, "`offload=Offload(disk=PATH)`"),
    ConfigKey(f"{_OPTIMIZER}.ratio", Fate.ARGUMENT, "`offload=Offload(fraction=RATIO)`"),
    *_under(_OPTIMIZER, Fate.SILENT, _POOL, "buffer_count", "fast_init"),
    *_under(_OPTIMIZER, Fate.SILENT, "none: staging buffers are pinned on GPUs", "pin_memory"),
    *_under(_OPTIMIZER, Fate.SILENT, _COPIES, "pipeline_read", "pipeline_write", "pipeline"),
    *_under(_OPTIMIZER, Fate.NONE, "`Offload(step_in_backward=True)` steps during backward, too",
            "super_offload"),
    *_under(_OPTIMIZER, Fate.SILENT, "none: the thread pool of torch", "cpuadam_cores_perc"),
    ConfigKey(f"{_ZERO}.cpu_offload", Fate.ARGUMENT, '`offload="optimizer"`'),
    ConfigKey(f"{_ZERO}.cpu_offload_param", Fate.ARGUMENT, '`offload=Offload(parameters="cpu")`'),
    *_under(_ZERO, Fate.SILENT, "none: staging buffers are pinned on GPUs",
            "cpu_offload_use_pin_memory"),
    *_under(_ZERO, Fate.NONE, "none: every step is exact, with no gradient left for later",
            "zenflow.*"),
    *_under(_ZERO, Fate.NONE, "none: all moments of an optimizer rest in one tier",
            "save_muon_momentum_buffer_in_memory"),
    *_under("aio", Fate.SILENT, _AIO, "block_size", "queue_depth", "intra_op_parallelism",
            "thread_count", "single_submit", "overlap_events", "use_gds"),
)  # fmt: skip

_WIRE = (
    ConfigKey(f"{_ZERO}.zero_quantized_weights", Fate.ARGUMENT, '`wire=Wire(weights="int8")`'),
    ConfigKey(f"{_ZERO}.zero_quantized_gradients", Fate.ARGUMENT,
        '`wire=Wire(gradients="int4")`; `"zero++"` with both others'),
    ConfigKey(f"{_ZERO}.zero_hpz_partition_size", Fate.ARGUMENT,
        '`wire=Wire(secondary="weights")`, with several nodes; nothing on one host'),
    ConfigKey(f"{_ZERO}.zero_quantized_nontrainable_weights", Fate.NONE,
        "none: frozen weights rest in their own dtype"),
    ConfigKey(f"{_ZERO}.mics_shard_size", Fate.ARGUMENT,
        '`wire="replicas"` (gone in 0.19)'),
    *_under(_ZERO, Fate.SILENT, "none: the mesh decides (gone in 0.19)",
            "mics_hierarchical_params_gather"),
    ConfigKey(f"{_ZERO}.zeropp_loco_param.*", Fate.ARGUMENT,
              "`wire=Wire(feedback=True)` (gone in 0.19)"),
    ConfigKey("communication_data_type", Fate.NONE, "none: gradients travel in the compute dtype"),
    *_under("", Fate.SILENT, "none: sums are fp32, in rank order", "prescale_gradients",
            "gradient_predivide_factor", "disable_allgather"),
    ConfigKey("gradient_allreduce_op", Fate.REFUSED, '`"mean"` only; multiply the loss for a sum'),
    *_under("", Fate.NONE, "none: gradients are dense (gone in 0.19)", "sparse_gradients"),
)  # fmt: skip

_PRECISION = (
    ConfigKey("bf16.enabled", Fate.ARGUMENT, '`precision="bf16"`'),
    *_under("bf16", Fate.SILENT, _ALWAYS, "immediate_grad_update"),
    *_under("bf16", Fate.SILENT, "none: gradients are as in plain PyTorch", "check_grad_overflow",
            "check_overflow"),
    *_under("bf16", Fate.NONE, "none: masters and moments are fp32; in bf16 with a bf16 module and "
            "`Precision(master=torch.bfloat16)`", "bf16_master_weights_and_grads",
            "bf16_optimizer_states"),
    ConfigKey("bfloat16.enabled", Fate.ARGUMENT, '`precision="bf16"`'),
    ConfigKey("fp16.enabled", Fate.ARGUMENT,
              '`precision="fp16"`, and `onefold.GradScaler` in your loop'),
    *_under("fp16", Fate.LOOP, _SCALER, "loss_scale", "initial_scale_power", "loss_scale_window",
            "hysteresis", "consecutive_hysteresis", "min_loss_scale"),
    *_under("fp16", Fate.SILENT, "none: inputs of a unit are cast", "auto_cast"),
    *_under("fp16", Fate.NONE, "none: masters are fp32", "fp16_master_weights_and_grads"),
    ConfigKey("data_types.grad_accum_dtype", Fate.ARGUMENT, "`precision=Precision(reduce=DTYPE)`"),
    ConfigKey("data_types.param_dtype", Fate.ARGUMENT, "`precision=Precision(compute=DTYPE)`"),
    ConfigKey("data_types.buffer_dtype", Fate.ARGUMENT, "`precision=Precision(buffers=DTYPE)`"),
    ConfigKey("data_types.keep_in_fp32_modules", Fate.NONE,
              "none: buffers keep their own dtype anyway"),
    *_under("", Fate.LOOP, "`torch.autocast` in your loop, with no `precision=`",
            "torch_autocast.*"),
    ConfigKey("amp.*", Fate.REFUSED, '`precision="bf16"` (Apex is gone in 0.19)'),
)  # fmt: skip

_LOOP = (
    *_under("", Fate.LOOP, "your `DataLoader`", "train_batch_size",
            "train_micro_batch_size_per_gpu", "dataloader_drop_last"),
    *_under("", Fate.LOOP, "`with onefold.accumulate(model):` around all micro-batches but the "
            "last; divide the loss", "gradient_accumulation_steps"),
    *_under("", Fate.SILENT, "`onefold.accumulate` names the boundary",
            "managed_gradient_accumulation"),
    *_under("", Fate.LOOP, "`torch.nn.utils.clip_grad_norm_(model.parameters(), VALUE)`; DeepSpeed "
            "0.19 clips at 1.0 without this key", "gradient_clipping"),
    *_under("", Fate.LOOP, "a `torch.optim` optimizer, passed to `shard`", "optimizer.*"),
    *_under("", Fate.LOOP, "a `torch.optim.lr_scheduler`", "scheduler.*"),
    *_under("", Fate.SILENT, "none: any optimizer of elements is stepped, without a flag",
            "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *_under("activation_checkpointing", Fate.LOOP, "`torch.utils.checkpoint` around a block",
            "partition_activations", "number_checkpoints", "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary"),
    *_under("activation_checkpointing", Fate.LOOP,
            '`shard(offload=Offload(activations="cpu"))` with `torch.utils.checkpoint`',
            "cpu_checkpointing"),
    *_under("activation_checkpointing", Fate.SILENT, "`onefold.record`", "profile"),
    *_under("", Fate.SILENT, "`onefold.save` and `onefold.load`", "checkpoint.*", "nebula.*",
            "datastates_ckpt.*", "elasticity.*"),
    *_under("", Fate.LOOP, "`torch.compile`", "compile.*"),
    *_under("", Fate.LOOP, _OWN, "data_efficiency.*", "curriculum_learning.*",
            "progressive_layer_drop.*"),
    *_under("", Fate.SILENT, "`onefold.report` and `onefold.record`", "steps_per_print",
            "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers.*",
            "flops_profiler.*", "comms_logger.*", "tensorboard.*", "wandb.*", "csv_monitor.*",
            "comet.*", "monitor_config.*", "disable_python_gc", "vocabulary_size"),
    *_under("", Fate.SILENT, "`onefold.plan`", "autotuning.*"),
    *_under("", Fate.REFUSED, "none in `shard`: ranks would be counted as data-parallel",
            "tensor_parallel.*", "pipeline.*", "expert_parallel.*", "sequence_parallel_size"),
    *_under("", Fate.REFUSED, "none in `shard`: weights rest in their own dtype",
            "weight_quantization.*", "compression_training.*", "quantize_training.*"),
    *_under("", Fate.SILENT, "none: there are no such ranks",
            "seq_parallel_communication_data_type", "use_data_before_expert_parallelism"),
    *_under("", Fate.NONE, "none: the model generates as it is", "hybrid_engine.*"),
    *_under("", Fate.REFUSED, "none: the module decides (gone in 0.19)", "sparse_attention.*",
            "eigenvalue.*"),
    *_under("", Fate.SILENT, "none: `torch.cuda.graphs` in your script (gone in 0.19)",
            "graph_harvesting"),
)  # fmt: skip

SECTIONS: dict[str, tuple[ConfigKey, ...]] = {
    "Stages": _STAGES,
    "Offload": _OFFLOAD,
    "The wire": _WIRE,
    "Precision": _PRECISION,
    "The loop, and the rest": _LOOP,
}
"""Keys under the headings of the page."""

KEYS: dict[str, ConfigKey] = {key.name: key for keys in SECTIONS.values() for key in keys}
