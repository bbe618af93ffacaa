#!/usr/bin/env bash
# Set up, then run ruff, mypy and the tests.
#   bash launch/test.sh [--fast | --all] [pytest arguments]
#     --fast  unit and property tests only: no Ray, vLLM or Megatron process, 3 minutes
#     --all   the slow tests too
#     -n 0    (an argument of pytest) one test after the other
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
  -h|--help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
selected=(-m "not slow")
case "${1:-}" in
  --fast) selected=(-m "not slow" tests/unit tests/fuzz); shift ;;
  --all) selected=(); shift ;;
esac

bash launch/setup.sh
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
export PYTHONDONTWRITEBYTECODE=  # hundreds of processes would compile the same modules
.venv/bin/ruff check .
.venv/bin/mypy
# Three processes, because many tests wait for deadlines, or for processes that use one core each.
# tests/conftest.py keeps tests that share an engine together.
exec .venv/bin/python -m pytest -n 3 --no-loadscope-reorder --durations 60 --durations-min 5 "${selected[@]}" "$@"
