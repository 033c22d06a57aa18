# Works with GNU make 3.81 (macOS) and newer. `make help` lists what there is.

SHELL = /bin/sh
PYTHON ?=
export PYTHON

# One virtual environment; a stamp for each set of packages in it. The checksum makes a moved checkout install anew.
PY = .venv/bin/python
HERE := $(shell pwd | cksum | cut -d ' ' -f 1)
STAMPS = .venv/.installed-$(HERE)
ENGINES = llamacpp
NODES = 1
RESULTS = examples/homework/results
TEST_ENGINES = llamacpp,mlx
SEED = 0
ROUNDS = 6
# Of a machine with CUDA and no network: its Python, which has PyTorch and transformers, and the wheels brought there.
GPU_PYTHON = python3
WHEELS = build/gpu-wheels
GPU_PACKAGES = build/gpu-packages

DEMO_SIZE = 60 MB
TEST_SIZE = 150 MB
TORCH_SIZE = 250 MB; several GB where your package index serves PyTorch with CUDA

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo ui serve test test-gate lint test-system test-torch test-vllm test-gpu gpu-wheels test-upgrade test-floors test-services audit services observe bench faults night matrix pictures env clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(STAMPS)/demo ## grade a small made-up class on this machine: no services, no account
	@$(PY) -m kvasir demo --out $(RESULTS)

ui: $(STAMPS)/demo $(STAMPS)/ui ## the grading desk in a browser, with kvasir.toml if there is one, else the demo's model
	@$(PY) -m kvasir --config "$(if $(wildcard kvasir.toml),kvasir.toml,examples/demo.toml)" ui \
	    --home results/desk $(RESULTS)

serve: $(STAMPS)/demo $(STAMPS)/gateway ## an OpenAI and Ollama endpoint with the demo's model, on http://127.0.0.1:8000
	@echo "curl http://127.0.0.1:8000/v1/chat/completions -d '{\"model\": \"kvasir-demo\"," \
	    "\"max_tokens\": 40, \"messages\": [{\"role\": \"user\", \"content\": \"What is a queue?\"}]}'"
	@echo "The demo's model knows one kind of homework, and answers nothing else sensibly. Ctrl-C ends it."
	@$(PY) -m kvasir --config examples/demo.toml serve --state results/gateway

# A worker that crashes ends the run, and the run names its test: pytest-xdist would start another one, give it nothing
# to do, and wait.
test: lint ## lint, then all tests that need no browser and no PyTorch (starts private RabbitMQ and Redis)
	$(PY) -m pytest -n 3 --dist loadfile --max-worker-restart=0 -m "not system and not torch and not vllm"

test-gate: $(STAMPS)/test $(STAMPS)/ui $(STAMPS)/torch ## one test of each real thing: browser, Prometheus, real model, kills, PyTorch
	$(PY) -m tests.support.programs chromium prometheus redis-exporter
	$(PY) -m tests.support.smollm2
	$(PY) -m pytest -m gate

lint: $(STAMPS)/test ## ruff, mypy, import arrows, names
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	$(PY) -m tests.support.names

test-system: $(STAMPS)/test $(STAMPS)/ui ## tests that need a browser, Prometheus, a real model (92 MB once), or minutes
	$(PY) -m tests.support.programs chromium prometheus redis-exporter
	$(PY) -m tests.support.smollm2
	$(PY) -m pytest -m system

test-torch: $(STAMPS)/test $(STAMPS)/torch ## tests that need PyTorch, and two real models (332 MB once)
	$(PY) -m tests.support.smollm2
	$(PY) -m tests.support.gemma3
	$(PY) -m pytest -m torch

test-vllm: $(STAMPS)/test ## tests that need vLLM (1 GB, 3.5 GB on disk, in an environment of its own)
	$(PY) -m kvasir engines install vllm
	$(PY) -m pytest -m vllm

