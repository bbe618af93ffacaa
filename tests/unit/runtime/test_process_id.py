import os
import subprocess
import sys
from dataclasses import replace

from teacher.common.process_id import is_alive, process_id


def test_process_id_of_this_process_is_alive() -> None:
    me = process_id(os.getpid())
    assert me is not None and is_alive(me)


def test_is_alive_other_start_or_boot_returns_false() -> None:
    me = process_id(os.getpid())
    assert me is not None
    assert not is_alive(replace(me, start_ticks=me.start_ticks + 1))
    assert not is_alive(replace(me, boot_id="another boot"))


def test_is_alive_ended_process_returns_false() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = process_id(child.pid)
    assert identity is not None and is_alive(identity)
    child.communicate(b"\n")
    assert not is_alive(identity)
    assert process_id(child.pid) is None


def test_is_alive_zombie_returns_false() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    identity = process_id(child.pid)
    assert child.stdout is not None and identity is not None
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # It has ended but is not reaped.
    assert process_id(child.pid) is not None and not is_alive(identity)
    child.communicate()
