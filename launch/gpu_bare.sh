#!/usr/bin/env bash
# Check and measure a GPU machine that has PyTorch and transformers, but neither a network nor Ray nor vLLM.
#   bash launch/gpu_bare.sh fetch WHEELS     where pip reaches an index: wheels of the packages it lacks (8 MB)
#   bash launch/gpu_bare.sh run WHEELS OUT   on the machine, in a copy of this repository with the folder WHEELS
# `run` needs about 8 minutes on one H200. It writes smoke.json, tests.log and gpu.json (benchmarks) to the folder OUT.
# Variables: PYTHON (the interpreter, default python3), PYTHON_VERSION (of the machine, for `fetch`, default 3.12),
# DEVICE (cuda or cpu, default cuda), ONLY (parts of `run`, default "smoke tests benchmarks"), CHECKS and SECTIONS
# (names for gpu_smoke --only and benchmarks/gpu.py --only).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/paths.bash"
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
device=${DEVICE:-cuda}
packages=(
  accelerate annotated-types antlr4-python3-runtime hydra-core megatron-core msgpack omegaconf peft prometheus-client
  psutil pydantic pydantic-core pyzmq typing-inspection
)

usage() {
  sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

fetch() {
  local into=$1 version=${PYTHON_VERSION:-3.12} platforms=() pins=() glibc
  for glibc in 39 38 37 36 35 34 31 28 27 26 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
  platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
  mkdir -p "$into"
  for package in "${packages[@]}"; do
    if [[ $package != antlr4-python3-runtime ]]; then pins+=("$(grep "^$package==" constraints/gpu.txt)"); fi
  done
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" -d "$into" "${pins[@]}"
  # It is published as source only, and contains no compiled code.
  "$python" -m pip wheel -q --no-deps -w "$into" "$(grep '^antlr4-python3-runtime==' constraints/gpu.txt)"
  du -sh "$into"
}

run() {
  local wheels=$1 out=$2 site failed=() files
  site=$(mktemp -d)
  # shellcheck disable=SC2064  # the present value
  trap "rm -rf '$site'" EXIT
  mkdir -p "$out"
  if compgen -G "$wheels/*.whl" >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
  else
    echo "no wheels in $wheels: the packages of $python are used" >&2
  fi
  export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
  for part in ${ONLY:-smoke tests benchmarks}; do
    echo "== $part"
    case $part in
      smoke)
        # shellcheck disable=SC2086  # a list of names
        "$python" -m recipe_gkd gpu_smoke --device "$device" --json "$out/smoke.json" ${CHECKS:+--only $CHECKS} ||
          failed+=("$part")
        ;;
      tests)
        # Tests that need vLLM or Ray are in other folders.
        mapfile -t files < <(grep -rlE 'mark\.gpu' tests/unit tests/integration/actor tests/integration/weight_sync)
        OMP_NUM_THREADS=1 "$python" -m pytest -q -m gpu -p no:cacheprovider -rfE "${files[@]}" 2>&1 |
          tee "$out/tests.log" || failed+=("$part")
        ;;
      benchmarks)
        # shellcheck disable=SC2086  # a list of names
        "$python" benchmarks/gpu.py --device "$device" --json "$out/gpu.json" \
          --only ${SECTIONS:-losses transports actor actor_fsdp} || failed+=("$part")
        ;;
      *) echo "error: ONLY: got $part, expected smoke, tests or benchmarks" >&2; exit 2 ;;
    esac
  done
  if [[ ${#failed[@]} -gt 0 ]]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
  fi
}

case "${1:-} $#" in
  "-h 1" | "--help 1") usage ;;
  "fetch 2") fetch "$(new_path "$2")" ;;
  "run 3") run "$(new_path "$2")" "$(new_path "$3")" ;;
  *) usage >&2; exit 2 ;;
esac