test-gpu: ## what Linux with CUDA, PyTorch and transformers runs without a network, on GPU_PYTHON; writes results/gpu.json
	@if [ -n "$$(ls $(WHEELS)/*.whl 2>/dev/null)" ]; then $(GPU_PYTHON) -m pip install --quiet --disable-pip-version-check \
	    --root-user-action=ignore --no-index --no-deps --upgrade --target $(GPU_PACKAGES) $(WHEELS)/*.whl; fi
	@PYTHONPATH="$$(pwd):$(GPU_PACKAGES)" $(GPU_PYTHON) -m benchmarks.gpu_figures --out results/gpu.json

gpu-wheels: $(STAMPS)/test ## the wheels for test-gpu (40 MB), to be carried to that machine with the checkout
	@$(PY) -m tests.support.gpu_wheels $(WHEELS)

test-upgrade: $(STAMPS)/test ## the first release against this checkout, in every order of upgrade and rollback: ten minutes
	@$(PY) -m tests.upgrade

test-floors: $(STAMPS)/test ## every command with the lowest versions that pyproject.toml allows (625 MB on disk for as long as it runs)
	$(PY) -m pytest -m system tests/system/test_floors.py

test-services: $(STAMPS)/test ## broker, store, gateway and fault suites on RabbitMQ 4, Redis 8 and Valkey 8: an hour and 1 GB; Linux, root
	@$(PY) -m tests.support.newer_services

audit: $(STAMPS)/test $(STAMPS)/ui ## known vulnerabilities of all that is installed; asks PyPI, so no part of the tests
	@[ -x .venv/audit/bin/pip-audit ] || { $(PY) -m venv .venv/audit && \
	    .venv/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit; }
	@$(PY) -m tests.support.audit .venv/audit/bin/pip-audit

observe: $(STAMPS)/test ## what every dashboard panel shows, idle and under load, over private services
	@$(PY) -m tests.support.observe

services: $(STAMPS)/test ## a private RabbitMQ and Redis (NODES=3: clusters) until Ctrl-C; prints where they are
	@$(PY) -m tests.support.services $(NODES)

bench: $(STAMPS)/test $(STAMPS)/ui ## the benchmarks; one JSON line each
	$(PY) -m benchmarks

faults: $(STAMPS)/test ## every fault, 1,000 jobs each: an hour
	$(PY) -m benchmarks.faults

# SEED=N for another night, ROUNDS=N for a longer or shorter one.
night: $(STAMPS)/test ## evening, night and morning of a few courses while everything dies once and again: an hour; ROUNDS, SEED
	$(PY) -m tests.night --seed $(SEED) --rounds $(ROUNDS)

matrix: $(STAMPS)/test $(STAMPS)/torch ## KV caches between all engines, with real weights too (332 MB once): an hour
	@$(PY) -m tests.support.smollm2
	@$(PY) -m tests.support.gemma3
	$(PY) -m benchmarks.matrix --real
	$(PY) -m benchmarks.sketches

pictures: $(STAMPS)/test $(STAMPS)/ui ## the pictures in the docs anew: desk, demo, dashboard (needs Chromium, Prometheus, tmux, Matplotlib)
	$(PY) -m tests.support.programs chromium prometheus redis-exporter
	$(PY) -m docs.make_screenshots
	$(PY) -m docs.draw_demo
	$(PY) -m docs.draw_dashboard

env: ## .env with random passwords for docker compose
	@sh scripts/make-env

clean: ## remove the virtual environment, caches and build products
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/demo: pyproject.toml
	@sh scripts/venv "$(DEMO_SIZE)" ".[$(ENGINES)]"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/test: pyproject.toml
	@sh scripts/venv "$(TEST_SIZE)" ".[dev,bench,bound,gateway,$(TEST_ENGINES)]"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/ui: pyproject.toml
	@sh scripts/venv "110 MB" ".[ui]"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/gateway: pyproject.toml
	@sh scripts/venv "20 MB" ".[gateway]"
	@mkdir -p $(STAMPS) && touch $@

# torch first and pinned: what else asks for it would be given another build.
$(STAMPS)/torch: pyproject.toml
	@sh scripts/venv "$(TORCH_SIZE)" torch==2.13.0 ".[torch]"
	@mkdir -p $(STAMPS) && touch $@
