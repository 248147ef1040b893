# Every target sets itself up: a .venv with the pinned torch, made again only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_VENV := .venv-torch-$(VERSION)$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
UNITS := $(addprefix tests/,capture devices engine files flops plan profile report results split trace track test_inputs.py test_layers.py test_public.py)
PIP := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test test-all test-fast test-torch test-gpu zoo soak lint format bench bench-gpu bench-remote lock sbom docs pictures proto clean

demo: $(VENV)/.dev        ## everything on built-in models, in less than a minute; leaves demo/report.html
	$(BIN)/python -m demo

# One thread for each process of pytest: there are as many as cores. Files are distributed whole, to share their fixtures.
PYTEST := -m pytest -n auto --dist loadfile --durations 10
SELECTED := not gpu and not zoo and not slow
QUICK := --hypothesis-profile quick -m '$(SELECTED)'

test: $(VENV)/.docs $(VENV)/.browser ## all tests but the long proofs, examples in docs and docstrings included: under five minutes on two cores
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) $(QUICK)

test-all: $(VENV)/.docs $(VENV)/.browser ## everything that CI runs: the tests marked slow too, and every property with all its examples
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST)

test-fast: $(VENV)/.dev   ## for the edit loop, under a minute: unit tests, without other processes, sockets, browsers and sweeps over models
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) --hypothesis-profile quick -m '$(SELECTED) and not integration' $(UNITS)

# The rest of the environment is that of constraints.txt, but for torchvision, of which pip takes the version made for this torch.
test-torch:               ## `make test` with another torch, in an environment of its own: VERSION=2.14.1, and PYTHON=python3.12 if you like
	$(if $(VERSION),,$(error expected a version of torch, as in `make test-torch VERSION=2.14.1`))
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	grep -vE '^torch(vision)?==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/pip --disable-pip-version-check install --quiet -c $(TORCH_VENV)/constraints.txt torch==$(VERSION) -e '.[dev,docs]'
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python $(PYTEST) $(QUICK)

test-gpu: $(VENV)/.dev    ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

zoo: $(VENV)/.dev         ## published figures of every torchvision model, and cuts of some 480 models: half an hour; SAVE=1 as below
	$(BIN)/python -m benchmarks.zoo $(if $(SAVE),--save)
	$(BIN)/python -m benchmarks.split_zoo $(if $(SAVE),--save)
	$(BIN)/python -m benchmarks.split_zoo.seeds
	$(BIN)/python -m pytest -m zoo

soak: $(VENV)/.dev        ## 20,000 requests over lines that break, 100,000 mutated messages, every attack: 20 minutes; SAVE=1 as below
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.remote.soak --requests 20000 --clients 8
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.remote.fuzz --messages 100000
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

bench: $(VENV)/.bench     ## speed beside its peers, as ratios; add SAVE=1 to write benchmarks/results
	$(BIN)/python -m benchmarks $(if $(SAVE),--save)

bench-gpu: $(VENV)/.bench ## how right times, memory and energy are on a CUDA device; SAVE=1 as above
	$(BIN)/python -m benchmarks.gpu $(if $(SAVE),--save)

bench-remote: $(VENV)/.bench ## two hosts as network namespaces, as root; eight minutes; SAVE=1 as above
	$(BIN)/python -m benchmarks.remote $(if $(SAVE),--save)

lock:                     ## the versions and digests of the development environment, into requirements-dev.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --dry-run --ignore-installed --report $(VENV)/report.json '.[dev,docs,bench]'
	$(BIN)/python -m tools.lock $(VENV)/report.json

sbom: $(VENV)/.dev        ## what the environment is made of, as CycloneDX, into sbom.json
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible --of JSON -o sbom.json $(BIN)/python

docs: $(VENV)/.docs       ## the manual, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: $(VENV)/.dev    ## the pictures of the manual, into docs/pictures/
	$(BIN)/python -m docs.pictures

clean:
	rm -rf $(VENV) .venv-torch-* site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# With LOCKED=1 everything but torch is what requirements-dev.lock has the digest of.
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
		|| echo "There is no Chromium, and it cannot be installed here: the tests of the page are skipped"
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then touch $@; fi

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) -e '.[docs]'
	@touch $@
