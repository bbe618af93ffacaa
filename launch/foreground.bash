# For the scripts of this folder that run a training beside a teacher service; not a command of its own.

# run_foreground [--cleanup CLEANUP] COMMAND [ARGUMENT...]: Run COMMAND to its end and return its exit status. SIGTERM,
# SIGINT, SIGHUP and SIGQUIT to this shell are forwarded to COMMAND; then this shell exits once COMMAND has ended, with
# its status, or with 128 + the signal's number if that is 0. If COMMAND succeeds, CLEANUP (shell code) runs when this
# shell ends, however it does. Signals to this shell do not interrupt it, and its failure does not change the exit
# status.
#
# A COMMAND that is a shell function must `exec` its last command: the signal is sent to that one process.
run_foreground() {
  local status='' code cleanup=''
  if [ "$1" = --cleanup ]; then cleanup=$2; shift 2; fi
  foreground_pid='' foreground_signal='' foreground_status=0 foreground_sent=''
  trap 'forward_signal TERM 143' TERM
  trap 'forward_signal INT 130' INT
  trap 'forward_signal HUP 129' HUP
  trap 'forward_signal QUIT 131' QUIT
  # In a process group of its own: Ctrl-C then reaches it once, through this shell. Without job control it would ignore
  # SIGINT besides.
  set -m
  "$@" </dev/null &
  foreground_pid=$!
  set +m
  # A signal from before COMMAND had a pid.
  [ "$foreground_status" = 0 ] || [ -n "$foreground_sent" ] \
    || kill -s "$foreground_signal" -- "$foreground_pid" 2>/dev/null || true
  while :; do  # a signal ends `wait`, not COMMAND
    foreground_signal='' code=0
    wait "$foreground_pid" || code=$?
    [ "$code" = 127 ] && [ -n "$status" ] || status=$code  # 127: the one before was its status
    [ -n "$foreground_signal" ] || break
  done
  if [ -n "$cleanup" ] && [ "$status" = 0 ]; then
    foreground_cleanup=$cleanup
    # Not `trap ""`: a process of CLEANUP could not handle a signal that was ignored when it began.
    trap 'trap : TERM INT HUP QUIT; eval "$foreground_cleanup" || true' EXIT
  fi
  # Not the default actions: these end the shell without its EXIT trap, and a CLEANUP would not run.
  trap 'exit 143' TERM
  trap 'exit 130' INT
  trap 'exit 129' HUP
  trap 'exit 131' QUIT
  if [ "$foreground_status" != 0 ]; then
    kill -s TERM -- "-$foreground_pid" 2>/dev/null || true  # what it left in its process group, such as pip of setup.sh
    [ "$status" != 0 ] || status=$foreground_status
    exit "$status"
  fi
  return "$status"
}

forward_signal() { # forward_signal NAME STATUS: the trap of `run_foreground`
  foreground_signal=$1 foreground_status=$2
  if [ -n "$foreground_pid" ]; then
    foreground_sent=1
    kill -s "$1" -- "$foreground_pid" 2>/dev/null || true
  fi
}
