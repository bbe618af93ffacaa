#!/usr/bin/env bash
# Distill into Qwen2.5-7B-Instruct on a Ray cluster: two 8-GPU nodes train, one generates; the teacher runs elsewhere.
#
#   RAY_ADDRESS=http://head:8265 TEACHER_IP=10.0.0.9 AUTH_DIR=/data/teacher-keys STUDENT=/models/Qwen2.5-7B-Instruct \
#     TRAIN_FILES=/data/train.parquet OUTPUT_DIR=/data/runs/1 bash launch/run_qwen2.5_ray_cluster.sh [key=value ...]
#
# On the teacher's machine: python -m teacher keys --auth-dir /data/teacher-keys, then
#   AUTH_DIR=/data/teacher-keys CKPT_PATH=/models/teacher N_WORKERS=4 TP_SIZE=2 BIND=0.0.0.0 teacher/start_server.sh
# (or launch/run_teacher_on_ray.sh).
#
# STUDENT, TRAIN_FILES, OUTPUT_DIR and AUTH_DIR must be on a disk that all nodes and this machine mount at the same path:
# a path that exists in the current directory, and a relative OUTPUT_DIR, are made absolute here, and paths in overrides
# by the job. Everything else, such as a hub name, is passed on as it is; a relative path that the current directory
# does not have is one of the job's working directory, a copy of this checkout. Variables of this shell that start with
# NCCL_, GLOO_, TORCH_, PYTORCH_ or VLLM_ reach all workers (docs/cluster.md, "On a cluster").
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/paths.bash"
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in -h|--help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac

STUDENT=$(from_caller "${STUDENT:?}") TRAIN_FILES=$(from_caller "${TRAIN_FILES:?}") AUTH_DIR=$(from_caller "${AUTH_DIR:?}")
OUTPUT_DIR=$(new_path "${OUTPUT_DIR:?a folder that all nodes share}")
command=(python3 -m recipe_gkd.main_gkd --config-name on_policy_distill_trainer
  data.train_files="$(hydra_value "$TRAIN_FILES")"
  data.train_batch_size=512 data.max_prompt_length=2048 data.max_response_length=6144
  actor_rollout_ref.model.path="$(hydra_value "$STUDENT")"
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
  actor_rollout_ref.actor.megatron.sequence_parallel=true
  actor_rollout_ref.rollout.tensor_model_parallel_size=2
  actor_rollout_ref.teacher.server_ip="${TEACHER_IP:?}"
  actor_rollout_ref.teacher.auth_dir="$(hydra_value "$AUTH_DIR")"
  actor_rollout_ref.teacher.wire_dtype=float16
  trainer.device=cuda trainer.nnodes=2 trainer.n_gpus_per_node=8 rollout.nnodes=1 rollout.n_gpus_per_node=8
  trainer.scheduler=two_step_off trainer.save_freq=100
  trainer.default_local_dir="$(hydra_value "$OUTPUT_DIR")"
  ray_init.address=auto "$@")

if [ "${1:-}" = --cfg ]; then
  python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)
  exec "$python" "${command[@]:1}"
fi
source launch/forwarded.bash
find_forwarded
# Ray quotes each word for the shell of the node that runs the job.
exec ray job submit --address "${RAY_ADDRESS:?the address of the cluster, such as http://head:8265}" \
  --runtime-env launch/runtime_env.yaml -- env "${forwarded[@]}" GKD_CALLER_DIR="$GKD_CALLER_DIR" "${command[@]}"
