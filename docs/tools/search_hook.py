"""What the site's search leaves out, puts first, and takes for synonyms. mkdocs calls it."""

from __future__ import annotations

import re
from typing import Any

EXCLUDED = ("adr/", "development/performance.md", "development/targets.md", "design.md")
"""Decisions and logs: for those who change the source."""

BOOSTS = {"start/": 4.0, "guides/": 3.0, "coming-from/": 2.0, "reference/": 0.5}
"""Factors on the score of pages, by the beginning of their path."""

SYNONYMS = {
    "start/install.md": "pip install, setup, macOS, Windows, Linux, docker, container, Dockerfile",
    "start/your-script.md": "shard, shard a script, shard a model, sharding, sampler, "
    "learning rate scheduler, lr_scheduler, gradient clipping, clip_grad_norm_, tokens per second",
    "start/first-8-gpus.md": "8 GPUs, multi-GPU, multiple GPUs, torchrun, single node",
    "start/several-machines.md": "multi-node, multiple nodes",
    "guides/out-of-memory.md": "OOM, CUDA out of memory, OutOfMemoryError, exit code 137, "
    "activation checkpointing, recompute",
    "guides/choose-a-stage.md": "ZeRO-1, ZeRO-2, ZeRO-3, zero1, zero2, zero3, memory estimate, "
    "plan, will it fit, llama 70b",
    "guides/larger-than-memory.md": "offload, CPU offload, NVMe, ZeRO-Infinity, ZeRO-Offload",
    "guides/checkpoints.md": "resume, checkpoint, save checkpoint, load checkpoint, save model, "
    "checkpoints, safetensors, preemption",
    "guides/data-position.md": "dataloader, skip batches, RowSampler",
    "guides/accumulation.md": "gradient accumulation, micro-batch, no_sync",
    "guides/precision.md": "bf16, fp16, AMP, autocast, GradScaler, fp8, float8",
    "guides/trainer.md": "Hugging Face, wandb, Weights & Biases, TensorBoard, MLflow",
    "guides/trl.md": "SFT, DPO, GRPO, RLHF, vLLM",
    "guides/adapters.md": "LoRA, PEFT, DoRA",
    "guides/qlora.md": "QLoRA, bitsandbytes, 4-bit, NF4",
    "guides/muon.md": "Muon, Newton-Schulz, Shampoo",
    "guides/slow-links.md": "ZeRO++, quantized communication, hpZ, HSDP, HFSDP, MiCS, "
    "secondary shards, int8, int4, wire",
    "guides/islands.md": "DiLoCo, local SGD, outer optimizer",
    "guides/clusters.md": "SLURM, Kubernetes, Ray, NCCL, gloo, firewall",
    "guides/troubleshooting.md": "error, hang, timeout, deadlock, NCCL timeout, watchdog, NaN, "
    "wrong loss, loss differs",
    "guides/evaluation.md": "generate, eval, evaluation",
    "guides/report-page.md": "profile, profiler, trace, slow step",
    "guides/sequence-parallel.md": "context parallel, Ulysses, long context, ring attention",
    "guides/tensor-parallel.md": "tensor parallel, TP",
    "guides/pipeline.md": "pipeline parallel, PP",
    "guides/inference.md": "inference, streaming",
    "guides/kv-cache.md": "kv cache, key-value cache",
    "guides/ema.md": "EMA, moving average",
    "guides/finetune.md": "fine-tune, finetune, fine-tuning",
    "reference/optimizers.md": "optimizer, AdamW, Adafactor",
    "guides/experts.md": "MoE, mixture of experts, expert parallel",
    "coming-from/ddp.md": "DDP, DistributedDataParallel",
    "coming-from/fsdp2.md": "FSDP, FSDP2, fully_shard, FullyShardedDataParallel",
    "coming-from/deepspeed.md": "DeepSpeed, ds_config, deepspeed checkpoint, "
    "checkpoint of DeepSpeed, zero_to_fp32",
}
"""Words that the search matches on a page before all others. No page shows them. A page of the
reference has the names that it describes, such as `onefold.shard`."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set the page's entry for the search plugin."""
    path = page.file.src_uri
    boost = next((factor for start, factor in BOOSTS.items() if path.startswith(start)), 1.0)
    page.meta["search"] = {"exclude": path.startswith(EXCLUDED), "boost": boost}
    words = SYNONYMS[path].split(", ") if path in SYNONYMS else []
    page.meta["tags"] = [*words, *re.findall(r"^::: (onefold\.\w+)$", markdown, re.M)]
    return markdown
