#!/usr/bin/env bash
# Distill a small teacher into a student on the CPU of this machine, with Megatron-core, vLLM, Ray and a ZeroMQ teacher.
#
#   bash launch/quickstart.sh [--fresh] [--self | --family NAME | --config-name NAME] [--run-folder] [key=value ...]
#
# Sets up .venv, creates an arithmetic task with a trained teacher and a partly trained student, starts the teacher,
# distills, evaluates, prints a table and writes outputs/quickstart/report.json. Completed stages are not repeated. The
# training is validated every 100 steps and traced, for the page of `python -m recipe_gkd report`.
#
#   --fresh              remove the previous results under outputs/quickstart (.venv is kept). The models' weights are
#                        packaged; `.venv/bin/python -m recipe_gkd.quickstart.prepare --fresh` trains them instead
#   --self               self-distillation: the teacher is the initial student with the solution in its prompt
#   --family NAME        a student of another model family, trained with FSDP: qwen3_moe, a mixture of experts,
#                        or qwen3_next, a hybrid of gated delta net and attention
#   --config-name NAME   configuration: quickstart (default), or quickstart_simple: FSDP and one pool of devices
#   key=value            any key of `python -m recipe_gkd.config`, such as trainer.scheduler=two_step_off; each
#                        configuration with its keys is a separate run under outputs/quickstart/runs/
#   --run-folder         print the folder of the run with the other arguments, and exit
#
# Environment: QUICKSTART_DIR (outputs/quickstart), PROXY_FRONTEND_PORT (15555), PROXY_BACKEND_PORT (15556),
#   N_WORKERS (1).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/paths.bash"
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/foreground.bash
source launch/stages.bash

refuse() { echo "quickstart.sh: $*" >&2; exit 2; }

fresh=0 only_folder=0 config=quickstart overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h|--help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --fresh) fresh=1 ;;
    --run-folder) only_folder=1 ;;
    --self) config=quickstart_self ;;
    --family) [ $# -ge 2 ] || refuse "--family needs a name (see --help)"; config=quickstart_$2; shift ;;
    --family=*) config=quickstart_${1#*=} ;;
    --config-name) [ $# -ge 2 ] || refuse "--config-name needs a name (see --help)"; config=$2; shift ;;
    --config-name=*) config=${1#*=} ;;
    trainer.experiment_name=*|trainer.default_local_dir=*|++trainer.experiment_name=*|++trainer.default_local_dir=*)
      refuse "${1%%=*} is set by this script, which evaluates the run in its folder; leave it out, or set QUICKSTART_DIR" ;;
    trainer.save_freq=-1|trainer.save_freq=0|++trainer.save_freq=-1|++trainer.save_freq=0)
      refuse "${1#++} writes no checkpoint, and this script evaluates the one of the last step; leave it out" ;;
    *=*) overrides+=("$1") ;;
    *) refuse "unknown argument $1 (see --help)" ;;
  esac
  shift
done
config=${config%.yaml}
case "$config" in quickstart*) [ -e "config/$config.yaml" ] ;; *) false ;; esac \
  || refuse "--config-name: got $config, expected one of: $(basename -as .yaml config/quickstart*.yaml | paste -sd' ')"

