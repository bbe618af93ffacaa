# Functions for scripts of this folder that run a training in stages. Not a command. Source foreground.bash first.

# stage NAME COMMAND...: run COMMAND in the foreground and append its duration to the file $stages.new.
stage() {
  local stage=$1 began=$SECONDS; shift
  printf '\n== %s\n' "$stage"
  run_foreground "$@"
  printf '{"stage": "%s", "seconds": %d}\n' "$stage" $((SECONDS - began)) >> "$stages.new"
}

# stop_teacher: stop the teacher of the folder $teacher_dir, if there is one.
stop_teacher() { [ ! -d "$teacher_dir" ] || bash teacher/stop_server.sh --run-dir "$teacher_dir" >/dev/null; }

# lock_folder NAME FOLDER VARIABLE: let no second process of NAME.sh work in FOLDER, which VARIABLE chooses. The lock is
# file descriptor 9 of this shell.
lock_folder() {
  local lock=$2/.lock
  mkdir -p "$2"
  exec 9>> "$lock"  # never removed: a second process must find this file
  flock -n 9 || { echo "$1.sh: another $1 ($(cat "$lock")) runs in $2; wait for it, or set $3" >&2; exit 1; }
  echo "pid $$ on $(uname -n)" > "$lock"
}
