#!/usr/bin/env bash
# Run the quickstart in each mode of training, and print accuracy, time and memory as a Markdown table.
#
#   bash launch/quickstart_table.sh [key=value ...]
#
# Finished runs are not repeated. A key=value is appended to each run, such as trainer.total_training_steps=20. Two cores
# need about 20 minutes for all runs. Nothing else should use the machine, because the table contains times.
#
# Environment: as for launch/quickstart.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/paths.bash"
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in -h|--help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;; esac
source launch/foreground.bash

actor=actor_rollout_ref.actor common=("$@") runs=()

run() { # run NAME ARGUMENT...: do a run of launch/quickstart.sh, and add it to the table
  local name=$1; shift
  printf '\n==== %s\n' "$name"
  run_foreground bash launch/quickstart.sh "$@" "${common[@]}"
  runs+=(--run "$name=$(bash launch/quickstart.sh --run-folder "$@" "${common[@]}")")
}

run "Megatron, \`one_step_off\` (default)"
run "Megatron, \`sync\`" trainer.scheduler=sync
run "Megatron, hybrid engine" trainer.scheduler=sync actor_rollout_ref.hybrid_engine=true
run "Megatron, offload" $actor.megatron.{param,grad,optimizer}_offload=true
run "Megatron, LoRA of rank 16" $actor.lora.rank=16 $actor.optim.lr=0.01
run "FSDP" $actor.strategy=fsdp
run "FSDP, offload" $actor.strategy=fsdp $actor.fsdp_config.{param,optimizer}_offload=true
run "FSDP, LoRA of rank 16" $actor.strategy=fsdp $actor.lora.rank=16 $actor.optim.lr=0.01
run "FSDP, hybrid engine, offload (\`quickstart_simple\`)" --config-name quickstart_simple

printf '\n==== table\n\n'
.venv/bin/python -m recipe_gkd.quickstart.table "${runs[@]}"
