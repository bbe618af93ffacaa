# Function for scripts of this folder that submit Ray jobs. Not a command.

# find_forwarded: Set `forwarded` to NAME=VALUE of the variables of this shell that the job's driver gets. The driver
# sends them to all workers (recipe_gkd/runtime/worker_variables.py).
find_forwarded() {
  forwarded=()
  local name
  while read -r name; do
    forwarded+=("$name=${!name}")
  done < <(compgen -e | grep -E '^((NCCL|GLOO|TORCH|PYTORCH|VLLM)_|RES_OPTIONS$)')
}
