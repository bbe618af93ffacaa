#!/usr/bin/env bash
# Train the quickstart's student on two nodes that are network namespaces of this machine. Needs root on Linux.
#
#   bash launch/run_two_nodes_here.sh [key=value ...]
#
# node0 (10.78.0.1): the driver, Ray's head, and the actor pool of two ranks. node1 (10.78.0.2): the rollout worker, and
# the teacher service with keys. Each node has its own interfaces, process ids, host name, /dev/shm and /tmp/ray; a
# bridge joins them. The network cannot be reached from outside. 100 steps take about 3 minutes on two cores.
#
#   key=value   any key of `python -m recipe_gkd.config`, such as trainer.total_training_steps=250
#
# Environment: QUICKSTART_DIR (outputs/quickstart): models, data and the run, under runs/two_nodes. The models are
# created if they are missing, which takes a minute. A new call replaces the previous run.
# Ctrl-C or SIGTERM ends the training and both nodes. They also end if this script is killed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/paths.bash"
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() { echo "run_two_nodes_here.sh: $*" >&2; exit 2; }

for argument in "$@"; do
  case "$argument" in
    -h|--help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *=*) ;;
    *) refuse "unknown argument $argument (see --help)" ;;
  esac
done
[ "$(id -u)" = 0 ] || refuse "creating network namespaces needs root"
for tool in unshare nsenter ip mount hostname; do
  command -v "$tool" >/dev/null || refuse "$tool is missing; install util-linux, iproute2 and hostname"
done
bash launch/setup.sh --check || refuse "run 'bash launch/setup.sh' first"

QUICKSTART_DIR=$(new_path "${QUICKSTART_DIR:-}")
QUICKSTART_DIR=$(realpath -m "${QUICKSTART_DIR:-outputs/quickstart}")
export QUICKSTART_DIR OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
# Without its own token the head would require the one of the home directory, if there is one.
RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE RAY_AUTH_TOKEN
python=$PWD/.venv/bin/python
run=$QUICKSTART_DIR/runs/two_nodes
mkdir -p "$QUICKSTART_DIR" /tmp/ray
exec 9>> "$QUICKSTART_DIR/.lock"
flock -n 9 || refuse "a quickstart runs in $QUICKSTART_DIR; wait for it, or set QUICKSTART_DIR"
"$python" -m recipe_gkd.quickstart.prepare --out "$QUICKSTART_DIR"

private=$(mktemp -d)
launchers=() addresses=(10.78.0.1 10.78.0.2) driver='' status=0
end_nodes() {
  exec 8>&-  # the first process of each node waits for this
  [ ${#launchers[@]} = 0 ] || { kill -KILL "${launchers[@]}" 2>/dev/null || true; wait "${launchers[@]}" 2>/dev/null || true; }
  rm -rf "$private"
}
forward() { # forward SIGNAL STATUS: send a signal to the driver, or exit if there is none
  status=$2
  [ -n "$driver" ] || exit "$status"
  kill -s "$1" $(cat "/proc/$driver/task/$driver/children") 2>/dev/null || true
}
trap end_nodes EXIT
trap 'forward INT 130' INT
trap 'forward TERM 143' TERM
trap 'forward USR1 138' USR1
trap 'forward HUP 129' HUP
mkfifo "$private/alive"
exec 8<> "$private/alive"

first_process=''
start_namespaces() { # start_namespaces NAME SETUP [OPTION...]: set first_process
  local name=$1 setup=$2; shift 2
  setsid unshare --net --pid --fork --kill-child "$@" bash -c "set -e; ip link set lo up; $setup; echo ready > '$private/$name'; while read -r _; do :; done" \
    < "$private/alive" 8>&- 9>&- &
  launchers+=($!)
  for _ in $(seq 100); do [ ! -s "$private/$name" ] || break; sleep 0.1; done
  [ -s "$private/$name" ] || { echo "run_two_nodes_here.sh: this machine cannot create $name" >&2; exit 1; }
  first_process=$(cat "/proc/$!/task/$!/children"); first_process=${first_process% }
}

on_node() { # on_node NUMBER COMMAND...: run COMMAND on a node, in place of this shell
  local node=${nodes[$1]}; shift
  exec nsenter --target "$node" --net --pid --mount --uts --ipc env -C "$PWD" "$@" 8>&- 9>&-
}

run_on() { # run_on NUMBER COMMAND...: run COMMAND on a node; a signal ends this script meanwhile, and so the nodes
  (on_node "$@") < /dev/null &
  wait $!
}

printf '127.0.0.1 localhost\n%s node0\n%s node1\n' "${addresses[@]}" > "$private/hosts"
nodes=()
start_namespaces switch "ip link add switch type bridge; ip link set switch up"
switch=$first_process
for i in 0 1; do
  mkdir -p "$private/ray$i"
  start_namespaces "node$i" "hostname node$i; mount -t tmpfs tmpfs /dev/shm; mount --bind '$private/ray$i' /tmp/ray; mount --bind '$private/hosts' /etc/hosts; mount --bind /dev/null /etc/resolv.conf" \
    --mount --uts --ipc --mount-proc
  nodes+=("$first_process")
  ip link add "to_node$i" netns "$switch" type veth peer name eth0 netns "${nodes[i]}"
  nsenter --target "${nodes[i]}" --net ip address add "${addresses[i]}/24" dev eth0
  nsenter --target "${nodes[i]}" --net ip link set eth0 up
  nsenter --target "$switch" --net ip link set "to_node$i" master switch up
done

echo "== Ray on both nodes"
ray=("$python" -c 'from ray.scripts.scripts import main; main()' start --num-gpus=0 --object-store-memory=200000000)
run_on 0 "${ray[@]}" --head --node-ip-address="${addresses[0]}" --port=6379 --num-cpus=2 --include-dashboard=false > "$private/log" 2>&1 \
  || { cat "$private/log" >&2; exit 1; }
run_on 1 "${ray[@]}" --address="${addresses[0]}:6379" --node-ip-address="${addresses[1]}" --num-cpus=1 > "$private/log" 2>&1 \
  || { cat "$private/log" >&2; exit 1; }

echo "== teacher service with keys on node1"
"$python" -m teacher keys --auth-dir "$private/keys" > /dev/null
run_on 1 env CKPT_PATH="$QUICKSTART_DIR/teacher" RUN_DIR="$private/teacher" AUTH_DIR="$private/keys" BIND="${addresses[1]}" HTTP_PORT=-1 \
  N_LOGPROBS=16 DTYPE=float32 MAX_MODEL_LEN=64 PYTHON="$python" bash teacher/start_server.sh

echo "== training: driver and actor pool on node0, rollout worker on node1"
rm -rf "$run"
set -m  # a separate process group: Ctrl-C reaches the driver once, through this script
(on_node 0 "$python" -m recipe_gkd.main_gkd --config-name quickstart trainer.experiment_name=two_nodes \
  ray_init.address="${addresses[0]}:6379" trainer.n_gpus_per_node=2 trainer.total_training_steps=100 \
  actor_rollout_ref.teacher.server_ip="${addresses[1]}" actor_rollout_ref.teacher.auth_dir="$private/keys" "$@") < /dev/null &
driver=$!
set +m
code=0
while [ -d "/proc/$driver" ]; do  # a signal ends `wait`, not the driver
  code=0; wait "$driver" || code=$?
done
[ "$code" = 0 ] || status=$code  # such as 75: saved between steps
echo "run folder: $run"
exit "$status"
