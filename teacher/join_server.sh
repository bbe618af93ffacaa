#!/usr/bin/env bash
# Add workers, from this or another machine, to a teacher service that runs.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/server_common.sh"

usage() {
  cat <<'USAGE'
Usage: SERVER_IP=10.0.0.1 CKPT_PATH=/models/teacher teacher/join_server.sh [--option value ...]

Starts N_WORKERS workers for the proxy at SERVER_IP:PROXY_BACKEND_PORT and returns 0 once it has accepted them all.
They must serve the same model with the same N_LOGPROBS and MAX_MODEL_LEN as the workers that are there.

USAGE
  worker_usage
  cat <<'USAGE'
  SERVER_IP               where the proxy runs (it must listen there: BIND of start_server.sh)  [127.0.0.1]
  AUTH_DIR                of a service that has keys: a copy of its AUTH_DIR/clients/NAME, or that AUTH_DIR itself
  RUN_DIR                 pids and logs  [$PWD/outputs/teacher-join-HOST-SERVER_IP-PROXY_BACKEND_PORT]
USAGE
}

known_options="$worker_options SERVER_IP"
worker_defaults
SERVER_IP=${SERVER_IP:-127.0.0.1}
parse_options "$@"
check_numbers
check_checkpoint
find_gpus
python=$(find_python)
check_auth_dir
RUN_DIR=${RUN_DIR:-$PWD/outputs/teacher-join-$this_host-$SERVER_IP-$PROXY_BACKEND_PORT}
prepare_run_dir

leave_nothing_behind

launch_workers "$SERVER_IP"
await_ready

trap - EXIT INT TERM HUP
echo "$N_WORKERS workers joined $SERVER_IP:$PROXY_BACKEND_PORT after $SECONDS s; logs in $RUN_DIR"
echo "end them with: teacher/stop_server.sh --run-dir $RUN_DIR"
