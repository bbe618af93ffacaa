#!/usr/bin/env bash
# Add workers on this machine to a running teacher service on this or another machine. See --help.
set -euo pipefail
repo=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$repo/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
if ! command -v -- "$python" >/dev/null; then
  echo "join_server.sh: no Python found at $python; set PYTHON to the interpreter that has vLLM installed" >&2
  exit 1
fi
export TEACHER_SCRIPT=join_server.sh PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
# Python loses a signal that arrives in a callback of its import system. The command unblocks signals after its imports.
blocked=()
[[ $(env --help 2>/dev/null) != *--block-signal* ]] || blocked=(env --block-signal=INT,TERM,HUP) # coreutils 8.31
exec ${blocked[@]+"${blocked[@]}"} "$python" -m teacher join "$@"
