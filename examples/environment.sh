# Sourced by the run scripts after .venv/bin/activate: what verl, vLLM and Ray read from the environment. $1 is cpu or gpu.
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=false HYDRA_FULL_ERROR=1
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARN}
# Where examples/install.sh has compiled DeepSpeed's CPUAdam.
if [ -d "${VIRTUAL_ENV:-}/torch_extensions" ]; then export TORCH_EXTENSIONS_DIR=$VIRTUAL_ENV/torch_extensions; fi
# Ray kills workers when a machine is 95% full; the engine's arenas are planned and checked before they are allocated.
export RAY_memory_monitor_refresh_ms=0
# Ray's workers start with niceness 15: whatever else runs on the machine would slow the training down many times.
export RAY_worker_niceness=${RAY_worker_niceness:-0}

if [ "$1" = cpu ]; then
    export VERL_PLATFORM=cpu VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}  # GiB
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
    # Trainer, vLLM and others share the cores: a thread that waits must sleep, not spin on a core that another needs.
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
    # torch.compile costs more at start than it gains in so short a run.
    export TORCHDYNAMO_DISABLE=1
    # glibc: keep freed memory instead of handing it back and faulting it in again at every step.
    export MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=4294967296
    export MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=134217728
fi
