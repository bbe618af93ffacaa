"""Command `keys`, which creates the keys of a service and of its clients."""

from __future__ import annotations

import argparse

from teacher.commands.arguments import add_command
from teacher.wire.make_keys import add_client, make_keys


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    keys = add_command(
        commands, "keys", _keys, "create the keys of a service and of a first client, or of one more client"
    )
    keys.add_argument("--auth-dir", required=True, help="the folder to create; with --client an existing one")
    keys.add_argument("--client", metavar="NAME", help="add keys of one more client (a trainer or a worker)")


def _keys(args: argparse.Namespace) -> int:
    folder = add_client(args.auth_dir, args.client) if args.client else make_keys(args.auth_dir)
    if not args.client:
        print(f"made keys in {folder.parent.parent}: give this folder to the proxy, and keep it private")
        print("  (AUTH_DIR of teacher/start_server.sh, --auth-dir of `python -m teacher proxy`)")
    print(f"for trainers and workers on other machines: copy {folder}")
    print(f"  such as: scp -pr {folder} HOST:teacher-keys")
    print("  and name the copy: AUTH_DIR of teacher/join_server.sh, actor_rollout_ref.teacher.auth_dir of a trainer")
    return 0
