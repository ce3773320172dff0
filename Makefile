# `make run` and `make test` set everything up on a machine that has only Python and make.
# Set-up leaves a stamp in .venv; nothing is installed again until one of SOURCES changes.

# The first Python that is new enough; say `make PYTHON=/path/to/python` to choose.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; \
	done; echo python3)
VENV ?= .venv
WORKERS ?= 2
DATA ?= ./data

BIN := $(VENV)/bin
SERVER := $(VENV)/.stamp-server
DEV := $(VENV)/.stamp-dev
TWINS := src/millstream/log/_batch src/millstream/log/_placing \
	src/millstream/engine/_appends src/millstream/wire/_frames
SOURCES := pyproject.toml constraints.txt setup.py \
	$(wildcard $(addsuffix *.px*,$(TWINS)))

# Pins hold for the packages and for the tools that build this one, whatever pip's age.
PINS := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	PIP_DISABLE_PIP_VERSION_CHECK=1

.DEFAULT_GOAL := help
.PHONY: help install run demo test test-compiled test-pure test-faults test-clients test-soak fuzz \
	check format docs bench kafka-peer spark-kafka-jars audit clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

install: $(SERVER)  ## set up .venv with what a broker needs; leaves .venv/bin/mill

run: $(SERVER)  ## start a broker with its data in ./data
	$(BIN)/mill serve --data $(DATA)

demo: $(DEV)  ## a broker, orders, workers and Spark at work, for two minutes
	$(BIN)/python examples/demo

test: test-compiled test-pure  ## the tests, then those of the twins on their pure side

test-compiled: $(DEV)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-pure: $(DEV)
	MILLSTREAM_PURE=1 $(BIN)/python -m pytest -n $(WORKERS) -q \
		tests/log/test_batch*.py tests/log/test_placing.py tests/log/test_journal.py \
		tests/log/test_segment.py tests/log/test_partition.py tests/engine tests/wire

test-faults: $(DEV)  ## every test, with the full set of crashes and broken disks
	MILLSTREAM_FAULTS=full $(BIN)/python -m pytest -n $(WORKERS) --timeout 7200

test-clients: $(DEV)  ## the own tests of kafka-python and aiokafka, against a broker of ours
	PYTHONPATH=tests $(BIN)/python -m clients.other_suites

test-soak: $(DEV)  ## an hour's worth of load, ten thousand connections, clients that are killed
	MILLSTREAM_SOAK=full $(BIN)/python -m pytest --timeout 7200 tests/soak

fuzz: $(DEV)  ## feed made-up bytes to what reads Kafka's requests, for a minute
	$(BIN)/python tests/fuzz/kafka_requests.py -max_total_time=60

check: $(DEV)  ## formatting, lint, types, import directions, lengths, dead code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_house.py
	$(BIN)/vulture

format: $(DEV)  ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DEV)  ## make docs/settings.md and docs/http.md from the tables in the code
	$(BIN)/mill config docs > docs/settings.md
	$(BIN)/python -m millstream.http_docs > docs/http.md

bench: $(DEV)  ## measure the log against its peers
	$(BIN)/mill bench log

kafka-peer: $(DEV)  ## fetch an Apache Kafka for `mill bench kafka` to compare with
	$(BIN)/python -m bench.kafka_peer

spark-kafka-jars: $(DEV)  ## fetch Spark's own Kafka connector for `mill bench spark`
	$(BIN)/python -m bench.spark_connector

audit: $(DEV)  ## known vulnerabilities in the pinned versions
	@.ci/audit $(BIN)

clean:  ## remove what the set-up and the checks made; data stays
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache
	rm -f $(addsuffix .c,$(TWINS)) $(addsuffix .*.so,$(TWINS))

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Millstream needs Python 3.11 or newer, and found: $$($(PYTHON) --version 2>&1 | head -n 1)."; \
		echo "Install one, or name it: make PYTHON=/path/to/python"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)

define say-which-twin
	@for twin in $(TWINS); do ls $$twin.*.so >/dev/null 2>&1 || \
		echo "There is no compiled $$twin (no C compiler?): its pure-Python twin is used."; done
endef

$(SERVER): $(SOURCES) | $(BIN)/python
	$(PINS) $(BIN)/python -m pip install --quiet -e '.[server]'
	$(say-which-twin)
	@touch $@

# The broker's packages are among those of the tests, so this set-up counts for both.
$(DEV): $(SOURCES) | $(BIN)/python
	$(PINS) $(BIN)/python -m pip install --quiet -e '.[dev]'
	$(say-which-twin)
	@touch $(SERVER) $@
