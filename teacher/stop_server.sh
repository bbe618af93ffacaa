#!/usr/bin/env bash
# End what start_server.sh or join_server.sh started, and nothing else.
set -euo pipefail
trap '' INT TERM HUP  # until `stop_all` handles them: a signal between two reads would leave all processes running
source "$(dirname -- "${BASH_SOURCE[0]}")/server_common.sh"

usage() {
  cat <<'USAGE'
Usage: teacher/stop_server.sh [--option value ...]

Asks each process of the run folder to end, waits, and forces what is left. A pid that now belongs to another process is
left alone. So are processes of another host, and pid files that cannot be read: these are named, and the exit status is
1. Returns 0 if nothing runs afterwards, also if nothing ran before.

Options, as flags or environment variables:
  PROXY_FRONTEND_PORT  port of the service, which names its run folder  [15555]
  RUN_DIR              run folder  [$PWD/outputs/teacher-HOST-PROXY_FRONTEND_PORT]
  STOP_TIMEOUT_S       seconds before SIGKILL  [10]
USAGE
}

known_options="PROXY_FRONTEND_PORT RUN_DIR STOP_TIMEOUT_S"
PROXY_FRONTEND_PORT=${PROXY_FRONTEND_PORT:-15555} RUN_DIR=${RUN_DIR:-} STOP_TIMEOUT_S=${STOP_TIMEOUT_S:-10}
parse_options "$@"
require_number PROXY_FRONTEND_PORT STOP_TIMEOUT_S
RUN_DIR=${RUN_DIR:-$PWD/outputs/teacher-$this_host-$PROXY_FRONTEND_PORT}

own_pid_files
if ((${#own[@]} + ${#foreign[@]} == 0)); then
  echo "nothing to stop: no process is recorded in $RUN_DIR (if it was started elsewhere: --run-dir)"
  exit 0
fi
stop_all
report_foreign
if ((${#foreign[@]})); then
  die "stopped ${#own[@]} processes of this host, and left ${#foreign[@]} pid files alone; see above"
fi
echo "stopped; logs stay in $RUN_DIR"
