#!/usr/bin/env bash
# Start a teacher service on this machine: one proxy and N_WORKERS workers.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/server_common.sh"

usage() {
  cat <<'USAGE'
Usage: CKPT_PATH=/models/teacher teacher/start_server.sh [--option value ...]

Starts a proxy and its workers in the background and returns 0 once the service has answered a real request.
If a process ends before that, shows its last words, ends the others and returns 1.

USAGE
  worker_usage
  cat <<'USAGE'
  PROXY_FRONTEND_PORT     the port for clients                         [15555]
  BIND                    interface of both ports; there is no authentication: open it to trusted networks only
                                                                       [127.0.0.1]
  RUN_DIR                 pids and logs    [$PWD/outputs/teacher-PROXY_FRONTEND_PORT]
USAGE
}

known_options="$worker_options PROXY_FRONTEND_PORT BIND"
worker_defaults
PROXY_FRONTEND_PORT=${PROXY_FRONTEND_PORT:-15555} BIND=${BIND:-127.0.0.1}
parse_options "$@"
require_number TP_SIZE N_LOGPROBS N_WORKERS MAX_MODEL_LEN PROXY_FRONTEND_PORT PROXY_BACKEND_PORT START_TIMEOUT_S
((N_WORKERS >= 1 && TP_SIZE >= 1)) || die "N_WORKERS and TP_SIZE must be 1 or more"
check_checkpoint
python=$(find_python)
RUN_DIR=${RUN_DIR:-$PWD/outputs/teacher-$PROXY_FRONTEND_PORT}

# Workers of this machine and the final check reach the proxy where it listens.
local_ip=$BIND
if [[ $BIND == 0.0.0.0 || $BIND == "*" ]]; then local_ip=127.0.0.1; fi

# Another service on the port would otherwise answer the final check in our place.
for port in "$PROXY_FRONTEND_PORT" "$PROXY_BACKEND_PORT"; do
  if (: <>"/dev/tcp/$local_ip/$port") 2>/dev/null; then
    die "port $port of $local_ip is in use; stop what uses it (teacher/stop_server.sh), or set PROXY_FRONTEND_PORT / \
PROXY_BACKEND_PORT"
  fi
done
prepare_run_dir

# From here on nothing may be left behind, however this shell ends.
trap 'stop_all' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

launch proxy proxy --bind "$BIND" --frontend-port "$PROXY_FRONTEND_PORT" --backend-port "$PROXY_BACKEND_PORT"
launch_workers "$local_ip"
await_ready
PYTHONPATH="$repo_dir${PYTHONPATH:+:$PYTHONPATH}" \
  "$python" -m teacher check --server-ip "$local_ip" --port "$PROXY_FRONTEND_PORT" --timeout-s 60

trap - EXIT INT TERM HUP
echo "teacher service ready after $SECONDS s; logs in $RUN_DIR"
echo "end it with: teacher/stop_server.sh --run-dir $RUN_DIR"
