"""TRL's SFTTrainer on a sharded model: `torchrun --nproc-per-node 2 examples/trl_sft.py`.

A small Llama from its config, and a tokenizer of words that is built here, so that nothing is
downloaded. It also runs as `python examples/trl_sft.py`. Needs `pip install '.[hf]' trl`.
"""

import re
import sysconfig
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import onefold

library = Path(sysconfig.get_paths()["stdlib"])
lines = [line for line in (library / "LICENSE.txt").read_text().splitlines() if line.strip()][:200]
words = ["<pad>", "<eos>", "<unk>", *sorted(set(re.findall(r"\w+|[^\w\s]+", " ".join(lines))))]
vocabulary = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
tokenizer = Tokenizer(vocabulary)
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)

set_seed(0)
config = LlamaConfig(
    vocab_size=len(words),
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
)
args = SFTConfig(
    f"{tempfile.gettempdir()}/onefold-trl-sft",  # the same for every rank
    max_steps=20,
    per_device_train_batch_size=4,
    learning_rate=3e-3,
    logging_steps=5,
    max_length=32,
    bf16=False,
    use_cpu=not torch.accelerator.is_available(),
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = SFTTrainer(
    LlamaForCausalLM(config),
    args=args,
    train_dataset=Dataset.from_dict({"text": lines}),
    processing_class=tokenizer,
    callbacks=[onefold.hf.Callback(stage=3)],  # the one line
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
    print(onefold.report(trainer.model))
