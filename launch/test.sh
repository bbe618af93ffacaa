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
# Two processes: most of the long tests wait for processes that use one core each. A folder of tests stays in one of them (tests/conftest.py).
status=0
.venv/bin/python -m pytest -n 2 --no-loadscope-reorder --cache-clear "${slow[@]}" "$@" || status=$?

# The tests wait for real processes with deadlines of seconds, which a busy machine can miss. So a few failed tests get a
# second chance, alone: a defect fails again, and a test that passes now is named.
failed=.pytest_cache/v/cache/lastfailed
n_failed=$(grep -c '": true' "$failed" 2>/dev/null || true)
if [ "$status" = 1 ] && [ "${n_failed:-0}" -ge 1 ] && [ "$n_failed" -le 5 ]; then
  names=$(sed -n 's/^ *"\(.*\)": true,\{0,1\}$/  \1/p' "$failed")
  printf '\n%s test(s) failed; once more, one after the other:\n%s\n' "$n_failed" "$names"
  status=0
  .venv/bin/python -m pytest "${slow[@]}" "$@" -n 0 --last-failed || status=$?
  if [ "$status" = 0 ]; then
    printf '\nThese tests failed beside others and passed alone:\n%s\n' "$names"
  fi
fi
exit "$status"
