# SPDX-License-Identifier: Apache-2.0
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

CLANG ?= clang
LLVM_STRIP ?= llvm-strip
VENV := .venv
BIN := $(VENV)/bin

DEBIAN_PACKAGES := bpftool clang clang-format conntrack ethtool gcc iproute2 iptables libbpf-dev \
	libc6-dev linux-libc-dev llvm make netconfd nftables openssh-server openssl python3-bpfcc \
	python3-venv tcpdump

OBJECTS := $(patsubst bpf/%.bpf.c,oncache/bpf/%.bpf.o,$(wildcard bpf/*.bpf.c))
HEADERS := $(wildcard bpf/lib/*.h)
# -mcpu=v3: what the oldest kernel we serve can run. The prefix map keeps a build path out of BTF.
BPF_CFLAGS := -O2 -g -Wall -Wextra -Werror -target bpf -mcpu=v3 \
	-fdebug-prefix-map=$(CURDIR)=. -I/usr/include/$(shell uname -m)-linux-gnu

PYTEST := $(BIN)/python -m pytest
LINT_TESTS := tests/unit/test_lint.py tests/unit/test_imports.py tests/unit/test_docs.py

.PHONY: help packages root setup bpf traffic demo test test-unit test-bpf test-netns lint format \
	bench fabric-lab bench-slices simulate-jct bench-ocs ocs-realise fuzz-programs mutation wheel clean

## help: this list
help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST) | awk '{ sub(":", ""); verb = $$1; $$1 = ""; printf "  %-15s%s\n", verb, $$0 }'

root:
	@[[ $$(id -u) == 0 ]] || { \
	  echo "error: $(firstword $(MAKECMDGOALS)) builds network namespaces and loads programs into the kernel"; \
	  echo "next: run it as root"; exit 1; } >&2

packages:
	@missing=$$(comm -23 <(printf '%s\n' $(DEBIAN_PACKAGES) | sort) \
	  <(dpkg-query -W -f='$${db:Status-Status} $${Package}\n' $(DEBIAN_PACKAGES) 2>/dev/null \
	    | sed -n 's/^installed //p' | sort -u) | tr '\n' ' '); \
	[[ -n "$$missing" ]] || exit 0; \
	if [[ $$(id -u) != 0 ]]; then \
	  echo "error: distribution packages are missing: $$missing"; \
	  echo "next: run make setup as root, or install them yourself"; exit 1; \
	fi >&2; \
	echo "installing: $$missing"; \
	apt-get -qq update; \
	DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $$missing >/dev/null

# Debian's own Python: the bcc of the distribution is built for it.
$(BIN)/python: | packages
	/usr/bin/python3 -m venv $(VENV)

# compat: a plain path entry; the default import hook costs every start of a command.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --config-settings editable_mode=compat -e '.[dev]'
	@touch $@

## setup: distribution packages, virtual environment, Python packages (quick the second time)
setup: packages $(VENV)/.installed

oncache/bpf/%.bpf.o: bpf/%.bpf.c $(HEADERS) Makefile | packages
	@mkdir -p $(@D)
	$(CLANG) $(BPF_CFLAGS) -c $< -o $@
	$(LLVM_STRIP) -g $@

## bpf: the BPF objects, into oncache/bpf/
bpf: $(OBJECTS)

build/%: bench/%.c | packages
	@mkdir -p $(@D)
	$(CC) -O2 -g -std=gnu11 -Wall -Wextra -Werror -o $@ $<

## traffic: the traffic programs of demo, benchmark and fabric laboratory, into build/
traffic: build/traffic build/collective

## demo: two hosts in namespaces: host-to-host, plain overlay, ONCache, in one table (root)
demo: root setup bpf traffic
	@$(BIN)/oncache demo

## test: everything: the three rings below (root)
test: root setup bpf traffic
	@$(MAKE) --no-print-directory --keep-going test-unit test-bpf test-netns

## test-unit: what needs nothing
test-unit: setup bpf
	$(PYTEST) tests/unit

## test-bpf: the real programs on made-up packets (root)
test-bpf: root setup bpf
	$(PYTEST) tests/bpf

## test-netns: real hosts and real traffic in network namespaces (root)
test-netns: root setup bpf traffic
	$(PYTEST) netns_tests

## lint: format, style, types, licences, import directions, documents
lint: setup
	$(PYTEST) -q $(LINT_TESTS)

## format: rewrite Python and C in the house style
format: setup
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format --quiet .
	find bpf bench tests -name '*.[ch]' -exec clang-format -i {} +

## bench: the benchmark; the last line is one JSON object (root)
bench: root setup bpf traffic
	@$(BIN)/oncache bench --json build/bench.json
	@cat build/bench.json

## fabric-lab: two jobs on a fabric of namespaces: ECMP against slices; JSON last (root)
fabric-lab: root setup traffic
	@$(BIN)/python -m bench.fabric_lab

## bench-slices: decisions at 8,192 GPUs, and an exact solver's verdict; JSON last
bench-slices: setup
	@$(BIN)/python -m bench.slices --json

## simulate-jct: job completion times under five policies, and a plot; JSON last
simulate-jct: setup
	@$(BIN)/python -m bench.simulate_jct

## bench-ocs: circuit plans at 32k GPUs; JSON last
bench-ocs: setup
	@$(BIN)/python -m bench.ocs

CASES ?= 10000

## ocs-realise: random demands on cross wiring and on uniform wiring: [CASES=n]; JSON last
ocs-realise: setup
	@$(BIN)/python -m bench.ocs_realise --cases $(CASES)

PACKETS ?= 5000000

## fuzz-programs: damaged packets against a reference: [PACKETS=n] [SEED=s] (root)
fuzz-programs: root setup bpf
	@$(BIN)/python -m tests.bpf.fuzz --packets $(PACKETS) $(if $(SEED),--seed $(SEED))

## mutation: take one check after another out of the programs; a test must notice (root)
mutation: root setup
	@$(BIN)/python -m tests.mutation

## wheel: dist/*.whl with the BPF objects inside
wheel: setup bpf
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m build --wheel --outdir dist

## clean: remove what was built, and the virtual environment
clean:
	rm -rf build dist $(VENV) oncache/bpf *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
