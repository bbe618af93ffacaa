"""What an installed package has: every module, every YAML file, every script."""

from __future__ import annotations

import configparser
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def test_every_package_and_data_file_is_listed() -> None:
    setup = configparser.ConfigParser()
    setup.read(REPO / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    folders = {
        ".".join(path.parent.relative_to(REPO).parts)
        for top in ("recipe_gkd", "teacher")
        for path in (REPO / top).rglob("__init__.py")
    }
    assert listed == folders | {"recipe_gkd.config_files"}
    config = REPO / "config"
    assert set(config.rglob("*.yaml")) == {*config.glob("*.yaml"), *config.glob("*/*.yaml")}
    assert set((REPO / "teacher").rglob("*.sh")) == set((REPO / "teacher").glob("*.sh"))
