#!/usr/bin/env bash
# Lint and tests in the environment of examples/install.sh: bash tests/run.sh [--full] [pytest arguments]
# --full adds the tests marked slow, and keeps the end of the output in outputs/full-tests.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LIMIT=3000 SELECTED=(-m "not slow") PROCESSES=(-n 2 --dist loadgroup --no-loadscope-reorder) LOG=/dev/null
if [ "${1:-}" = --full ]; then
    shift
    LIMIT=10800 SELECTED=(--durations=15) LOG=$(mktemp)
    trap 'python tests/full_summary.py "$LOG" outputs/full-tests.md; rm -f "$LOG"' EXIT
fi

bash examples/install.sh
# shellcheck source=/dev/null
. .venv/bin/activate
if nvidia-smi --list-gpus >/dev/null 2>&1; then HARDWARE=gpu PROCESSES=(); else HARDWARE=cpu; fi
. examples/environment.sh "$HARDWARE"

ruff check .
ruff format --check .
python examples/bounded_run.py "$LIMIT" python -m pytest "${PROCESSES[@]}" "${SELECTED[@]}" "$@" | tee "$LOG"
