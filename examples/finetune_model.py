"""Make a small Llama, its tokenizer and rows: `python examples/finetune_model.py DIR`.

All of it comes from the source of Python's standard library, so that nothing is downloaded. Needs
`pip install '.[finetune]'`. See examples/finetune.sh.
"""

import ast
import json
import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = """\
{% for message in messages %}{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}\
{% else %}{{ message['role'] }}: {{ message['content'] }}
assistant:
{% endif %}{% endfor %}"""

folder = Path(sys.argv[1])
library = Path(sysconfig.get_paths()["stdlib"])
texts = [path.read_text(errors="ignore") for path in sorted(library.glob("*.py"))[:60]]

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
special, alphabet = ["<pad>", "<eos>"], pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, initial_alphabet=alphabet)
tokenizer.train_from_iterator(texts, trainer)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
)
tokenizer.save_pretrained(folder / "model")

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
)
LlamaForCausalLM(config).save_pretrained(folder / "model")

with (folder / "chats.jsonl").open("w") as rows:
    for text in texts:
        functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
        for node in functions:
            arguments = ", ".join(each.arg for each in node.args.args)
            if not arguments:
                continue
            asked = {"role": "user", "content": f"arguments of {node.name}"}
            answer = {"role": "assistant", "content": arguments}
            rows.write(json.dumps({"messages": [asked, answer]}) + "\n")
