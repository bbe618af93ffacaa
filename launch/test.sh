#!/usr/bin/env bash
# Set up, then run everything that must pass: ruff, mypy, the test suite.
#   bash launch/test.sh [--all] [pytest arguments]      --all: the slow tests too; -n 0: one test after the other
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
  -h|--help) sed -n '2,3s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
slow=(-m "not slow")
if [ "${1:-}" = --all ]; then slow=(); shift; fi

bash launch/setup.sh
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
.venv/bin/ruff check .
.venv/bin/mypy
# Two processes: most of the long tests wait for processes that use one core each. A folder of tests stays in one of
# them (tests/conftest.py). Tests wait for real processes with deadlines of seconds, which a busy machine can miss, so a
# failed test is run once more; pytest lists the tests that needed it (RERUN).
exec .venv/bin/python -m pytest -n 2 --no-loadscope-reorder --reruns 1 -rR "${slow[@]}" "$@"
