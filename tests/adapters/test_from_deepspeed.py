"""DeepSpeed configurations become arguments of `shard`, and nothing of them is lost in silence."""

from __future__ import annotations

import json
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold import Offload, Precision, Wire
from onefold.adapters.deepspeed.keys import KEYS, SECTIONS, Fate
from tests.support.ranks import run_ranks

TOOL = Path(__file__).parents[2] / "docs" / "tools" / "deepspeed_keys.py"

FIELDS = {
    "zero_optimization": """stage contiguous_gradients reduce_scatter reduce_bucket_size
        use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm
        compute_grad_norm load_from_fp32_weights elastic_checkpoint zenflow sub_group_size
        cpu_offload_param cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size
        stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold
        model_persistence_threshold stage3_model_persistence_threshold max_live_parameters
        stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance
        gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save
        module_granularity_threshold stage3_module_granularity_threshold
        use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params allgather_sequential
        stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save
        ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment
        zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint
        override_module_apply log_trace_cache_warnings enable_sanity_checks
        save_muon_momentum_buffer_in_memory""",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.offload_param": """device nvme_path buffer_count buffer_size max_in_cpu
        pin_memory""",
    "zero_optimization.offload_optimizer": """device nvme_path buffer_count pin_memory pipeline_read
        pipeline_write fast_init ratio super_offload cpuadam_cores_perc""",
    "bf16": """enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
        bf16_optimizer_states""",
    "fp16": """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
        consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads""",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "aio": """block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds""",
    "activation_checkpointing": """partition_activations number_checkpoints
        contiguous_memory_optimization synchronize_checkpoint_boundary profile cpu_checkpointing""",
    "": """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        managed_gradient_accumulation gradient_clipping communication_data_type
        seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
        gradient_allreduce_op disable_allgather zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer optimizer scheduler steps_per_print wall_clock_breakdown
        memory_breakdown dump_state disable_python_gc vocabulary_size dataloader_drop_last
        log_level torch_autocast checkpoint tensor_parallel expert_parallel pipeline compile
        weight_quantization hybrid_engine data_efficiency flops_profiler autotuning comms_logger
        timers datastates_ckpt use_data_before_expert_parallelism tensorboard wandb csv_monitor
        comet""",
}
"""The fields of DeepSpeed 0.19.8's configuration classes, with their aliases."""


def converted(config: Any) -> tuple[dict[str, Any], str]:
    """The arguments, and the text of the warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = onefold.from_deepspeed(config)
    assert len(caught) <= 1
    return found, str(caught[0].message) if caught else ""


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/fast"}
CASES = [
    ({}, {"stage": 0}),
    (zero(), {"stage": 3}),
    (zero(stage="auto"), {"stage": "auto"}),
    (zero(stage=1, offload_optimizer=CPU), {"stage": 1, "offload": Offload(optimizer="cpu")}),
    (zero(offload_param=CPU), {"stage": 3, "offload": Offload(parameters="cpu")}),
    (
        zero(offload_param=CPU, offload_optimizer={**CPU, "ratio": 0.3}),
        {"stage": 3, "offload": Offload(optimizer="cpu", parameters="cpu", fraction=0.3)},
    ),
    (
        zero(offload_param=NVME, offload_optimizer={**NVME, "nvme_path": "/other"}),
        {
            "stage": 3,
            "offload": Offload(optimizer="disk", parameters="disk", disk=["/fast", "/other"]),
        },
    ),
    (
        zero(offload_param={"device": "none"}, offload_optimizer={"device": "none", "ratio": 1.0}),
        {"stage": 3},
    ),
    (zero(cpu_offload=True, stage=2), {"stage": 2, "offload": Offload(optimizer="cpu")}),
    (zero(cpu_offload_param=True), {"stage": 3, "offload": Offload(parameters="cpu")}),
    (zero(zero_quantized_weights=True), {"stage": 3, "wire": Wire(weights="int8")}),
    (zero(zero_quantized_gradients=True), {"stage": 3, "wire": Wire(gradients="int4")}),
    (zero(zero_hpz_partition_size=8), {"stage": 3, "wire": Wire(secondary="weights")}),
    (zero(zero_hpz_partition_size=1), {"stage": 3}),
    (zero(mics_shard_size=8), {"stage": 3, "wire": "replicas"}),
    (
        zero(zero_quantized_weights=True, zero_quantized_gradients=True, zero_hpz_partition_size=8),
        {"stage": 3, "wire": "zero++"},
    ),
    (
        zero(zero_quantized_gradients=True, zeropp_loco_param={"err_beta": 0.8}),
        {"stage": 3, "wire": Wire(gradients="int4", feedback=True)},
    ),
    ({"bf16": {"enabled": True}}, {"stage": 0, "precision": "bf16"}),
    ({"bfloat16": {"enabled": True}}, {"stage": 0, "precision": "bf16"}),
    ({"fp16": {"enabled": True, "loss_scale": 0}}, {"stage": 0, "precision": "fp16"}),
    ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, {"stage": 0}),
    (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
        {
            "stage": 0,
            "precision": Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
        },
    ),
    (
        {"data_types": {"param_dtype": "bfloat16", "buffer_dtype": "fp32"}},
        {"stage": 0, "precision": Precision(compute=torch.bfloat16, buffers=torch.float32)},
    ),
    ({"tensor_parallel": {"autotp_size": 1}, "gradient_allreduce_op": "mean"}, {"stage": 0}),
]


@pytest.mark.parametrize(("config", "wanted"), CASES)
def test_a_configuration_becomes_arguments_without_a_warning(config, wanted):
    assert converted(config) == (wanted, "")


def test_a_path_a_text_and_a_dict_say_the_same(tmp_path):
    config = zero(offload_optimizer=CPU) | {"bf16": {"enabled": True}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    wanted = onefold.from_deepspeed(config)
    assert wanted.keys() == {"stage", "precision", "offload"}
    for given in (path, str(path), json.dumps(config), "\n " + json.dumps(config)):
        assert onefold.from_deepspeed(given) == wanted


HUGGING_FACE = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def test_one_warning_names_what_is_set_and_becomes_no_argument():
    found, told = converted(HUGGING_FACE)
    assert found == {"stage": 3, "offload": Offload(optimizer="cpu")}
    lines = told.splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [
        "bf16.enabled", "optimizer", "gradient_clipping", "without effect here",
    ]  # fmt: skip
    assert "clip_grad_norm_" in told
    assert "stage3_gather_16bit_weights_on_model_save" in lines[-1]
    assert "steps_per_print" in lines[-1]
    assert "reduce_bucket_size" not in told, "auto says nothing"
    assert "wall_clock_breakdown" not in told, "false asks for nothing"


REFUSED = [
    (zero(stge=3), r"'zero_optimization\.stge'.*hint: did you mean 'stage'"),
    ({"zero_optimisation": {}}, "'zero_optimisation'.*did you mean 'zero_optimization'"),
    (zero(offload_param={"devise": "cpu"}), r"offload_param\.devise'.*'device'"),
    (zero(stage=4), r"'zero_optimization\.stage' to be 0, 1, 2 or 3, got 4"),
    (zero(stage="3"), r"'zero_optimization\.stage' to be int, got '3'"),
    (zero(stage=True), r"'zero_optimization\.stage' to be int, got True"),
    ({"zero_optimization": True}, "'zero_optimization' to be a section"),
    ({"bf16": {"enabled": "yes"}}, r"'bf16\.enabled' to be bool"),
    (zero(offload_param={"device": "gpu"}), r"offload_param\.device' to be one of 'none', 'cpu'"),
    (zero(offload_param={"device": "nvme"}), r"a folder for '.*offload_param\.nvme_path'"),
    (zero(offload_optimizer={**CPU, "ratio": 2}), r"offload_optimizer\.ratio' to be between"),
    (zero(stage=2, offload_param=CPU), r"stage 3 for '.*offload_param\.device', got stage 2"),
    (zero(stage=0, offload_optimizer=CPU), r"offload_optimizer\.device', got stage 0"),
    (zero(cpu_offload=True, offload_optimizer=CPU), r"'zero_optimization\.cpu_offload'"),
    (zero(stage=2, zero_quantized_weights=True), "zero_quantized_weights', got stage 2"),
    (zero(stage=1, zero_hpz_partition_size=8), "zero_hpz_partition_size', got stage 1"),
    (zero(mics_shard_size=4, zero_hpz_partition_size=8), "mics_shard_size"),
    (zero(zeropp_loco_param={"err_beta": 0.8}), "zeropp_loco_param"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, r"bf16\.enabled.*fp16"),
    ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, "torch_autocast"),
    ({"data_types": {"param_dtype": "int8"}}, r"data_types\.param_dtype"),
    ({"gradient_allreduce_op": "sum"}, "'gradient_allreduce_op'.*multiply the loss"),
    ({"tensor_parallel": {"autotp_size": 2}}, "'tensor_parallel'"),
    ({"amp": {"enabled": True}}, "'amp'"),
    ({"weight_quantization": {"quantized_initialization": {"num_bits": 4}}}, "quantization"),
    ("{,}", "expected JSON, got .*line 1"),
    ('{"bf16": {}, "bf16": {}}', "'bf16' to be once"),
    ("[1]", "No such file"),
    ("missing.json", r"No such file or directory \('missing.json'\)"),
    (3, "got a int"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_unknown_or_unsafe_is_an_error_that_names_the_key(config, message):
    with pytest.raises(onefold.ConfigError) as caught:
        onefold.from_deepspeed(config)
    text = " ".join(str(caught.value).split())
    assert "hint: " in text
    assert re.search(message, text), text


def test_every_field_of_deepspeed_has_an_answer():
    for section, names in FIELDS.items():
        for name in names.split():
            full = f"{section}.{name}".lstrip(".")
            assert full in KEYS or f"{full}.*" in KEYS, full
    assert len(KEYS) == sum(len(keys) for keys in SECTIONS.values()), "a key is there twice"
    for key in KEYS.values():
        assert key.here


def sample(name: str) -> Any:
    """A value that asks for something."""
    special = {"device": "cpu", "nvme_path": "/x", "ratio": 0.5, "stage": 3,
               "zero_hpz_partition_size": 8, "mics_shard_size": 8, "sequence_parallel_size": 2,
               "grad_accum_dtype": "bf16", "param_dtype": "bf16",
               "buffer_dtype": "bf16"}  # fmt: skip
    last = name.removesuffix(".*").rsplit(".")[-1]
    return special.get(last, {"enabled": True, "x": 1} if name.endswith("*") else True)


def test_every_key_becomes_an_argument_is_named_or_is_refused():
    """Alone, at stage 3: nothing is dropped in silence."""
    problems = []
    for name in KEYS:
        try:
            check_key(name)
        except (AssertionError, onefold.OnefoldError) as error:
            problems.append(f"{name}: {error}")
    assert not problems, "\n".join(problems)


def check_key(name: str) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    inner = config
    *sections, last = name.removesuffix(".*").split(".")
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = sample(name)
    if last in ("nvme_path", "ratio"):
        inner["device"] = "nvme" if last == "nvme_path" else "cpu"
    if last == "zeropp_loco_param":
        inner["zero_quantized_gradients"] = True
    if KEYS[name].fate is Fate.REFUSED:
        with pytest.raises(onefold.ConfigError, match=last):
            onefold.from_deepspeed(config)
        return
    found, told = converted(config)
    if KEYS[name].fate is Fate.ARGUMENT:
        assert last == "stage" or len(found) > 1
        assert not told
    else:
        assert found == {"stage": 3}
        assert name.removesuffix(".*") in told


def test_a_second_shard_in_the_node_is_left_out_on_one_host_by_name(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    second = {"zero_hpz_partition_size": 2}
    found, told = converted(zero(**second))
    assert found == {"stage": 3}
    assert "zero_hpz_partition_size: none, as the launcher started all ranks on one host" in told
    found, told = converted(zero(**second, zero_quantized_weights=True))
    assert found == {"stage": 3, "wire": Wire(weights="int8")}
    both = zero(**second, zero_quantized_weights=True, zero_quantized_gradients=True)
    assert converted(both) == ({"stage": 3, "wire": "zero++"}, ""), "a name adapts by itself"
    quantized = zero(mics_shard_size=2, zero_quantized_weights=True)
    assert "mics_shard_size: none" in converted(quantized)[1]
    for config in (zero(**second), quantized):
        arguments, _ = converted(config)
        run_ranks(2, lambda rank, given=arguments: onefold.shard(nn.Linear(4, 4), **given))
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert converted(zero(**second))[0] == {"stage": 3, "wire": Wire(secondary="weights")}


def test_the_page_has_the_tables_of_the_code():
    assert runpy.run_path(str(TOOL))["main"](["--check"]) == 0


def test_a_converted_configuration_shards():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(module.parameters())
    config = zero(offload_optimizer=CPU) | {"bf16": {"enabled": True}}
    onefold.shard(module, optimizer, **onefold.from_deepspeed(config))
    assert onefold.report(module).stage == 3
    module(torch.randn(2, 4)).sum().backward()
    optimizer.step()
