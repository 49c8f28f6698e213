# Every command a user or CI needs. `make serve` and `make test` do all their own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Which build of torch that is, CPU or CUDA, is decided by where pip looks: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS may name
# CPU builds (torch==2.13.0+cpu), which pip then prefers, and TORCH may be the path of a wheel. See README.md.
TORCH  ?= torch==2.13.0

.PHONY: serve demo test test-long lint types unit integration bench clean

serve: $(VENV)/.installed
	@$(BIN)/bouquet up --foreground $(if $(PORT),--set gateway.port=$(PORT))

demo: $(VENV)/.installed
	@$(BIN)/python -m bench.demo $(if $(PORT),--port $(PORT))

test: lint types unit integration

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/.test
	$(BIN)/mypy

unit: $(VENV)/.test
	$(BIN)/pytest -q --ignore=tests/integration

integration: $(VENV)/.test
	$(BIN)/pytest -q tests/integration

test-long: $(VENV)/.test
	$(BIN)/pytest -q -m long || [ $$? -eq 5 ]  # 5: no test is marked so

bench: $(VENV)/.bench
	$(BIN)/python -m bench.micro.overhead
	$(BIN)/python -m bench.run embeddings --peer sentence-transformers --peer onnxruntime
	$(BIN)/python -m bench.run generation --peer ours-in-process --peer transformers --peer transformers-bf16

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Bouquet needs Python 3.11 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first, and by itself: what comes after it takes the build that is there
$(VENV)/.torch: $(VENV)/bin/python
	@echo "installing $(TORCH), once (a CPU build has some 200 MB, a CUDA build with its libraries gigabytes)"
	@$(BIN)/pip install -q --disable-pip-version-check $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing bouquet and what it needs"
	@$(BIN)/pip install -q --disable-pip-version-check -e .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[test]'
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	@echo "installing what the benchmarks need"
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[test,bench]'
	@touch $@

clean:
	rm -rf $(VENV) .run
