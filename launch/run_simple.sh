#!/usr/bin/env bash
# Distill into a student of any family that transformers and vLLM support, on GPUs of one node that training and
# generation use in turn (config/on_policy_distill_simple.yaml).
#
#   STUDENT=/models/student TEACHER=/models/teacher TRAIN_FILES=/data/train.parquet \
#     bash launch/run_simple.sh [key=value ...]
#
# One GPU:        SHARE_TEACHER_GPU=1: the teacher takes its turn on the same GPUs too. It sleeps between the batches.
# Several GPUs:   the teacher has the last one for itself (TEACHER_GPUS), training and generation the others.
# Without TEACHER a running service scores: TEACHER_IP (127.0.0.1), PROXY_FRONTEND_PORT (15555). Then all GPUs train. It
#                 must have been started with SLEEP_MODE=1 if SHARE_TEACHER_GPU=1.
#
# Environment: STUDENT, TEACHER (folders, or hub names that `hf download` has fetched), TRAIN_FILES,
# SHARE_TEACHER_GPU (0), TEACHER_IP, CUDA_VISIBLE_DEVICES (all GPUs), TEACHER_GPUS, PYTHON (.venv/bin/python, or
# python3), and the settings of teacher/start_server.sh, such as MAX_MODEL_LEN (3072 tokens, or the model's; at least
# data.max_prompt_length + data.max_response_length).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/paths.bash"
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in -h|--help) sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac

source launch/foreground.bash
die() { echo "run_simple.sh: $*" >&2; exit 2; }
STUDENT=${STUDENT:?set STUDENT to a Hugging Face folder of a causal language model}
TRAIN_FILES=${TRAIN_FILES:?set TRAIN_FILES to a parquet file with a column prompt}
STUDENT=$(from_caller "$STUDENT") TRAIN_FILES=$(from_caller "$TRAIN_FILES")
TEACHER=$(from_caller "${TEACHER:-}") share=${SHARE_TEACHER_GPU:-0}
[[ $share == [01] ]] || die "SHARE_TEACHER_GPU must be 0 or 1, got '$share'"
export PROXY_FRONTEND_PORT=${PROXY_FRONTEND_PORT:-15555}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}

gpus=()  # empty on a machine without GPUs, where CPU slots are used
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  IFS=', ' read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
elif found=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null) && [ -n "$found" ]; then
  mapfile -t gpus <<< "$found"
fi
train_gpus=("${gpus[@]}") teacher_gpus=("${gpus[@]}")
if [ -n "$TEACHER" ] && [ "$share" = 0 ] && [ ${#gpus[@]} -gt 0 ]; then
  IFS=', ' read -ra teacher_gpus <<< "${TEACHER_GPUS:-${gpus[-1]}}"
  train_gpus=()
  for gpu in "${gpus[@]}"; do [[ " ${teacher_gpus[*]} " == *" $gpu "* ]] || train_gpus+=("$gpu"); done
  [ ${#train_gpus[@]} -gt 0 ] || die "the teacher has all GPUs (${gpus[*]}), so none is left for the training; set" \
    "SHARE_TEACHER_GPU=1, or TEACHER_GPUS to fewer of them"
fi
join() { local IFS=,; echo "$*"; }
n_workers=${N_WORKERS:-$((${#teacher_gpus[@]} ? ${#teacher_gpus[@]} / ${TP_SIZE:-1} : 1))}

options=(--config-name on_policy_distill_simple data.train_files="$(hydra_value "$TRAIN_FILES")"
  actor_rollout_ref.model.path="$(hydra_value "$STUDENT")"
  trainer.n_gpus_per_node="$((${#train_gpus[@]} ? ${#train_gpus[@]} : 1))"
  actor_rollout_ref.teacher.server_ip="${TEACHER_IP:-127.0.0.1}"
  actor_rollout_ref.teacher.server_port="$PROXY_FRONTEND_PORT")
[ "$share" = 0 ] || options+=(actor_rollout_ref.teacher.sleep_between_batches=true)

default_length() { # default_length FOLDER: 3072 tokens, or the length of a model that takes fewer
  "$python" - "$1/config.json" <<'PY'
import json, sys
config = json.load(open(sys.argv[1], encoding="utf-8"))
print(min(3072, (config.get("text_config") or config).get("max_position_embeddings") or 3072))
PY
}

start_teacher() {
  if [ ${#gpus[@]} -gt 0 ]; then export CUDA_VISIBLE_DEVICES; CUDA_VISIBLE_DEVICES=$(join "${teacher_gpus[@]}"); fi
  if [ "$share" = 1 ]; then
    # The rest is for the processes of actor and rollout engine, which keep a CUDA context while they wait.
    export SLEEP_MODE=1 GPU_MEMORY_UTILIZATION=${GPU_MEMORY_UTILIZATION:-0.7}
  fi
  CKPT_PATH=$teacher_folder RUN_DIR=$teacher_run_dir N_WORKERS=$n_workers N_LOGPROBS=${N_LOGPROBS:-256} \
    MAX_MODEL_LEN=${MAX_MODEL_LEN:-$(default_length "$teacher_folder")} exec bash teacher/start_server.sh
}

if [ "${1:-}" != --cfg ] && [ -n "$TEACHER" ]; then  # --cfg job only validates and prints the configuration
  teacher_folder=$(model_folder "$TEACHER" TEACHER)
  teacher_run_dir=${RUN_DIR:-outputs/teacher_simple-$(uname -n)}
  run_foreground --cleanup 'bash teacher/stop_server.sh --run-dir "$teacher_run_dir"' start_teacher
fi
if [ ${#gpus[@]} -gt 0 ]; then export CUDA_VISIBLE_DEVICES; CUDA_VISIBLE_DEVICES=$(join "${train_gpus[@]}"); fi

run_foreground "$python" -m recipe_gkd.main_gkd "${options[@]}" "$@"
