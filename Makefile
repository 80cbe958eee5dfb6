# `make demo` and `make test` need nothing but Python 3.11 or newer with venv: they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test soak protocol lint types imports ahead-of-time bench clean

demo: $(VENV)/ready
	$(RUN) -m thinwire demo

test: $(VENV)/ready
	$(RUN) -m pytest

soak: $(VENV)/ready
	$(RUN) -m tests.moe.schedules --rounds 500 --json benchmarks/results/cpu/soak.json

protocol: $(VENV)/ready
	$(RUN) -m tests.protocol.check

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/ready
	$(RUN) -m mypy

imports: $(VENV)/ready
	$(VENV)/bin/lint-imports

ahead-of-time: $(VENV)/ready
	$(RUN) -m tests.ahead_of_time.matrix

bench: $(VENV)/ready
	$(RUN) -m benchmarks.bench_codec --device cpu
	$(RUN) -m benchmarks.bench_all_to_all --device cpu
	$(RUN) -m benchmarks.bench_dispatch --device cpu
	$(RUN) -m benchmarks.bench_all_reduce --device cpu
	$(RUN) -m benchmarks.bench_accuracy
	$(RUN) -m benchmarks.bench_link
	$(RUN) -m benchmarks.bench_all_reduce --link

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[triton,cpu,bench,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
