"""Validate a configuration in about two seconds, without starting or importing any worker.

python -m recipe_gkd check-config --config-name on_policy_distill_trainer key=value ...

The command prints warnings, and one line if the configuration is valid. It opens no data, no model and no connection.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from recipe_gkd.commands.arguments import command_parser
from recipe_gkd.config.load import read_config
from recipe_gkd.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if the training command would accept the configuration, else 1.
    """
    arguments = command_parser("check-config", __doc__).parse_intermixed_args(argv)
    try:
        loaded = read_config(arguments.config_name, arguments.overrides, arguments.config_dir)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for text in loaded.warnings:
        print(f"warning: {text}", file=sys.stderr)
    print(f"{arguments.config_name} with {len(arguments.overrides)} overrides is valid")
    return 0
