# Every target creates .venv with the pinned torch, and updates it only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_VENV := .venv-torch-$(VERSION)$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
UNITS := $(addprefix tests/,capture devices engine files flops plan profile report results split trace track test_inputs.py test_layers.py test_public.py)
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test test-all test-fast test-torch test-gpu test-ray test-executorch zoo soak lint format bench bench-gpu bench-remote lock sbom docs pictures proto clean

demo: $(VENV)/.dev        ## run every feature on built-in models, in less than a minute; writes demo/report.html
	$(BIN)/python -m demo

# One process per core, with one thread each. Each test file runs in one process, to share its fixtures.
PYTEST := -m pytest -n auto --dist loadfile --durations 10
SELECTED := not gpu and not zoo and not slow
QUICK := --hypothesis-profile quick -m '$(SELECTED)'

test: $(VENV)/.docs $(VENV)/.browser ## all tests but the slow ones, and every example in docs and docstrings: about five minutes on two cores
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) $(QUICK)

test-all: $(VENV)/.docs $(VENV)/.browser ## everything that CI runs: also the tests marked slow, and all examples of every property test
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST)

test-fast: $(VENV)/.dev   ## unit tests for the edit loop, about a minute: no subprocesses, sockets, browsers or sweeps over models
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) --hypothesis-profile quick -m '$(SELECTED) and not integration' $(UNITS)

# Other packages are those of constraints.txt, except torchvision: pip chooses the version for this torch.
test-torch:               ## `make test` with another torch, in a separate environment: VERSION=2.14.1, optionally PYTHON=python3.12
	$(if $(VERSION),,$(error expected a version of torch, as in `make test-torch VERSION=2.14.1`))
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	grep -vE '^torch(vision)?==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/pip --disable-pip-version-check install --quiet -c $(TORCH_VENV)/constraints.txt torch==$(VERSION) -e '.[dev,docs]'
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python $(PYTEST) $(QUICK)

test-gpu: $(VENV)/.dev    ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

test-ray: $(VENV)/.dev    ## the tests of microtome.scale.ray, on clusters of this machine; five minutes
	$(PIP) -e '.[ray]' kubernetes-validate
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/scale src/microtome/scale

test-executorch: $(VENV)/.dev ## the tests of programs of ExecuTorch; half a minute
	$(PIP) -e '.[executorch]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/split/test_executorch.py

zoo: $(VENV)/.dev         ## compare with the published figures of torchvision, and verify cuts of some 480 models, and graphs of 40: hours; SAVE=1 as below
	$(BIN)/python -m benchmarks.zoo $(if $(SAVE),--save)
	$(BIN)/python -m benchmarks.split_zoo $(if $(SAVE),--save)
	$(BIN)/python -m benchmarks.split_zoo.seeds
	$(BIN)/python -m benchmarks.split_zoo.chains $(if $(SAVE),--save)
	$(BIN)/python -m benchmarks.split_zoo.graphs $(if $(SAVE),--save)
	$(BIN)/python -m pytest -m zoo

soak: $(VENV)/.dev        ## 20,000 requests over failing connections, 120,000 mutated messages, 20 kills in training, every attack: 20 minutes; SAVE=1 as below
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.remote.soak --requests 20000 --clients 8
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.remote.fuzz --messages 100000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.remote.training_fuzz --actions 20000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.remote.training_process kills 20
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.remote.attack --seconds 20 $(if $(SAVE),--save)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto: $(VENV)/.dev       ## compile split.proto
	cd src && $(abspath $(BIN))/python -m grpc_tools.protoc -I. --descriptor_set_out=microtome/remote/split.binpb microtome/remote/split.proto

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench     ## speed compared with other tools, as ratios; SAVE=1 writes benchmarks/results
	$(BIN)/python -m benchmarks $(if $(SAVE),--save)

bench-gpu: $(VENV)/.bench ## accuracy of times, memory and energy on a CUDA device; SAVE=1 as above
	$(BIN)/python -m benchmarks.gpu $(if $(SAVE),--save)

bench-remote: $(VENV)/.bench ## two hosts as network namespaces, needs root; eight minutes; SAVE=1 as above
	$(BIN)/python -m benchmarks.remote $(if $(SAVE),--save)

lock:                     ## write the versions and digests of the development environment to requirements-dev.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --dry-run --ignore-installed --report $(VENV)/report.json '.[dev,docs,bench]'
	$(BIN)/python -m tools.lock $(VENV)/report.json

sbom: $(VENV)/.dev        ## write the packages of the environment to sbom.json, as CycloneDX
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible --of JSON -o sbom.json $(BIN)/python

docs: $(VENV)/.docs       ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: $(VENV)/.dev    ## regenerate the pictures in docs/pictures/
	$(BIN)/python -m docs.pictures

clean:
	rm -rf $(VENV) .venv-torch-* site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# LOCKED=1 installs everything but torch from requirements-dev.lock, verified by digest.
$(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(PIP) torch torchvision
	$(BIN)/pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r requirements-dev.lock
	$(PIP) --no-deps -e .
else
	$(PIP) -e '.[dev]'
endif
	@touch $@

$(VENV)/.browser: $(VENV)/.dev
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
		|| apt-get install -qq -y chromium >/dev/null 2>&1 \
		|| echo "Chromium is missing and cannot be installed: the tests of the HTML page are skipped"
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then touch $@; fi

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) -e '.[docs]'
	@touch $@
