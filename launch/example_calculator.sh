#!/usr/bin/env bash
# Distill a teacher that uses a calculator into a student, on this CPU: conversations of two turns with a tool.
#
#   bash launch/example_calculator.sh [--fresh] [key=value ...]
#
# Sets up .venv, trains both models (1 to 2 minutes), starts the teacher, validates, distills and validates again. The
# summary at the end has the share of correct sums before and after. Takes about 5 minutes on two cores.
# docs/conversations.md explains the parts.
#
#   --fresh     remove the previous training; models and data are kept
#   key=value   any key of `python -m recipe_gkd.config`; with other keys than before, use --fresh
#
# Environment: CALCULATOR_DIR (outputs/calculator), PROXY_FRONTEND_PORT (15565), PROXY_BACKEND_PORT (15566),
#   TEACHER_STEPS (500), the number of steps of the teacher's own training.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/paths.bash"
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/foreground.bash
source launch/stages.bash

refuse() { echo "example_calculator.sh: $*" >&2; exit 2; }

fresh=0 overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h|--help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --fresh) fresh=1 ;;
    *default_local_dir=*) refuse "the run is in CALCULATOR_DIR/run; set CALCULATOR_DIR instead of $1" ;;
    *=*) overrides+=("$1") ;;
    *) refuse "unknown argument $1 (see --help)" ;;
  esac
  shift
done

CALCULATOR_DIR=$(new_path "${CALCULATOR_DIR:-}")
export CALCULATOR_DIR=${CALCULATOR_DIR:-outputs/calculator} OMP_NUM_THREADS=1
export PROXY_FRONTEND_PORT=${PROXY_FRONTEND_PORT:-15565} PROXY_BACKEND_PORT=${PROXY_BACKEND_PORT:-15566}
python=.venv/bin/python
teacher_dir=$CALCULATOR_DIR/teacher_service stages=$CALCULATOR_DIR/stages.jsonl
config=(--config-path "$PWD/examples/calculator" --config-name calculator)

# Shell functions run as stages end with exec: see run_foreground.
make_models() {
  OMP_NUM_THREADS=$(nproc) exec "$python" examples/calculator/models.py "$CALCULATOR_DIR" --teacher-steps "${TEACHER_STEPS:-500}"
}

start_teacher() {
  CKPT_PATH=$CALCULATOR_DIR/teacher RUN_DIR=$teacher_dir N_LOGPROBS=16 DTYPE=float32 MAX_MODEL_LEN=64 \
    exec bash teacher/start_server.sh 9>&-
}

lock_folder example_calculator "$CALCULATOR_DIR" CALCULATOR_DIR
stop_teacher  # left by a killed example
: > "$stages.new"
stage "set-up" bash launch/setup.sh
"$python" -m recipe_gkd check-config "${config[@]}" "${overrides[@]}" || exit 2
[ $fresh = 0 ] || rm -rf "$CALCULATOR_DIR/run"
[ -e "$CALCULATOR_DIR/models.json" ] || stage "data, teacher and student" make_models
stage "teacher service" --cleanup stop_teacher start_teacher
stage "distillation" "$python" -m recipe_gkd.main_gkd "${config[@]}" \
  actor_rollout_ref.teacher.server_port="$PROXY_FRONTEND_PORT" "${overrides[@]}"
stop_teacher
mv "$stages.new" "$stages"
printf '\nconversations: %s\n' "$CALCULATOR_DIR/run/validation"
