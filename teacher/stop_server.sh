#!/usr/bin/env bash
# Stop the processes that start_server.sh or join_server.sh started, and no others.
set -euo pipefail
trap '' INT TERM HUP  # until `stop_all` handles them: an earlier signal would leave all processes running
source "$(dirname -- "${BASH_SOURCE[0]}")/server_common.sh"

usage() {
  cat <<'USAGE'
Usage: teacher/stop_server.sh [--option value ...]

Sends SIGTERM to each process of the run folder, waits, and kills the remaining ones. A pid that now belongs to another
process is left alone. Processes of other hosts and unreadable pid files are reported, and the exit status is 1. Returns
0 if no process of the folder runs afterwards, even if none ran before.

Options, as flags or environment variables:
  PROXY_FRONTEND_PORT  port of the service, part of the default run folder  [15555]
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
  echo "nothing to stop: no process is recorded in $RUN_DIR (set --run-dir if another folder was used)"
  exit 0
fi
stop_all
report_foreign
if ((${#foreign[@]})); then
  die "stopped ${#own[@]} processes of this host, and left ${#foreign[@]} pid files alone; see above"
fi
echo "stopped; logs are kept in $RUN_DIR"