QUICKSTART_DIR=$(new_path "${QUICKSTART_DIR:-}")
export QUICKSTART_DIR=${QUICKSTART_DIR:-outputs/quickstart} OMP_NUM_THREADS=1
export PROXY_FRONTEND_PORT=${PROXY_FRONTEND_PORT:-15555} PROXY_BACKEND_PORT=${PROXY_BACKEND_PORT:-15556}
python=.venv/bin/python
teacher=teacher student=student max_model_len=64 models=() dtype=float32
case "$config" in
  quickstart_self) teacher=self_student student=self_student max_model_len=96 models=(--self) ;;
  quickstart_qwen3_*) student=${config#quickstart_} models=(--family "$student") ;;
esac
# vLLM's CPU build computes gated delta nets in bfloat16 only.
if [ $student = qwen3_next ]; then dtype=bfloat16; fi
name=$(printf '%s,' "$config" "${overrides[@]}" | sed 's/,$//' | tr -c 'A-Za-z0-9=._,-' '_')
if [ ${#name} -gt 100 ]; then name=${name:0:89}-$(printf '%s' "$name" | cksum | cut -d' ' -f1); fi
run=$QUICKSTART_DIR/runs/$name
if [ $only_folder = 1 ]; then echo "$run"; exit 0; fi
teacher_dir=$QUICKSTART_DIR/teacher_service
stages=$run/stages.jsonl

# Shell functions run as stages end with exec: see run_foreground.
student_after() { echo "$run/global_step_$(cat "$run/latest_checkpointed_iteration.txt")/huggingface"; }

start_teacher() {
  CKPT_PATH=$QUICKSTART_DIR/$teacher RUN_DIR=$teacher_dir N_LOGPROBS=16 DTYPE=float32 MAX_MODEL_LEN=$max_model_len \
    exec bash teacher/start_server.sh 9>&-
}

evaluate() { # evaluate JSON FOLDER... [key=value]: greedy responses of the models to the held-out problems, with vLLM
  local json=$1; shift
  exec "$python" -m recipe_gkd evaluate "$@" --json "$json" --data "$QUICKSTART_DIR/data/held_out.parquet" \
    --reward recipe_gkd/quickstart/reward.py --dtype $dtype --gpu-memory-utilization 0.2 --cpu-cache-gb 0.0625 \
    data.ground_truth_key=answer data.max_prompt_length=48 data.max_response_length=48
}

# For the page of the report: a trace, and the validation of exact answers
watched=("custom_reward_function.path=$(hydra_value "$PWD/recipe_gkd/quickstart/reward.py")" custom_reward_function.name=compute_score
  "data.val_files=$(hydra_value "$(realpath -m "$QUICKSTART_DIR/data/dev.parquet")")" trainer.test_freq=100
  "trainer.trace_file=$(hydra_value "$(realpath -m "$run/trace.json")")")

check_keys() { # report all wrong keys before anything starts
  "$python" -m recipe_gkd check-config --config-name "$config" "${watched[@]}" "${overrides[@]}" || exit 2
}

newer() { # newer FILE: return 0 if FILE is newer than both models
  [ "$1" -nt "$QUICKSTART_DIR/$teacher/made.json" ] && [ "$1" -nt "$QUICKSTART_DIR/$student/made.json" ]
}

is_set_up=0
if bash launch/setup.sh --check; then is_set_up=1 && check_keys; fi

lock=$QUICKSTART_DIR/.lock
if [ $fresh = 1 ] && [ -n "$(ls -A "$QUICKSTART_DIR" 2>/dev/null)" ] && [ ! -e "$lock" ]; then
  echo "quickstart.sh: $QUICKSTART_DIR has files but no .lock, so it was not created by a quickstart; --fresh removes nothing there. Set QUICKSTART_DIR" >&2
  exit 1
fi
lock_folder quickstart "$QUICKSTART_DIR" QUICKSTART_DIR
stop_teacher  # left by a killed quickstart
[ $fresh = 0 ] || find "$QUICKSTART_DIR/" -mindepth 1 -maxdepth 1 ! -name .lock -exec rm -rf {} +
mkdir -p "$run"
: > "$stages.new"
stage "set-up" bash launch/setup.sh
[ $is_set_up = 1 ] || check_keys
stage "task, teacher and student" "$python" -m recipe_gkd.quickstart.prepare --out "$QUICKSTART_DIR" "${models[@]}"

if newer "$run/report.txt"; then
  printf '\n== distillation: already done; --fresh repeats it\n\n'
  cat "$run/report.txt"
  exit 0
fi
if [ -e "$run/run.log" ] && ! newer "$run/run.log"; then find "$run" -mindepth 1 ! -name stages.jsonl.new -delete; fi  # results of other models

before=$QUICKSTART_DIR/before.json
[ $student = student ] || before=$QUICKSTART_DIR/${student}_before.json
teacher_result=$before
if [ $student = self_student ]; then
  teacher_result=$QUICKSTART_DIR/self_teacher.json
  newer "$before" || stage "evaluation before" evaluate "$before" "$QUICKSTART_DIR/$student"
  newer "$teacher_result" || stage "evaluation of the teacher" \
    evaluate "$teacher_result" "$QUICKSTART_DIR/$teacher" data.prompt_key=prompt_with_solution
fi
newer "$before" || stage "evaluation before" evaluate "$before" "$QUICKSTART_DIR/$teacher" "$QUICKSTART_DIR/$student"
stage "teacher service" --cleanup stop_teacher start_teacher
stage "distillation" "$python" -m recipe_gkd.main_gkd --config-name "$config" "trainer.experiment_name='$name'" \
  actor_rollout_ref.teacher.server_port="$PROXY_FRONTEND_PORT" "${watched[@]}" "${overrides[@]}"
stop_teacher
stage "evaluation after" evaluate "$run/student_after.json" "$(student_after)"

printf '\n== result\n'
mv "$stages.new" "$stages"
"$python" -m recipe_gkd.quickstart.report "$run" --prepared "$QUICKSTART_DIR" --teacher "$teacher_result" --before "$before" \
  --after "$run/student_after.json" --stages "$stages" --out "$run/report.json" "${models[@]}" > "$run/report.part"
printf '\nreport:           %s\nmetrics:          %s (TensorBoard: %s)\ntrained student:  %s\npage of the run:  %s\n' \
  "$QUICKSTART_DIR/report.json" "$run/metrics.jsonl" "$run/tensorboard" "$(student_after)" ".venv/bin/python -m recipe_gkd report $(printf '%q' "$run")" >> "$run/report.part"
cp "$run/report.json" "$QUICKSTART_DIR/report.json"
mv "$run/report.part" "$run/report.txt"
cat "$run/report.txt"
