# Paths of the user in the launch scripts, which change the directory. Source it before `cd`.

# Relative paths in overrides belong to this folder (recipe_gkd/config/caller.py). A script that runs another one sets it.
export GKD_CALLER_DIR=${GKD_CALLER_DIR:-$PWD}

# from_caller PATH: the absolute path of a file or folder that the caller's directory has, else PATH itself, such as the
# name of a hub model. A leading ~/ is the home folder.
from_caller() {
  local path=$1
  [[ $path != "~/"* ]] || path=$HOME/${path#"~/"}
  if [[ -n $path && $path != /* && -e $GKD_CALLER_DIR/$path ]]; then path=$GKD_CALLER_DIR/$path; fi
  printf '%s' "$path"
}

# new_path PATH: the absolute path of a file or folder that the command may create in the caller's directory.
new_path() {
  local path
  path=$(from_caller "$1")
  if [[ -n $path && $path != /* ]]; then path=$GKD_CALLER_DIR/$path; fi
  printf '%s' "$path"
}

# hydra_value VALUE: VALUE as Hydra's grammar takes it: a list as it is, everything else quoted, because = , ( and other
# characters of a path have a meaning there. A backslash is doubled only before a quote. In the path of a file or folder
# that exists, ${ is text and no interpolation.
hydra_value() {
  local value=$1
  if [[ $value == \[*\] || -z $value ]]; then printf '%s' "$value"; return; fi
  if [ -e "$value" ]; then value=${value//'${'/'\${'}; fi
  printf "'%s'" "$(printf '%s' "$value" | sed -E "s/(\\\\+)('|\$)/\1\1\2/g; s/'/\\\\'/g")"
}

# model_folder NAME VARIABLE: the folder of a model, for a folder or the name of a model in the local hub cache. `python`
# is the interpreter, VARIABLE the name for the message if there is no such model.
model_folder() {
  if [ -d "$1" ]; then printf '%s' "$1"; return; fi
  "$python" - "$@" <<'PY'
import sys

from recipe_gkd.errors import GkdError
from recipe_gkd.preflight import find_model

try:
    print(find_model(sys.argv[1], sys.argv[2]), end="")
except GkdError as error:
    sys.exit(f"error: {error}")
PY
}
