# Functions shared by start_server.sh, join_server.sh and stop_server.sh. Not a command.
#
# A run folder contains for each process: NAME.pid ("pid start-ticks boot-id host"), NAME.log, and NAME.ready once it
# serves. Start ticks (field 22 of /proc/PID/stat) and boot id distinguish our process from a later one with the same
# pid. The host distinguishes it from a process of another machine that shares the folder.

this_host=$(uname -n)
this_boot=$(cat /proc/sys/kernel/random/boot_id)
teacher_dir=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
repo_dir=$(dirname -- "$teacher_dir")

die() {
  echo "$(basename -- "$0"): $*" >&2
  exit 1
}

# parse_options ARGUMENT...: Set the variables named by the flags. Flags override the environment.
parse_options() {
  while (($#)); do
    case $1 in
      --help | -h)
        usage
        exit 0
        ;;
      --*)
        local flag=${1%%=*} value
        if [[ $1 == *=* ]]; then
          value=${1#*=}
        else
          (($# >= 2)) || die "$1 needs a value; see --help"
          value=$2
          shift
        fi
        local name=${flag#--}
        name=${name//-/_}
        name=${name^^}
        [[ " $known_options " == *" $name "* ]] || die "unknown option $flag; see --help"
        printf -v "$name" %s "$value"
        ;;
      *) die "unexpected argument '$1'; see --help" ;;
    esac
    shift
  done
}

require_number() {
  local name
  for name in "$@"; do
    [[ ${!name} =~ ^[0-9]+$ ]] || die "$name must be an integer of 0 or more, got '${!name}'"
  done
}

find_python() {
  if [[ -n ${PYTHON:-} ]]; then
    echo "$PYTHON"
  elif [[ -x $repo_dir/.venv/bin/python ]]; then
    echo "$repo_dir/.venv/bin/python"
  else
    command -v python3 || die "no Python found; set PYTHON to the interpreter that has vLLM installed"
  fi
}

# start_time_of PID: Print its start ticks, or nothing if it does not run. The process name in field 2 can contain
# blanks, so the line is cut after its bracket.
start_time_of() {
  local stat
  # Not $(<file): if the process ends between open and read, the read error would end the script.
  stat=$(cat -- "/proc/$1/stat" 2>/dev/null) || return 0
  # No here-string: older versions of bash write it to a temporary file, which fails on a full disk.
  # shellcheck disable=SC2206
  local -a fields=(${stat##*) })
  [[ ${fields[0]} == [ZX] ]] || echo "${fields[19]}"
}

# read_pid_file FILE: Set `pid` and `started`. If this host must leave the file alone, set `not_ours` to the reason.
# `pid` is empty if the process belongs to an earlier boot of this host, and so has ended.
read_pid_file() {
  local boot='' host=''
  pid='' started='' not_ours=''
  { read -r pid started boot host <"$1"; } 2>/dev/null || true
  if [[ ! $pid =~ ^[0-9]+$ || ! $started =~ ^[0-9]+$ ]]; then
    not_ours="it is empty or damaged, expected 'pid start-ticks boot-id host'; if no process has \
${1%.pid}.ready in its command line (ps axww), remove the file"
  elif [[ $boot == "$this_boot" && $(start_time_of "$pid") == "$started" ]]; then
    :
  elif [[ -z $boot ]]; then
    [[ $(start_time_of "$pid") == "$started" ]] || not_ours="it names no host (an older version wrote it) and pid $pid \
on this host is not that process; end that process if it still runs on another host, and remove the file"
  elif [[ $host != "$this_host" ]]; then
    not_ours="pid $pid is of host $host, this is $this_host; run teacher/stop_server.sh --run-dir $RUN_DIR there, or \
remove the file if that machine is gone"
  elif [[ $boot != "$this_boot" ]]; then
    pid=''
  fi
}

# write_pid_file NAME PID START_TICKS: Write the file completely or not at all.
write_pid_file() {
  local part=$RUN_DIR/.$1.pid.part
  rm -f -- "$part"
  if { printf '%s %s %s %s\n' "$2" "${3:-0}" "$this_boot" "$this_host" >"$part"; } 2>/dev/null \
    && mv -f -- "$part" "$RUN_DIR/$1.pid"; then
    return 0
  fi
  rm -f -- "$part"
  return 1
}

# own_pid_files: Set `own` to the pid files of RUN_DIR that this host wrote, and `foreign` to one line per other file.
own_pid_files() {
  own=() foreign=()
  local file pid started not_ours
  for file in "$RUN_DIR"/*.pid; do
    [[ -e $file ]] || continue  # the pattern itself, if nothing matches
    read_pid_file "$file"
    if [[ -n $not_ours ]]; then foreign+=("$file: $not_ours"); else own+=("$file"); fi
  done
}

# is_alive FILE: Return 0 if the recorded process is still running.
is_alive() {
  local pid started not_ours
  read_pid_file "$1"
  [[ -z $not_ours && -n $pid && $(start_time_of "$pid") == "$started" ]]
}

# stop_processes_on_exit: From here on, stop the launched processes whenever this shell ends. A signal during a launch
# takes effect after the pid is written.
stop_processes_on_exit() {
  launching='' signaled='' checker='' own=()
  trap 'stop_all' EXIT
  trap 'on_signal 130' INT
  trap 'on_signal 143' TERM
  trap 'on_signal 129' HUP
}

on_signal() {
  if [[ -n $checker ]]; then kill -- "$checker" 2>/dev/null || true; fi
  if [[ -n $launching ]]; then signaled=$1; else exit "$1"; fi
}

# launch NAME ARGUMENT...: Start `python -m teacher ARGUMENT...` in a new session, so that it outlives this shell, with
# the variables of `launch_env`. Add its pid file to `own`.
launch() {
  local name=$1 pid started=''
  shift
  rm -f -- "$RUN_DIR/$name.ready" "$RUN_DIR/$name.log"  # a symbolic link in place of the log would be followed
  launching=$name
  env PYTHONPATH="$repo_dir${PYTHONPATH:+:$PYTHONPATH}" "${launch_env[@]}" \
    setsid "$python" -m teacher "$@" --ready-file "$RUN_DIR/$name.ready" --stall-timeout-s "$STALL_TIMEOUT_S" \
    --log-format "$LOG_FORMAT" ${LOG_LEVEL:+--log-level "$LOG_LEVEL"} ${AUTH_DIR:+--auth-dir "$AUTH_DIR"} \
    </dev/null >"$RUN_DIR/$name.log" 2>&1 &
  pid=$!
  local _
  for _ in 1 2 3; do  # a signal may have ended the helper process
    if [[ -z $started ]]; then started=$(start_time_of "$pid") || true; fi
  done
  if ! write_pid_file "$name" "$pid" "$started"; then
    kill -KILL -- "$pid" "-$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
    launching=''
    die "cannot write $RUN_DIR/$name.pid, so $name was stopped; is the disk full? Free some space, or set RUN_DIR"
  fi
  own+=("$RUN_DIR/$name.pid")
  launching=''
  [[ -z $signaled ]] || exit "$signaled"
  disown "$pid"
}

# find_gpus: Set `gpus` to the visible GPUs, and die if there are too few.
find_gpus() {
  gpus=()
  local found
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=', ' read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
  elif found=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null) && [[ -n $found ]]; then
    mapfile -t gpus <<<"$found"
  fi
  if ((${#gpus[@]} > 0 && N_WORKERS * TP_SIZE > ${#gpus[@]})); then
    die "N_WORKERS=$N_WORKERS x TP_SIZE=$TP_SIZE need $((N_WORKERS * TP_SIZE)) GPUs, ${#gpus[@]} are visible"
  fi
}

# check_machine: Die if a vLLM engine cannot start on this machine's GPUs. Choose START_TIMEOUT_S if it is not set: on GPUs
# vLLM compiles kernels at the first start.
check_machine() {
  if ((${#gpus[@]} == 0)); then START_TIMEOUT_S=${START_TIMEOUT_S:-600}; return 0; fi
  START_TIMEOUT_S=${START_TIMEOUT_S:-1800}
  [[ $BACKEND == vllm ]] || return 0
  PYTHONPATH="$repo_dir${PYTHONPATH:+:$PYTHONPATH}" "$python" -m teacher.machine_checks cuda \
    || die "a vLLM engine cannot start on this machine; see the problems above"
}

# shorten_socket_paths: Put vLLM's sockets into /tmp if TMPDIR is too long for them. Their paths have at most 107 bytes, of
# which the name needs 37.
shorten_socket_paths() {
  local LC_ALL=C temporary=${TMPDIR:-}
  if [[ -z ${VLLM_RPC_BASE_PATH:-} ]] && ((${#temporary} > 70)); then export VLLM_RPC_BASE_PATH=/tmp; fi
}

# launch_workers PROXY_IP: Launch N_WORKERS workers, each on TP_SIZE of `gpus` if there are GPUs.
launch_workers() {
  local i sleep_flags=('' --sleep-mode)
  shorten_socket_paths
  for ((i = 0; i < N_WORKERS; i++)); do
    local devices="${gpus[*]:i*TP_SIZE:TP_SIZE}"
    launch_env=(${devices:+"CUDA_VISIBLE_DEVICES=${devices// /,}"})
    launch "worker-$i" worker --server-ip "$1" --backend-port "$PROXY_BACKEND_PORT" \
      --ckpt-path "$CKPT_PATH" --model-name "$MODEL_NAME" --backend "$BACKEND" --tp-size "$TP_SIZE" \
      --n-logprobs "$N_LOGPROBS" --dtype "$DTYPE" --head-dtype "$HEAD_DTYPE" --max-model-len "$MAX_MODEL_LEN" \
      --logits-mib "$LOGITS_MIB" --max-result-mib "$MAX_RESULT_MIB" --kv-cache-mib "$KV_CACHE_MIB" \
      --gpu-memory-utilization "$GPU_MEMORY_UTILIZATION" --async-scheduling "$ASYNC_SCHEDULING" \
      ${sleep_flags[SLEEP_MODE]}
  done
}

# await_ready: Return once every process of `own` serves. If one has ended, print its log and die.
await_ready() {
  local pidfile name waiting
  while :; do
    waiting=()
    for pidfile in "${own[@]}"; do
      name=$(basename -- "$pidfile" .pid)
      if ! is_alive "$pidfile"; then
        show_log "$name"
        die "$name ended while starting (its log is above, and in $RUN_DIR/$name.log until the next start)"
      fi
      [[ -e $RUN_DIR/$name.ready ]] || waiting+=("$name")
    done
    ((${#waiting[@]})) || return 0
    if ((SECONDS >= START_TIMEOUT_S)); then
      show_log "${waiting[0]}"
      die "${waiting[*]} not ready after $SECONDS s; raise START_TIMEOUT_S, or see the logs in $RUN_DIR"
    fi
    sleep 0.1
  done
}

show_log() {
  echo "--- last lines of $RUN_DIR/$1.log" >&2
  tail -n "${LOG_LINES:-15}" -- "$RUN_DIR/$1.log" >&2 || true
  echo "---" >&2
}

# signal_all SIGNAL: Send it to each process of `own` that is still ours. Only the group leader gets it, which ends its
# own children. SIGKILL goes to the whole group.
signal_all() {
  local pidfile pid started not_ours
  for pidfile in "${own[@]}"; do
    read_pid_file "$pidfile"
    if [[ -n $not_ours || -z $pid ]]; then continue; fi
    if [[ $1 == KILL ]]; then
      if is_alive "$pidfile" || is_our_group "$pid" "$pidfile"; then kill -KILL -- "-$pid" 2>/dev/null || true; fi
    elif is_alive "$pidfile"; then
      kill -s "$1" -- "$pid" 2>/dev/null || true
    fi
  done
}

# is_our_group PGID FILE: Return 0 if the leader has ended and its group has a live member (zombies do not count).
# The kernel does not reuse the number while the group has members. If a live process has the pid now, it is unrelated,
# and our group was empty. An unrelated process may also have created a group of this number and ended. So only a member
# that writes to the log beside FILE counts.
is_our_group() {
  [[ -z $(start_time_of "$1") ]] || return 1
  kill -0 -- "-$1" 2>/dev/null || return 1
  local stat log errors
  log=$(cd -- "$(dirname -- "$2")" && pwd -P)/$(basename -- "$2" .pid).log
  while read -r stat; do
    # shellcheck disable=SC2206
    local -a fields=(${stat##*) })
    if [[ ${fields[2]:-} == "$1" && ${fields[0]} != [ZX] ]]; then
      errors=$(readlink -- "/proc/${stat%% *}/fd/2" 2>/dev/null) || continue
      if [[ ${errors% (deleted)} == "$log" ]]; then return 0; fi
    fi
  done < <(cat /proc/[0-9]*/stat 2>/dev/null)
  return 1
}

any_alive() {
  local pidfile pid started not_ours
  for pidfile in "${own[@]}"; do
    read_pid_file "$pidfile"
    if [[ -n $not_ours || -z $pid ]]; then continue; fi
    if is_alive "$pidfile" || is_our_group "$pid" "$pidfile"; then return 0; fi
  done
  return 1
}

# stop_all: Stop the processes of `own` with SIGTERM, and after STOP_TIMEOUT_S with SIGKILL. A signal to this shell ends
# only the wait. Logs are kept.
stop_all() {
  ((${#own[@]})) || return 0
  local began=$SECONDS deadline=$((SECONDS + STOP_TIMEOUT_S)) pidfile waiter
  trap '' INT TERM HUP
  signal_all TERM
  # A process of its own: a trap that runs while bash 5.2 reads a command substitution gets a syntax error.
  while any_alive && ((SECONDS < deadline)); do sleep 0.1; done &
  waiter=$!
  trap : INT TERM HUP
  wait "$waiter" || true
  trap '' INT TERM HUP
  kill -KILL "$waiter" 2>/dev/null || true
  if any_alive; then
    # The terminal may be closed.
    echo "$(basename -- "$0"): still running after $((SECONDS - began)) s, killing" >&2 || true
    signal_all KILL
    deadline=$((SECONDS + 5))
    while any_alive && ((SECONDS < deadline)); do sleep 0.1; done
    if any_alive; then die "could not stop the processes recorded in ${own[*]}"; fi
  fi
  for pidfile in "${own[@]}"; do rm -f -- "$pidfile" "${pidfile%.pid}.ready"; done
}

# prepare_run_dir: Create RUN_DIR. Die if others may write it, its processes run, or it has pid files of other hosts.
prepare_run_dir() {
  local problem probe
  problem=$(umask o-w && mkdir -p -- "$RUN_DIR" 2>&1) || die "cannot create RUN_DIR=$RUN_DIR: ${problem#mkdir: }; set \
RUN_DIR to a folder that you can write"
  RUN_DIR=$(cd -- "$RUN_DIR" && pwd) || die "cannot enter RUN_DIR=$RUN_DIR; set RUN_DIR to a folder of your own"
  probe=$(mktemp -- "$RUN_DIR/.probe.XXXXXX" 2>&1) || die "RUN_DIR=$RUN_DIR cannot be written: ${probe#mktemp: }; set \
RUN_DIR to a writable folder"
  # Compare with a new file, because file servers can map users.
  if [[ $(stat -c %u -- "$probe") != $(stat -c %u -- "$RUN_DIR") ]]; then
    rm -f -- "$probe"
    die "RUN_DIR=$RUN_DIR belongs to another user ($(stat -c %U -- "$RUN_DIR")), and that user could replace \
logs by links; set RUN_DIR to a folder of your own"
  fi
  rm -f -- "$probe"
  (((8#$(stat -c %a -- "$RUN_DIR") & 8#002) == 0)) || die "every user can write RUN_DIR=$RUN_DIR, and could put links in \
place of logs; chmod o-w $RUN_DIR, or set RUN_DIR to a folder of your own"
  own_pid_files
  if ((${#foreign[@]})); then
    report_foreign
    die "RUN_DIR=$RUN_DIR holds pid files that are damaged or of another host; see above, or set another RUN_DIR"
  fi
  if any_alive; then
    die "the processes in $RUN_DIR are running already; stop them with $teacher_dir/stop_server.sh --run-dir $RUN_DIR, or \
start more beside them with another --run-dir"
  fi
  rm -f -- "$RUN_DIR"/*.pid "$RUN_DIR"/*.ready
  own=()
}

report_foreign() {
  local line
  for line in "${foreign[@]}"; do echo "$(basename -- "$0"): left alone: $line" >&2; done
}

check_checkpoint() {
  [[ -n $CKPT_PATH ]] || die "CKPT_PATH is not set; it names the local folder of the teacher model; see --help"
  [[ -d $CKPT_PATH ]] || die "CKPT_PATH=$CKPT_PATH is not a folder; expected a local model in Hugging Face format"
  CKPT_PATH=$(cd -- "$CKPT_PATH" && pwd)
}

# refuse_renamed_variables: Die if the environment has a setting under its former name, which would have no effect.
refuse_renamed_variables() {
  [[ -z ${MAX_ANSWER_MIB:-} ]] || die "MAX_ANSWER_MIB is now MAX_RESULT_MIB; set MAX_RESULT_MIB=$MAX_ANSWER_MIB instead"
}

check_numbers() {
  require_number TP_SIZE N_LOGPROBS N_WORKERS MAX_MODEL_LEN LOGITS_MIB MAX_RESULT_MIB KV_CACHE_MIB PROXY_BACKEND_PORT \
    ${START_TIMEOUT_S:+START_TIMEOUT_S} STOP_TIMEOUT_S "$@"
  [[ $SLEEP_MODE == [01] ]] || die "SLEEP_MODE must be 0 or 1, got '$SLEEP_MODE'"
  [[ $ASYNC_SCHEDULING =~ ^(auto|on|off)$ ]] || die "ASYNC_SCHEDULING must be auto, on or off, got '$ASYNC_SCHEDULING'"
  ((N_WORKERS >= 1 && TP_SIZE >= 1)) || die "N_WORKERS and TP_SIZE must be 1 or more"
}

check_auth_dir() {
  [[ -n $AUTH_DIR ]] || return 0
  [[ -d $AUTH_DIR ]] || die "AUTH_DIR=$AUTH_DIR is not a folder; create it with: $python -m teacher keys --auth-dir $AUTH_DIR"
  AUTH_DIR=$(cd -- "$AUTH_DIR" && pwd)
}

worker_options="CKPT_PATH MODEL_NAME BACKEND TP_SIZE N_LOGPROBS N_WORKERS DTYPE HEAD_DTYPE MAX_MODEL_LEN LOGITS_MIB \
MAX_RESULT_MIB KV_CACHE_MIB GPU_MEMORY_UTILIZATION SLEEP_MODE ASYNC_SCHEDULING PROXY_BACKEND_PORT AUTH_DIR STALL_TIMEOUT_S \
LOG_FORMAT LOG_LEVEL RUN_DIR PYTHON START_TIMEOUT_S STOP_TIMEOUT_S"

worker_defaults() {
  CKPT_PATH=${CKPT_PATH:-} MODEL_NAME=${MODEL_NAME:-} BACKEND=${BACKEND:-vllm} TP_SIZE=${TP_SIZE:-1}
  N_LOGPROBS=${N_LOGPROBS:-256} N_WORKERS=${N_WORKERS:-1} DTYPE=${DTYPE:-auto} HEAD_DTYPE=${HEAD_DTYPE:-auto}
  MAX_MODEL_LEN=${MAX_MODEL_LEN:-0} LOGITS_MIB=${LOGITS_MIB:-1024} MAX_RESULT_MIB=${MAX_RESULT_MIB:-2048}
  KV_CACHE_MIB=${KV_CACHE_MIB:-0} GPU_MEMORY_UTILIZATION=${GPU_MEMORY_UTILIZATION:-0.85} SLEEP_MODE=${SLEEP_MODE:-0}
  ASYNC_SCHEDULING=${ASYNC_SCHEDULING:-auto}
  PROXY_BACKEND_PORT=${PROXY_BACKEND_PORT:-15556} AUTH_DIR=${AUTH_DIR:-} STALL_TIMEOUT_S=${STALL_TIMEOUT_S:-60}
  LOG_FORMAT=${LOG_FORMAT:-text} LOG_LEVEL=${LOG_LEVEL:-} RUN_DIR=${RUN_DIR:-} PYTHON=${PYTHON:-}
  START_TIMEOUT_S=${START_TIMEOUT_S:-} STOP_TIMEOUT_S=${STOP_TIMEOUT_S:-10}
}

worker_usage() {
  cat <<'USAGE'
Options, as flags or environment variables (--n-logprobs 64 is N_LOGPROBS=64; flags override variables):
  CKPT_PATH               local folder of the teacher model, Hugging Face format (required)
  MODEL_NAME              name of the served model                     [name of the folder]
  BACKEND                 engine                                       [vllm]
  TP_SIZE                 tensor-parallel ranks of one worker          [1]
  N_WORKERS               workers started here                         [1]
  N_LOGPROBS              top-k, up to the vocabulary size             [256]
  DTYPE                   auto, float32, bfloat16, float16             [auto: the checkpoint's, bfloat16 for float32]
  HEAD_DTYPE              dtype of the logits: auto, float32, model    [auto: float32 on a GPU, else DTYPE]
  MAX_MODEL_LEN           longest prompt plus response in tokens       [0: the model's]
  LOGITS_MIB              memory for the logits of one engine step     [1024]
  MAX_RESULT_MIB          host memory for results in progress          [2048]
  KV_CACHE_MIB            size of the KV cache                         [0: vLLM's choice on a GPU, 256 on a CPU]
  GPU_MEMORY_UTILIZATION  fraction of a GPU for weights and KV cache   [0.85]
  SLEEP_MODE              1: allow `python -m teacher sleep` and `wake`; weights then go to host memory  [0]
  ASYNC_SCHEDULING        auto, on, off: schedule a step while the GPU computes the one before it  [auto: vLLM's choice]
  PROXY_BACKEND_PORT      the proxy's port for workers                 [15556]
  AUTH_DIR                keys, created by `python -m teacher keys --auth-dir AUTH_DIR`  [none]
  STALL_TIMEOUT_S         maximum duration of an engine step; a longer one ends its worker, others get its requests  [60]
  LOG_FORMAT, LOG_LEVEL   text or json; DEBUG, INFO, WARNING, ERROR    [text; proxy INFO, workers WARNING]
  START_TIMEOUT_S         maximum duration of the start, in seconds    [600; 1800 on GPUs, where kernels are compiled]
  PYTHON                  interpreter       [.venv/bin/python beside the teacher folder, or python3]
USAGE
}
