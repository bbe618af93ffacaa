#!/usr/bin/env bash
# Add workers on this machine to a running teacher service on this or another machine.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/server_common.sh"

usage() {
  cat <<'USAGE'
Usage: SERVER_IP=10.0.0.1 CKPT_PATH=/models/teacher teacher/join_server.sh [--option value ...]

Starts N_WORKERS workers for the proxy at SERVER_IP:PROXY_BACKEND_PORT and returns 0 once it has accepted them all.
They must serve the same model with the same N_LOGPROBS and MAX_MODEL_LEN as the existing workers.

USAGE
  worker_usage
  cat <<'USAGE'
  SERVER_IP               address of the proxy, which must listen there (BIND of start_server.sh)  [127.0.0.1]
  AUTH_DIR                keys, if the service uses them: a copy of its AUTH_DIR/clients/NAME, or its AUTH_DIR
  RUN_DIR                 pids and logs  [$PWD/outputs/teacher-join-HOST-SERVER_IP-PROXY_BACKEND_PORT]
USAGE
}

known_options="$worker_options SERVER_IP"
worker_defaults
SERVER_IP=${SERVER_IP:-127.0.0.1}
parse_options "$@"
refuse_renamed_variables
check_numbers
check_checkpoint
find_gpus
python=$(find_python)
check_machine
check_auth_dir
RUN_DIR=${RUN_DIR:-$PWD/outputs/teacher-join-$this_host-$SERVER_IP-$PROXY_BACKEND_PORT}
prepare_run_dir

stop_processes_on_exit

launch_workers "$SERVER_IP"
await_ready

trap - EXIT INT TERM HUP
echo "$N_WORKERS workers joined $SERVER_IP:$PROXY_BACKEND_PORT after $SECONDS s; logs in $RUN_DIR"
echo "stop them with: $teacher_dir/stop_server.sh --run-dir $RUN_DIR"
