# Function for scripts of this folder that run a training next to a teacher service. Not a command.

# run_foreground [--cleanup CLEANUP] COMMAND [ARGUMENT...]: Run COMMAND and return its exit status.
#
# SIGTERM, SIGUSR1, SIGINT, SIGHUP and SIGQUIT to this shell are forwarded to COMMAND. This shell then exits once COMMAND has
# ended, with its status, or with 128 + the signal's number if that is 0. If COMMAND succeeds, CLEANUP (shell code) runs
# whenever this shell ends. Signals to this shell do not interrupt CLEANUP, and its failure does not change the exit
# status.
#
# If COMMAND is a shell function, it must `exec` its last command, because the signal is sent to one process only.
run_foreground() {
  local status='' code cleanup=''
  if [ "$1" = --cleanup ]; then cleanup=$2; shift 2; fi
  foreground_pid='' foreground_signal='' foreground_status=0 foreground_sent=''
  trap 'forward_signal TERM 143' TERM
  trap 'forward_signal USR1 138' USR1
  trap 'forward_signal INT 130' INT
  trap 'forward_signal HUP 129' HUP
  trap 'forward_signal QUIT 131' QUIT
  # A separate process group, so that Ctrl-C reaches COMMAND once, through this shell. Without job control COMMAND would
  # also ignore SIGINT.
  set -m
  "$@" </dev/null &
  foreground_pid=$!
  set +m
  # Forward a signal that arrived before COMMAND had a pid.
  [ "$foreground_status" = 0 ] || [ -n "$foreground_sent" ] \
    || kill -s "$foreground_signal" -- "$foreground_pid" 2>/dev/null || true
  while :; do  # a signal ends `wait`, not COMMAND
    foreground_signal='' code=0
    wait "$foreground_pid" || code=$?
    [ "$code" = 127 ] && [ -n "$status" ] || status=$code  # 127: the previous value was its status
    [ -n "$foreground_signal" ] || break
  done
  if [ -n "$cleanup" ] && [ "$status" = 0 ]; then
    foreground_cleanup=$cleanup
    # Not `trap ""`: a process of CLEANUP could not handle a signal that was ignored when it began.
    trap 'trap : TERM USR1 INT HUP QUIT; eval "$foreground_cleanup" || true' EXIT
  fi
  # Not the default actions: they end the shell without its EXIT trap, so CLEANUP would not run.
  trap 'exit 143' TERM
  trap 'exit 138' USR1
  trap 'exit 130' INT
  trap 'exit 129' HUP
  trap 'exit 131' QUIT
  if [ "$foreground_status" != 0 ]; then
    kill -s TERM -- "-$foreground_pid" 2>/dev/null || true  # remaining processes of its group, such as pip of setup.sh
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
