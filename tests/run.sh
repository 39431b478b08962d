#!/usr/bin/env bash
# Lint and tests in the environment of examples/install.sh: bash tests/run.sh [--full] [pytest arguments]
# --full adds the tests marked slow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LIMIT=3000 SELECTED=(-m "not slow")
if [ "${1:-}" = --full ]; then LIMIT=10800 SELECTED=(); shift; fi

bash examples/install.sh
# shellcheck source=/dev/null
. .venv/bin/activate
if nvidia-smi --list-gpus >/dev/null 2>&1; then HARDWARE=gpu; else HARDWARE=cpu; fi
. examples/environment.sh "$HARDWARE"

ruff check .
ruff format --check .
python examples/bounded_run.py "$LIMIT" python -m pytest "${SELECTED[@]}" "$@"
