# waitfold - see README.md. `make demo` and `make test` do all the set-up on Debian or Ubuntu, as root.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PREFIX ?= /usr/local
PYTHON ?= python3
# Of `make install`: --no-deps where numpy, pandas and pyarrow come from elsewhere.
PIPFLAGS ?=
# Its schema is what the tests check the export against.
SPEEDSCOPE := speedscope@1.25.0
SCRIPTS := waitfold-record waitfold-probes waitfold-doctor waitfold-watch
BASH_FILES := $(addprefix scripts/,$(SCRIPTS)) $(wildcard scripts/*.bash samples/*.sh bench/*.sh bench/*.bash tests/*.sh completion/*.bash) .ci/run

.PHONY: help demo test lint deps install install-host install-analysis uninstall clean truth modes cost flood speed account kill fuzz diff-truth matrix usdt-postgres

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

demo: deps ## a throw-away server under load, recorded, reported and drawn
	samples/demo.sh

test: deps lint ## every test; takes some minutes
	.venv/bin/pytest -q tests

lint: deps ## shellcheck, shfmt, ruff, mypy
	shellcheck -x $(BASH_FILES)
	.venv/bin/shfmt -d -i 4 -ci $(BASH_FILES)
	.venv/bin/ruff check -q postproc tests bench
	.venv/bin/ruff format -q --check postproc tests bench
	.venv/bin/mypy postproc/waitfold

deps: .venv/.stamp ## system packages, and .venv/ with .venv/bin/waitfold
	@tests/packages.sh

.venv/.stamp: pyproject.toml tests/packages.sh
	@tests/packages.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "waitfold's post-processor needs Python 3.11 or later; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	npm install --loglevel=error --no-audit --no-fund --no-save --ignore-scripts --prefix .venv/npm $(SPEEDSCOPE) >/dev/null
	touch $@

# Everything lies together in LIB, and the commands find the rest beside their real place.
LIB = $(DESTDIR)$(PREFIX)/lib/waitfold
BIN = $(DESTDIR)$(PREFIX)/bin
MAN = $(DESTDIR)$(PREFIX)/share/man/man1
COMPLETION = $(DESTDIR)$(PREFIX)/share/bash-completion/completions

install: install-host ## all commands, man pages and completion under PREFIX; of them the analysis where Python 3.11 is, by pip
	if ! type -P $(PYTHON) >/dev/null || ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	    echo "waitfold, the analysis, is left out: it needs Python 3.11 or later; name one with: make PYTHON=python3.12 install" >&2; \
	else \
	    $(MAKE) --no-print-directory install-analysis; \
	fi

install-host: ## of these what the server's host needs: no Python
	install -d $(BIN) $(LIB)/scripts $(LIB)/probes/wait_events $(MAN) $(COMPLETION)
	install -m 755 $(addprefix scripts/,$(SCRIPTS)) $(LIB)/scripts/
	install -m 644 scripts/*.bash scripts/*.awk $(LIB)/scripts/
	install -m 644 probes/*.set $(LIB)/probes/
	install -m 644 probes/wait_events/* $(LIB)/probes/wait_events/
	install -m 644 docs/man/*.1 $(MAN)/
	install -m 644 completion/waitfold.bash $(COMPLETION)/waitfold
	for script in $(SCRIPTS); do \
	    ln -sf ../lib/waitfold/scripts/$$script $(BIN)/$$script; \
	    ln -sf waitfold $(COMPLETION)/$$script; \
	done

install-analysis:
	rm -rf $(LIB)/python $(LIB)/waitfold $(BIN)/waitfold
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore $(PIPFLAGS) --target $(LIB)/python . || \
	    { rm -rf $(LIB)/python; echo "the host's side is installed; the analysis, waitfold, is not, as pip failed. Without it: make install-host" >&2; exit 1; }
	printf '%s\n' "#!$$($(PYTHON) -c 'import sys; print(sys.executable)')" 'import os, sys' \
	    'sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)) + "/python")' \
	    'from waitfold.__main__ import main' 'sys.exit(main())' > $(LIB)/waitfold
	chmod 755 $(LIB)/waitfold
	ln -sf ../lib/waitfold/waitfold $(BIN)/waitfold

uninstall: ## what install put there
	rm -rf $(LIB)
	rm -f $(addprefix $(BIN)/,waitfold $(SCRIPTS)) $(addprefix $(COMPLETION)/,waitfold $(SCRIPTS)) $(addprefix $(MAN)/,$(notdir $(wildcard docs/man/*.1)))

clean: ## what the other targets made
	rm -rf .venv build .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

truth: deps ## sites against a bpftrace watchpoint, over 100,000 transitions
	bench/truth.sh

modes: deps ## mode against mode, on the same backends at the same time: WAITFOLD_USDT=prefix of a patched server
	bench/modes.sh

flood: deps ## 300,000 transitions a second for 30 s, by either engine
	bench/flood.sh

cost: deps ## CPU added per transition by each mode and engine, and by bpftrace: WAITFOLD_USDT=prefix of a patched server
	bench/cost.sh

speed: deps ## the reader against perf script and mawk
	bench/speed.sh

account: deps ## is all of each backend's time accounted for, and as the kernel counts it?
	bench/account.sh

kill: deps ## kill -9 at random moments
	bench/kill.sh

fuzz: deps ## 100,000 damaged files of all kinds that are read
	.venv/bin/python bench/fuzz.py

diff-truth: deps ## diff: A against A, and a disk that is 20 % slower
	bench/diff.sh

matrix: deps ## every mode and engine on every server: WAITFOLD_SERVERS=folder with one sub-folder a version, WAITFOLD_USDT=prefix of a patched one
	WAITFOLD_TABLE=docs/matrix.md .venv/bin/pytest -q tests/matrix

usdt-postgres: deps ## a PostgreSQL with wait__event probes in build/usdt-postgres; NOP5=1: with 5-byte nops in build/usdt-postgres-nop5; PLAIN=1: without, in build/usdt-postgres-plain
	tests/usdt_postgres.sh
