# Paths of the user in the launch scripts, which change the directory. Source it before `cd`.

caller=$PWD

# from_caller PATH: the absolute path of a file or folder that the caller's directory has, else PATH itself, such as the
# name of a hub model. A leading ~/ is the home folder.
from_caller() {
  local path=$1
  [[ $path != "~/"* ]] || path=$HOME/${path#"~/"}
  if [[ -n $path && $path != /* && -e $caller/$path ]]; then path=$caller/$path; fi
  printf '%s' "$path"
}

# hydra_value VALUE: VALUE as Hydra's grammar takes it: a list as it is, everything else quoted, because = , ( and other
# characters of a path have a meaning there.
hydra_value() {
  local value=$1
  if [[ $value == \[*\] || -z $value ]]; then printf '%s' "$value"; return; fi
  value=${value//\\/\\\\}
  printf "'%s'" "${value//\'/\\\'}"
}

# resolve_overrides ARGUMENT...: sets the array `overrides` to the arguments, with the absolute path for each value that
# is a path of the caller's directory.
resolve_overrides() {
  local argument value path
  overrides=()
  for argument in "$@"; do
    value=${argument#*=}
    if [[ $argument == *=* && $value == *[./~]* ]] && path=$(from_caller "$value") && [ "$path" != "$value" ]; then
      argument=${argument%%=*}=$(hydra_value "$path")
    fi
    overrides+=("$argument")
  done
}
