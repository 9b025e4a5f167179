"""Every key of a DeepSpeed configuration, and what stands for it here.

The one source of `onefold.from_deepspeed` and of the table in docs/coming-from/deepspeed.md. Names
are those of DeepSpeed 0.19.8, and older ones that configurations still hold.
"""

import re
from collections.abc import Iterator
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


_TABLE = """
# Stages
argument | `stage=`; `"auto"` is the lowest that fits | ~: stage
silent | none: each unit is gathered in one message, and the next one is prefetched | ~:
    reduce_bucket_size allgather_bucket_size allgather_partitions use_multi_rank_bucket_allreduce
    [stage3_]prefetch_bucket_size [stage3_]allgather_sequential
    [stage3_]use_all_reduce_for_fetch_params
silent | none: always so | ~: contiguous_gradients reduce_scatter overlap_comm round_robin_gradients
    parameter_alignment ignore_unused_parameters load_from_fp32_weights memory_efficient_linear
silent | none: nothing of torch is patched | ~: override_module_apply
silent | none: `clip_grad_norm_` returns the norm | ~: compute_grad_norm
silent | none: a unit is resharded after its last use | ~: [stage3_]max_live_parameters
    [stage3_]max_reuse_distance
silent | none: small parameters are gathered with their unit | ~:
    [stage3_]param_persistence_threshold [stage3_]model_persistence_threshold
none | `units=`: a list of modules, or a predicate | ~: [stage3_]module_granularity_threshold
none | `units=`: a list of modules, or a predicate | ~.leaf_module: classes names name_suffixes
silent | `onefold.save_pretrained` gathers when you call it | ~:
    [stage3_]gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
silent | none: steps go unit by unit | ~: sub_group_size
silent | `onefold.load`: any number of ranks | ~: elastic_checkpoint pipeline_loading_checkpoint
silent | none: there is no trace, and checks always run | ~: log_trace_cache_warnings
    enable_sanity_checks legacy_stage1
# Offload
argument | `offload=Offload(parameters="cpu")`, or `"disk"` | ~.offload_param: device
argument | `offload=Offload(disk=PATH)` | ~.offload_param: nvme_path
silent | none: buffers follow the units' sizes | ~.offload_param: buffer_count buffer_size
    max_in_cpu
silent | none: staging buffers are pinned on GPUs | ~.offload_param: pin_memory
argument | `offload=Offload(optimizer="cpu")`, or `"disk"` | ~.offload_optimizer: device
argument | `offload=Offload(disk=PATH)` | ~.offload_optimizer: nvme_path
argument | `offload=Offload(fraction=RATIO)` | ~.offload_optimizer: ratio
silent | none: buffers follow the units' sizes | ~.offload_optimizer: buffer_count fast_init
silent | none: staging buffers are pinned on GPUs | ~.offload_optimizer: pin_memory
silent | none: copies and compute overlap where the device can | ~.offload_optimizer: pipeline_read
    pipeline_write pipeline
none | `Offload(step_in_backward=True)` steps during backward, too | ~.offload_optimizer:
    super_offload
silent | none: the thread pool of torch | ~.offload_optimizer: cpuadam_cores_perc
argument | `offload="optimizer"` | ~: cpu_offload
argument | `offload=Offload(parameters="cpu")` | ~: cpu_offload_param
silent | none: staging buffers are pinned on GPUs | ~: cpu_offload_use_pin_memory
none | none: every step is exact, with no gradient left for later | ~: zenflow.*
none | none: all moments of an optimizer are in one tier | ~: save_muon_momentum_buffer_in_memory
silent | none: files are mapped, without libaio | aio: block_size queue_depth intra_op_parallelism
    thread_count single_submit overlap_events use_gds
# Communication
argument | `wire=Wire(weights="int8")` | ~: zero_quantized_weights
argument | `wire=Wire(gradients="int4")`; `"zero++"` with both others | ~: zero_quantized_gradients
argument | `wire=Wire(secondary="weights")`, with several nodes; nothing on one host | ~:
    zero_hpz_partition_size
none | frozen weights: by default in their own dtype; `Precision(frozen="int8")` packs them | ~:
    zero_quantized_nontrainable_weights
argument | `wire="replicas"` (gone in 0.19) | ~: mics_shard_size
silent | none: the mesh decides (gone in 0.19) | ~: mics_hierarchical_params_gather
argument | `wire=Wire(feedback=True)` (gone in 0.19) | ~: zeropp_loco_param.*
none | none: gradients are sent in the compute dtype | communication_data_type
silent | none: sums are fp32, in rank order | prescale_gradients gradient_predivide_factor
    disable_allgather
refused | `"mean"` only; multiply the loss for a sum | gradient_allreduce_op
none | none: gradients are dense (gone in 0.19) | sparse_gradients
# Precision
argument | `precision="bf16"` | bf16: enabled
silent | none: always so | bf16: immediate_grad_update
silent | none: gradients are as in plain PyTorch | bf16: check_grad_overflow check_overflow
none | none: masters and moments are fp32; in bf16 with a bf16 module and
    `Precision(master=torch.bfloat16)` | bf16: bf16_master_weights_and_grads bf16_optimizer_states
argument | `precision="bf16"` | bfloat16: enabled
argument | `precision="fp16"`, and `onefold.GradScaler` in your loop | fp16: enabled
loop | `onefold.GradScaler(...)` in your loop | fp16: loss_scale initial_scale_power
    loss_scale_window hysteresis consecutive_hysteresis min_loss_scale
silent | none: inputs of a unit are cast | fp16: auto_cast
none | none: masters are fp32 | fp16: fp16_master_weights_and_grads
argument | `precision=Precision(reduce=DTYPE)` | data_types: grad_accum_dtype
argument | `precision=Precision(compute=DTYPE)` | data_types: param_dtype
argument | `precision=Precision(buffers=DTYPE)` | data_types: buffer_dtype
none | none: buffers keep their own dtype anyway | data_types: keep_in_fp32_modules
loop | `torch.autocast` in your loop, with no `precision=` | torch_autocast.*
refused | `precision="bf16"` (Apex is gone in 0.19) | amp.*
# Training loop and everything else
loop | your `DataLoader` | train_batch_size train_micro_batch_size_per_gpu dataloader_drop_last
loop | `with onefold.accumulate(model):` around all micro-batches but the last; divide the loss |
    gradient_accumulation_steps
silent | `onefold.accumulate` names the boundary | managed_gradient_accumulation
loop | `torch.nn.utils.clip_grad_norm_(model.parameters(), VALUE)`; DeepSpeed 0.19 clips at 1.0
    without this key | gradient_clipping
loop | a `torch.optim` optimizer, passed to `shard` | optimizer.*
loop | a `torch.optim.lr_scheduler` | scheduler.*
silent | none: a probe decides how an optimizer is stepped | zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer
loop | `torch.utils.checkpoint` around a block | activation_checkpointing: partition_activations
    number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary
loop | `shard(offload=Offload(activations="cpu"))` with `torch.utils.checkpoint` |
    activation_checkpointing: cpu_checkpointing
silent | `onefold.record` | activation_checkpointing: profile
silent | `onefold.save` and `onefold.load` | checkpoint.* nebula.* datastates_ckpt.* elasticity.*
loop | `torch.compile` | compile.*
loop | your script | data_efficiency.* curriculum_learning.* progressive_layer_drop.*
silent | `onefold.report` and `onefold.record` | steps_per_print wall_clock_breakdown
    memory_breakdown dump_state log_level timers.* flops_profiler.* comms_logger.* tensorboard.*
    wandb.* csv_monitor.* comet.* monitor_config.* disable_python_gc vocabulary_size
silent | `onefold.plan` | autotuning.*
refused | none in `shard`: ranks would be counted as data-parallel | tensor_parallel.* pipeline.*
    expert_parallel.* sequence_parallel_size
refused | none in `shard`: weights stay in their own dtype | weight_quantization.*
    compression_training.* quantize_training.*
silent | none: there are no such ranks | seq_parallel_communication_data_type
    use_data_before_expert_parallelism
none | none: the model generates as it is | hybrid_engine.*
refused | none: the module decides (gone in 0.19) | sparse_attention.* eigenvalue.*
silent | none: `torch.cuda.graphs` in your script (gone in 0.19) | graph_harvesting
"""
"""Rows of fate, of what stands for the keys here, and of their names, after their common section.

`~` is the section `zero_optimization`, `[stage3_]` a beginning that may be left out.
"""


def _sections() -> Iterator[tuple[str, tuple[ConfigKey, ...]]]:
    for part in _TABLE.split("\n# ")[1:]:
        title, *rows = re.split(r"\n(?! )", part.strip())
        yield title, tuple(key for row in rows for key in _keys(" ".join(row.split())))


def _keys(row: str) -> Iterator[ConfigKey]:
    fate, here, named = row.split(" | ")
    section, _, names = named.replace("~", "zero_optimization").rpartition(": ")
    for name in names.split():
        short = name.removeprefix("[stage3_]")
        for own in (name,) if short == name else (f"stage3_{short}", short):
            yield ConfigKey(f"{section}.{own}" if section else own, Fate(fate), here)


SECTIONS: dict[str, tuple[ConfigKey, ...]] = dict(_sections())
"""Keys under the headings of the page."""

KEYS: dict[str, ConfigKey] = {key.name: key for keys in SECTIONS.values() for key in keys}
