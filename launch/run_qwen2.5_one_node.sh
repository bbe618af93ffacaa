#!/usr/bin/env bash
# Distill Qwen2.5-7B-Instruct into Qwen2.5-1.5B-Instruct on 8 GPUs of one node: 4 train, 2 generate, 2 run the teacher.
#
#   TRAIN_FILES=/data/train.parquet bash launch/run_qwen2.5_one_node.sh [key=value ...]
#
# Environment: STUDENT, TEACHER (folders, or hub names that `hf download` has fetched), TRAIN_FILES, TRAIN_GPUS
# (0,1,2,3,4,5), TEACHER_GPUS (6,7), PYTHON (.venv/bin/python, or python3).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/paths.bash"
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in -h|--help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac

source launch/foreground.bash
STUDENT=${STUDENT:-Qwen/Qwen2.5-1.5B-Instruct}
TEACHER=${TEACHER:-Qwen/Qwen2.5-7B-Instruct}
TRAIN_FILES=${TRAIN_FILES:?set TRAIN_FILES to a parquet file with a column prompt}
STUDENT=$(from_caller "$STUDENT") TEACHER=$(from_caller "$TEACHER") TRAIN_FILES=$(from_caller "$TRAIN_FILES")
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}

if [ "${1:-}" != --cfg ]; then  # --cfg job only validates and prints the configuration
  teacher_folder=$(model_folder "$TEACHER" TEACHER)
  teacher_run_dir=outputs/teacher_qwen2.5-$(uname -n)
  CUDA_VISIBLE_DEVICES=${TEACHER_GPUS:-6,7} CKPT_PATH=$teacher_folder RUN_DIR=$teacher_run_dir N_WORKERS=2 TP_SIZE=1 \
    N_LOGPROBS=256 MAX_MODEL_LEN=3072 \
    run_foreground --cleanup 'bash teacher/stop_server.sh --run-dir "$teacher_run_dir"' bash teacher/start_server.sh
  export CUDA_VISIBLE_DEVICES=${TRAIN_GPUS:-0,1,2,3,4,5}
fi

run_foreground "$python" -m recipe_gkd.main_gkd --config-name on_policy_distill_trainer \
  data.train_files="$(hydra_value "$TRAIN_FILES")" data.train_batch_size=128 data.max_prompt_length=1024 data.max_response_length=2048 \
  actor_rollout_ref.model.path="$(hydra_value "$STUDENT")" \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.sequence_parallel=true \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
  actor_rollout_ref.teacher.num_microbatches=4 \
  trainer.device=cuda trainer.n_gpus_per_node=4 rollout.n_gpus_per_node=2 \
  trainer.scheduler=one_step_off trainer.save_freq=100 trainer.logger='[console,jsonl,tensorboard]' \
  trainer.experiment_name=qwen2.5_7b_to_1.5b "$@"
