# Every target sets up what it needs, from nothing: `make demo` alone is enough on a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)-demo
# What starts real servers, fakes crashes or waits for a disk: part of `make test` alone.
SLOW := tests/system tests/wire tests/acceptance tests/sdk tests/simulation tests/unit/journal/redis

# The tests of one file run one after the other, those of several files side by side.
PYTEST := $(BIN)/pytest -q --numprocesses auto --dist loadfile

# A server that compiles its modules at each start starts in twice the time, and the tests start thousands.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-redis test-replicas check audit imports simulate bench bench-peers soak recording lock clean

demo: $(DEMO)/.ready
	$(DEMO)/bin/mcp-streams demo

test: $(READY)
	$(PYTEST)

# The servers of these tests with a journal on Redis, and as three replicas behind HAProxy.
test-redis test-replicas: $(READY)
	$(PYTEST) --over $(@:test-%=%) tests/wire tests/sdk

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml streams transports benchmarks
	$(PYTEST) $(addprefix --ignore=,$(SLOW))

# Known vulnerabilities of the packages in constraints.txt: 1 where there are any, 2 where no service
# could be asked.
audit: $(READY)
	$(BIN)/python -m tests.auditing constraints.txt

# The picture of the graph of imports: rooms, floors, arrows and circles.
imports: $(READY)
	$(BIN)/python -m tests.imports --draw

# A million virtual seconds: about ten minutes of two cores.
simulate: $(READY)
	$(BIN)/python -m tests.simulation --seeds 2000 --seconds 500 --jobs 2
	$(BIN)/python -m tests.simulation --replicas --seeds 1000 --jobs 2
	$(BIN)/python -m tests.simulation --crowd --seeds 2000 --jobs 2
	$(BIN)/python -m tests.simulation --crowd --replicas --seeds 500 --jobs 2
	$(BIN)/python -m tests.simulation --hosts --seeds 500 --jobs 2

bench: $(READY)
	$(BIN)/python -m benchmarks

bench-peers: $(READY)
	PIP=$(BIN)/pip benchmarks/peers/install
	$(BIN)/python -m benchmarks --peers

# The busiest day, compressed: is the server's use of resources flat?
MINUTES ?= 30
soak: $(READY)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

# The picture of a terminal in the README, from a session that is played for it.
recording: $(READY)
	$(BIN)/python docs/record.py

# Write constraints.txt anew, with the newest of everything that pyproject.toml allows.
lock:
	rm -rf $(VENV)-lock
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install --disable-pip-version-check --quiet --editable '.[dev]'
	$(VENV)-lock/bin/pip freeze --exclude-editable > constraints.txt
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) $(DEMO)

# What `pip install mcp-streams` installs, and nothing that only development needs.
$(DEMO)/.ready: pyproject.toml constraints.txt $(shell find streams transports -name '*.py')
	test -x $(DEMO)/bin/pip || $(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/pip install --disable-pip-version-check --no-input --quiet \
		--constraint constraints.txt .
	touch $@

# pip comes with the venv; the stamp is written last, so that a broken set-up starts again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=… ")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --no-input --quiet \
		--constraint constraints.txt --editable '.[dev]'
	touch $@
