# The two commands are `make demo` and `make test`. Everything is installed into .venv; nothing else is touched.
VENV ?= .venv
PYTHON ?= python3
EXTRA ?= cpu
LOCKED := constraints/$(EXTRA).txt
SEED ?= 0
WORKERS ?= 2
BIN := $(VENV)/bin
QUARTET := $(BIN)/quartet
CONFIG ?= deploy/ppo.yaml

# A CPU build of torch is on no default index. Where pip was given a folder of wheels, uv takes it from there,
# elsewhere from PyTorch's own index.
ifeq ($(EXTRA),cpu)
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
else
UV_TORCH := --torch-backend cpu
endif
endif
export PATH := $(abspath $(BIN)):$(PATH)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install demo test test-fast test-exhaustive lint format deploy-files configuration-page protos lock audit clean
.DELETE_ON_ERROR:

# --compile-bytecode: every service is a process of its own, and importing vLLM uncompiled takes each of them twice
# as long wherever Python is told not to write bytecode.
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(LOCKED) constraints/build.txt
	@python=$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)); \
	version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])') || version="no Python that runs"; \
	case $$version in 3.11|3.12|3.13) ;; *) \
	echo "$$python is $$version, and Quartet needs 3.11, 3.12 or 3.13, such as:" \
	"$(if $(wildcard $(VENV)),make clean && )make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1;; esac
	@echo "installing into $(VENV), about 4 GB: minutes, where all of it has to be downloaded"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r constraints/build.txt
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/uv pip install --quiet --compile-bytecode $(UV_TORCH) --verify-hashes \
		--constraints $(LOCKED) --build-constraints constraints/build.txt -e '.[$(EXTRA),dev]'
	touch $@

# Models and data, services up, PPO, evaluation through the same reward service, report, services down.
demo: install
	$(BIN)/python -m recipes.reviews --out models/reviews --seed $(SEED)
	trap '$(QUARTET) down' EXIT; \
	$(QUARTET) up $(CONFIG) && \
	$(QUARTET) train --overwrite $(CONFIG) && \
	$(QUARTET) evaluate $(CONFIG) --model current --split eval && \
	$(QUARTET) report --samples 5 runs/demo

# Where Python is told not to write bytecode, each of the hundred processes that the tests start would compile
# Quartet's own modules again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadscope

# First what needs the cores for itself, as it looks at clocks; then what waits for services, in several processes.
test: test-fast
	$(PYTEST) -n $(WORKERS) -m "processes and not exhaustive"

# Units without processes of their own. A third of their time they wait, so three processes keep two cores busy.
test-fast: install
	$(PYTEST) -n 3 tests/unit -m "not exhaustive and not processes"

# Every layout and every fault.
test-exhaustive: test
	$(PYTEST) -n $(WORKERS) -m exhaustive

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.lint

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Writes each deploy/NAME.yaml again after a change to deploy/facts/NAME.yaml or to what is derived.
deploy-files: install
	for facts in deploy/facts/*.yaml; do \
		$(QUARTET) render $$facts > deploy/.rendered && mv deploy/.rendered deploy/$$(basename $$facts) || exit 1; \
	done

# Writes docs/configuration.md again after a change to the configuration.
configuration-page: install
	$(BIN)/python -m tests.lint.configuration

protos: install
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

# Writes constraints/ again after a change to pyproject.toml, which the installed .venv may not fit yet.
lock:
	$(BIN)/python -m tests.lock $(UPGRADE)

# Asks PyPI's database of advisories about every version in the file; needs the network, changes nothing.
audit: install
	$(BIN)/python -m tests.lock --list $(LOCKED) | \
		$(BIN)/uvx --quiet pip-audit --strict --disable-pip --no-deps --requirement /dev/stdin

clean:
	-test ! -x $(QUARTET) || $(QUARTET) down
	rm -rf $(VENV) .quartet .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
