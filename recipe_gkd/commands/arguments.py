"""What the commands of this package have in common: naming a configuration and changing it."""

from __future__ import annotations

import argparse
from pathlib import Path


def config_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Of ``python -m recipe_gkd.<module>``: `config_name`, `config_dir` and `overrides`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m recipe_gkd.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All keys: python -m recipe_gkd.config",
    )
    parser.add_argument("--config-name", default="on_policy_distill_trainer", help="a YAML file of the config folder")
    parser.add_argument("--config-dir", "--config-path", type=Path, help="a config folder of your own")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="what to change in it")
    return parser
