#!/usr/bin/env bash
# Stop the processes that start_server.sh or join_server.sh started, and no others. See --help.
set -euo pipefail
trap '' INT TERM HUP  # until the command handles them: an earlier signal would leave all processes running
repo=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$repo/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
if ! command -v -- "$python" >/dev/null; then
  echo "stop_server.sh: no Python found at $python; set PYTHON to the interpreter that has vLLM installed" >&2
  exit 1
fi
export TEACHER_SCRIPT=stop_server.sh PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
# Python loses a signal that arrives in a callback of its import system. The command unblocks signals after its imports.
blocked=()
[[ $(env --help 2>/dev/null) != *--block-signal* ]] || blocked=(env --block-signal=INT,TERM,HUP) # coreutils 8.31
exec ${blocked[@]+"${blocked[@]}"} "$python" -m teacher stop "$@"
