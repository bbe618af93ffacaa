"""Command line arguments that all commands share: the choice of a configuration, and overrides."""

from __future__ import annotations

import argparse

from recipe_gkd.config.caller import caller_path

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Values of ``--dtype``."""
DTYPE_HELP = "data type of the weights (default: the folder's, or float32 on a CPU that emulates it)"


def config_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m recipe_gkd.<module>``.

    Its results are ``config_name``, ``config_dir`` and ``overrides``.

    Args:
        description: Text of ``--help``.
    """
    return _parser(f"python -m recipe_gkd.{module}", description)


def command_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m recipe_gkd <command>``, with the same arguments as :func:`config_parser`."""
    return _parser(f"python -m recipe_gkd {command}", description)


def _parser(program: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All keys: python -m recipe_gkd.config",
    )
    parser.add_argument(
        "--config-name", default="on_policy_distill_trainer", help="name of a YAML file in the config folder"
    )
    parser.add_argument(
        "--config-dir", "--config-path", type=caller_path, help="config folder (default: the package's)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that override the YAML file")
    return parser
