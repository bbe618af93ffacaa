#!/usr/bin/env bash
# Start a teacher service on this machine: one proxy and N_WORKERS workers.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/server_common.sh"

usage() {
  cat <<'USAGE'
Usage: CKPT_PATH=/models/teacher teacher/start_server.sh [--option value ...]

Starts a proxy and its workers in the background and returns 0 once the service has answered a real request.
If a process ends before that, prints the end of its log, stops the others and returns 1.

USAGE
  worker_usage
  cat <<'USAGE'
  PROXY_FRONTEND_PORT     the port for clients                         [15555]
  BIND                    interface of both ports; any but loopback needs AUTH_DIR or TRUSTED_NETWORK  [127.0.0.1]
  TRUSTED_NETWORK         1: allow any BIND without keys; everyone who reaches it can use and disturb the service  [0]
  PROXY_IO_THREADS        threads of the proxy that send, receive and encrypt  [cores, at most 4]
  HTTP_PORT, HTTP_BIND    /healthz and /metrics; 0: any port, -1: none. They use no keys: bind them to trusted
                          networks only                                [PROXY_FRONTEND_PORT + 2, 127.0.0.1]
  MAX_QUEUE_TOKENS        maximum tokens in the proxy's queue; further requests wait at the clients  [8388608]
  RUN_DIR                 pids and logs    [$PWD/outputs/teacher-HOST-PROXY_FRONTEND_PORT]
USAGE
}

known_options="$worker_options PROXY_FRONTEND_PORT BIND TRUSTED_NETWORK PROXY_IO_THREADS HTTP_PORT HTTP_BIND MAX_QUEUE_TOKENS"
worker_defaults
PROXY_FRONTEND_PORT=${PROXY_FRONTEND_PORT:-15555} BIND=${BIND:-127.0.0.1}
TRUSTED_NETWORK=${TRUSTED_NETWORK:-0} PROXY_IO_THREADS=${PROXY_IO_THREADS:-}
HTTP_PORT=${HTTP_PORT:-} HTTP_BIND=${HTTP_BIND:-127.0.0.1} MAX_QUEUE_TOKENS=${MAX_QUEUE_TOKENS:-8388608}
parse_options "$@"
refuse_renamed_variables
check_numbers PROXY_FRONTEND_PORT MAX_QUEUE_TOKENS
[[ $TRUSTED_NETWORK == [01] ]] || die "TRUSTED_NETWORK must be 0 or 1, got '$TRUSTED_NETWORK'"
trusted=()
if [[ $TRUSTED_NETWORK == 1 ]]; then trusted=(--trusted-network); fi
check_checkpoint
find_gpus
python=$(find_python)
check_machine
check_auth_dir
RUN_DIR=${RUN_DIR:-$PWD/outputs/teacher-$this_host-$PROXY_FRONTEND_PORT}

# Workers of this machine and the final check connect to the interface of the proxy.
local_ip=$BIND
if [[ $BIND == 0.0.0.0 || $BIND == "*" ]]; then local_ip=127.0.0.1; fi

# Otherwise another service on the port could answer the final check.
for port in "$PROXY_FRONTEND_PORT" "$PROXY_BACKEND_PORT"; do
  if (: <>"/dev/tcp/$local_ip/$port") 2>/dev/null; then
    die "port $port of $local_ip is in use; stop what uses it ($teacher_dir/stop_server.sh), or set PROXY_FRONTEND_PORT / \
PROXY_BACKEND_PORT"
  fi
done
prepare_run_dir

stop_processes_on_exit

# The proxy first: it fails at once if its ports, keys or interface cannot be used.
launch_env=()
launch proxy proxy --bind "$BIND" --frontend-port "$PROXY_FRONTEND_PORT" --backend-port "$PROXY_BACKEND_PORT" \
  --http-bind "$HTTP_BIND" ${HTTP_PORT:+--http-port "$HTTP_PORT"} "${trusted[@]}" \
  ${PROXY_IO_THREADS:+--io-threads "$PROXY_IO_THREADS"} --max-queue-tokens "$MAX_QUEUE_TOKENS"
await_ready
launch_workers "$local_ip"
await_ready
PYTHONPATH="$repo_dir${PYTHONPATH:+:$PYTHONPATH}" \
  "$python" -m teacher check --server-ip "$local_ip" --port "$PROXY_FRONTEND_PORT" --timeout-s 60 \
  ${AUTH_DIR:+--auth-dir "$AUTH_DIR"} &
checker=$!
wait "$checker"  # unlike a foreground command, wait does not delay a signal
checker=''

trap - EXIT INT TERM HUP
echo "teacher service ready after $SECONDS s; logs in $RUN_DIR"
echo "show its status with: $python -m teacher status --server-ip $local_ip --port $PROXY_FRONTEND_PORT${AUTH_DIR:+ --auth-dir $AUTH_DIR}"
echo "stop it with: $teacher_dir/stop_server.sh --run-dir $RUN_DIR"
