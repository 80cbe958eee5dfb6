# `make demo` and `make test` need nothing but Python 3.11 or newer with venv: they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INTEGRATIONS := .venv-integrations
BESIDE := $(INTEGRATIONS)/bin/python -m pytest -rs -s
# Tests of theirs that `make test-all` runs whole; packages of which what is used needs none that they ask for.
CLIENTS := automodel families megatron torchtitan
PACKAGES := megatron-core==0.16.1 nemo-automodel==0.7.0 torchtitan==0.3.0 spmd_types==0.2.3
# vLLM wants a PyTorch, transformers and numba of its own, so it has an environment of its own (3.4 GB, 4 minutes).
VLLM_VENV := .venv-vllm
# The PyTorch that `make demo` installs: words for pip, or "system" for the one that $(PYTHON) has.
TORCH ?= torch
SYSTEM := $(filter system,$(TORCH))
WHEEL := $(if $(filter cpu,$(TORCH)),torch --index-url https://download.pytorch.org/whl/cpu,$(TORCH))
# Each has ranks of its own, up to six in a test. A worker that is done takes over tests of another.
WORKERS ?= 2
PYTEST := $(RUN) -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: demo test test-all checks exhaustive test-frameworks test-vllm test-integrations lint types imports budgets \
	ahead-of-time docs soak fuzz protocol serve-check bench clean

demo: $(VENV)/runs
	$(RUN) -m thinwire demo

# Every module, every error, each transport on 2 and 3 ranks and each kernel, interpreted: minutes.
test: $(VENV)/ready
	$(PYTEST) -m "not exhaustive"

# Every test once, the quick ones first: what is marked exhaustive (all wires, dtypes and sizes, models, faults, launchers,
# examples), style, types, imports, the site, every kernel compiled for every GPU, and other frameworks. About an hour.
test-all: test
	$(MAKE) checks exhaustive test-frameworks test-vllm

checks: lint types imports budgets docs ahead-of-time

# Of these tests every Nth from the Kth on, with PART=K/N.
PART ?= 1/1
exhaustive: $(VENV)/ready
	$(PYTEST) -m exhaustive --part $(PART)

# These two need environments of their own; what a registry cannot give is no fault of a change.
test-frameworks:
	@if timeout 300 $(MAKE) $(INTEGRATIONS)/ready; then \
		$(MAKE) test-integrations && $(BESIDE) -m exhaustive $(CLIENTS:%=tests/integrations/test_%.py); \
	else echo "SKIPPED: tests beside other frameworks, which could not be installed within 5 minutes"; fi

test-vllm:
	@if timeout 900 $(MAKE) $(VLLM_VENV)/ready; then \
		$(VLLM_VENV)/bin/python -m pytest tests/integrations/test_vllm.py; \
	else echo "SKIPPED: tests beside vLLM, which could not be installed within 15 minutes"; fi

# Other frameworks as they are on PyPI, over thinwire, on 2 ranks: prints a line for each thing that ran, with its errors.
test-integrations: $(INTEGRATIONS)/ready
	$(BESIDE) -m "not exhaustive" tests/integrations tests/moe/pretrained/test_transformers.py

# vLLM itself: LLM and `vllm serve` on two data-parallel ranks.
serve-check: $(VLLM_VENV)/ready
	$(VLLM_VENV)/bin/python -m tests.integrations.serve_check --json benchmarks/results/cpu/vllm.json

soak: $(VENV)/ready
	$(RUN) -m verification.soak.rounds --rounds 100000 --json benchmarks/results/cpu/soak.json
	$(RUN) -m verification.faults --repeats 20 --add --json benchmarks/results/cpu/faults.json
	$(RUN) -m verification.soak.schedules --rounds 500 --json benchmarks/results/cpu/schedules.json
	$(RUN) -m verification.soak.programs --count 1000 --json benchmarks/results/cpu/programs.json
	$(RUN) -m verification.soak.programs --count 500 --autocast
	$(RUN) -m verification.soak.invariant --programs 10000 --json benchmarks/results/cpu/invariant.json

# Corrupted memory for an hour or two, and ten minutes of hostile bytes for each parser.
fuzz: $(VENV)/ready
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	$(RUN) -m verification.corruption --rounds 300000 --processes 2 --json benchmarks/results/cpu/fuzz.json
	$(RUN) -m verification.fuzz --seconds 600 --add --json benchmarks/results/cpu/fuzz_parsers.json

protocol: $(VENV)/ready
	$(RUN) -m verification.protocol.check

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/ready
	$(RUN) -m mypy

imports: $(VENV)/ready
	$(VENV)/bin/lint-imports

# Lines of each part, of which none may have more than its budget.
budgets: $(VENV)/ready
	$(RUN) -m verification.budgets

ahead-of-time: $(VENV)/ready
	$(RUN) -m verification.ahead_of_time.matrix

bench: $(VENV)/ready
	$(RUN) -m thinwire bench --device cpu
	$(RUN) -m benchmarks.bench_codec --device cpu
	$(RUN) -m benchmarks.bench_accuracy
	$(RUN) -m benchmarks.bench_deep_ep
	$(RUN) -m benchmarks.bench_flight_recorder
	$(RUN) -m benchmarks.bench_fsdp
	$(RUN) -m benchmarks.bench_link
	$(RUN) -m benchmarks.bench_on_link all_reduce -b 32M -e 32M
	$(RUN) -m benchmarks.bench_result_memory

# The site, in build/site; a broken link fails it.
docs: $(VENV)/ready
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build
	@echo "The site is build/site. Its search needs a server: $(RUN) -m http.server --directory build/site"

# What a demo needs; pip says what it does, as PyTorch may take a while. The system's PyTorch keeps its version.
$(VENV)/runs: pyproject.toml setup.py constraints.txt
	@echo "Setting up $(VENV) with PyTorch: from PyPI this is the build with CUDA, some gigabytes. To choose another:"
	@echo "  make demo TORCH=cpu       the CPU build, 0.2 GB"
	@echo "  make demo TORCH=system    the PyTorch that $(PYTHON) has"
	$(PYTHON) -m venv $(VENV)
	$(if $(SYSTEM),$(PYTHON) -c "import torch; print(torch.__path__[0].removesuffix('/torch'))" \
		> "$$($(RUN) -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch.pth", \
		$(RUN) -m pip install --constraint constraints.txt $(WHEEL))
	$(RUN) -m pip install $(if $(SYSTEM),,--constraint constraints.txt) --editable '.[cpu]'
	touch $@

$(VENV)/ready: $(VENV)/runs
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[triton,cpu,bench,dev]'
	touch $@

# Sees what $(VENV) has, PyTorch above all, and adds to it.
$(INTEGRATIONS)/ready: $(VENV)/ready
	$(RUN) -m venv --without-pip $(INTEGRATIONS)
	$(RUN) -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> "$$($(INTEGRATIONS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	$(INTEGRATIONS)/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation \
		--editable '.[transformers]' peft tyro torchdata datasets tokenizers tensorboard
	@for each in $(PACKAGES); do \
		$(INTEGRATIONS)/bin/python -m pip install --quiet --no-deps $$each \
			|| echo "SKIPPED: tests beside $$each, which could not be installed"; \
	done
	touch $@

$(VLLM_VENV)/ready: constraints.txt tests/integrations/vllm_venv.py
	rm -rf $(VLLM_VENV)
	$(PYTHON) tests/integrations/vllm_venv.py $(VLLM_VENV)
	touch $@

clean:
	rm -rf $(VENV) $(INTEGRATIONS) $(VLLM_VENV) build dist src/*.egg-info
