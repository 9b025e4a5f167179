"""QLoRA: adapters on a 4-bit base, `python examples/qlora.py`, or under torchrun.

The quantized base of bitsandbytes is sharded over the ranks, with its quantization state. It is
gathered in 4 bits and never cast. PEFT adds adapters before `onefold.shard`. The weights are random
here; pass the name of your base to `from_pretrained`. Needs transformers, accelerate, peft and
bitsandbytes.
"""

import pathlib
import tempfile
import textwrap

import peft
import torch
import transformers

import onefold

config = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=0,
    eos_token_id=1,
)
folder = pathlib.Path(tempfile.mkdtemp())
torch.manual_seed(0)
transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")

packing = transformers.BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
base = transformers.AutoModelForCausalLM.from_pretrained(
    folder / "base", quantization_config=packing
)
base = peft.prepare_model_for_kbit_training(base)
model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear"))

adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=2e-2)
onefold.shard(model, optimizer, stage=3)

report = onefold.report(model)
device = next(model.parameters()).device
text = torch.tensor(list(pathlib.Path(textwrap.__file__).read_bytes()[: 64 * 64]))
rows = text.view(64, 64)[report.rank :: report.world_size]  # own rows for each rank
for step in range(12):
    tokens = rows[step * 4 % len(rows) :][:4].to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if report.rank == 0 and step % 4 == 0:
        print(f"step {step:2d} loss {loss.item():.3f}")

report = onefold.report(model)
model.save_pretrained(folder / "adapters", is_main_process=report.rank == 0)  # adapters alone
if report.rank == 0:
    print(f"loss {loss.item():.3f}, adapters in {folder / 'adapters'}")
    print(report)
