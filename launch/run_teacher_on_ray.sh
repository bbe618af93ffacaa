#!/usr/bin/env bash
# Run a teacher service as a Ray job: the proxy next to the job's driver, N_WORKERS workers on nodes with GPUs.
#
#   RAY_ADDRESS=http://head:8265 CKPT_PATH=/models/teacher AUTH_DIR=/shared/teacher-keys N_WORKERS=4 TP_SIZE=2 \
#     bash launch/run_teacher_on_ray.sh [--option value ...]
#
# TRUSTED_NETWORK=1 instead of AUTH_DIR: no keys, for a network that only trusted machines can reach.
# The job's log prints the address for trainings. The service runs until `ray job stop`, which ends all its processes.
# CKPT_PATH and AUTH_DIR (python -m teacher keys --auth-dir AUTH_DIR) must be on a disk that all nodes share; a path
# that exists in the current directory is made absolute here, any other is passed on as it is. Appended options are those
# of `python -m teacher worker` (--n-logprobs 64) and `python -m launch.teacher_on_ray --help`.
# Variables of this shell that start with NCCL_, GLOO_, TORCH_, PYTORCH_ or VLLM_ reach all workers.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/paths.bash"
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in -h|--help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac

CKPT_PATH=$(from_caller "${CKPT_PATH:?the folder of the teacher model}") AUTH_DIR=$(from_caller "${AUTH_DIR:-}")
source launch/forwarded.bash
find_forwarded
case ${TRUSTED_NETWORK:-0} in
  1) security=(--trusted-network ${AUTH_DIR:+--auth-dir "$AUTH_DIR"}) ;;  # both are refused
  *) security=(--auth-dir "${AUTH_DIR:?a folder of keys that all nodes share, or set TRUSTED_NETWORK=1 instead}") ;;
esac
exec ray job submit --address "${RAY_ADDRESS:?the address of the cluster, such as http://head:8265}" \
  --runtime-env launch/runtime_env.yaml -- env "${forwarded[@]}" python3 -m launch.teacher_on_ray \
  --n-workers "${N_WORKERS:-1}" --tp-size "${TP_SIZE:-1}" "${security[@]}" \
  --ckpt-path "$CKPT_PATH" "$@"
