#!/usr/bin/env bash
# Fine-tune a small Llama on what functions of the standard library take, in half a minute on two
# CPU ranks, and open the result with transformers alone. Nothing is downloaded.
#   examples/finetune.sh [DIR]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${1:-$(mktemp -d)}
python=${PYTHON:-python}

"$python" "$here/finetune_model.py" "$work"
"$python" -m onefold finetune --model "$work/model" --data "$work/chats.jsonl" --out "$work/tuned" \
	--steps 100 --batch 8 --seq 64 --lr 3e-3 --checkpoint "$work/runs"
"$python" - "$work/tuned" <<'PYTHON'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (c.from_pretrained(sys.argv[1]) for c in (AutoModelForCausalLM, AutoTokenizer))
asked = tokenizer("user: arguments of __init__\nassistant:\n", return_tensors="pt").input_ids
print("plain transformers:", tokenizer.decode(model.generate(asked, max_new_tokens=8)[0]))
PYTHON
