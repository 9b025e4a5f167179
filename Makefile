# One command a task. `make train` and `make test` set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# where torch comes from, if not from pip's own index. On Linux the public index has builds with
# CUDA; without a GPU: make train TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

DISK ?= /var/tmp

# tests start hundreds of processes: each would compile all that it imports
unexport PYTHONDONTWRITEBYTECODE

# compiled while the package is installed, where there is a C compiler
KERNELS := $(wildcard src/onefold/wire/kernels/*.[ch]) src/onefold/wire/kernels/compiling.py

.PHONY: train big cluster test again quick test-torch kernels check docs package format bench
.PHONY: clean

train: $(VENV)/train.done
	$(BIN)/onefold train

# one billion parameters, 16 GB of training state, in two processes of 1.7 GB each; DISK names
# the folder of the files, which need 12 GB and leave nothing behind
big: $(VENV)/train.done
	$(BIN)/onefold train --model large --offload disk:$(DISK) --clip 0 --recompute \
		--steps 5 --batch 4 --seq 64 --sample 0 --lr 3e-6

# two hosts of two ranks each, as network namespaces of this machine: needs root and iproute2
cluster: $(VENV)/train.done
	$(BIN)/python benchmarks/cluster.py

# each law; more processes than a small machine has cores: many tests wait for their own
test: $(VENV)/dev.done
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal -m "not again" \
		--durations-file=build/durations.json

# laws of `make test` once more, at more cost: examples, commands, other libraries, real processes,
# and cases that `@again_but` does not name
again: $(VENV)/dev.done
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal -m again

# the cheapest files of `make test`: four in ten cases, in a tenth of its time
quick: $(VENV)/dev.done
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not again" --quick

# `make test` on another torch and Python: make test-torch TORCH=2.15.0 PYTHON=python3.13
# it downloads gigabytes: outside of the CPU builds torch comes with CUDA. torch 2.11 wants an older
# setuptools than later ones
TORCH ?= 2.15.0
OTHER := build/torch-$(TORCH)-$(notdir $(PYTHON))
test-torch:
	$(PYTHON) -m venv $(OTHER)
	grep -v -E '^(torch|setuptools)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$(TORCH)
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt \
		--editable '.[dev,integrations]'
	$(OTHER)/bin/python -m pytest --numprocesses 4 --dist worksteal -m "not again"

# the bits of the GPU's kernels, by Triton's interpreter: about 300 MB to download, so not in `dev`
kernels: $(VENV)/dev.done
	$(PIP) "triton>=3.4,<4"
	$(BIN)/python -m pytest tests/wire/test_fused.py

check: $(VENV)/dev.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python docs/tools/reading_level.py
	$(BIN)/python docs/tools/words.py
	$(BIN)/python -m pytest tests/house/test_architecture.py

# into build/site; a warning is an error, and so is a link or anchor that leads nowhere
docs: $(VENV)/docs.done
	$(BIN)/python docs/tools/memory_figure.py
	$(BIN)/python docs/tools/scale_figure.py
	$(BIN)/python docs/tools/cli_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(BIN)/python docs/tools/check_site.py build/site

# into dist: the source, and the wheel for any platform; the workflow `wheels` builds the others
package: $(VENV)/package.done
	rm -rf dist
	HATCH_BUILD_NO_HOOKS=true $(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

format: $(VENV)/dev.done
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/peers.done
	$(BIN)/python benchmarks/host_overhead.py
	$(BIN)/python benchmarks/optimizer_step.py
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/offload.py
	$(BIN)/python benchmarks/packed.py
	$(BIN)/python benchmarks/kv_cache.py
	$(BIN)/python benchmarks/streaming.py
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/compiled.py
	$(BIN)/python benchmarks/readme.py
	$(BIN)/python benchmarks/published.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f src/onefold/wire/kernels/*.so

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: what follows takes the build that is there. A local version such as 2.13.0+cpu comes
# before the same one of another index
$(VENV)/train.done: pyproject.toml constraints.txt hatch_build.py $(KERNELS) | $(BIN)/python
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PIP) --editable .
	touch $@

$(VENV)/dev.done: $(VENV)/train.done
	$(PIP) --editable '.[dev,integrations]'
	touch $@

$(VENV)/docs.done: $(VENV)/train.done
	$(PIP) --editable '.[docs]'
	touch $@

# without torch: a build installs nothing of ours
$(VENV)/package.done: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) build twine
	touch $@

# DeepSpeed's build needs its tools, and torch, in the environment before it
$(VENV)/peers.done: $(VENV)/dev.done
	$(PIP) setuptools wheel ninja
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed==0.19.8
	touch $@
