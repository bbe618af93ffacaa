"""Hidden modules: imports fail only in the body, and a module in use stays visible."""

from __future__ import annotations

import importlib
import sys

import pytest

from recipe_gkd.actor.hidden_module import hidden_module


class TestHiddenModule:
    def test_import_fails_in_the_body_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "colorsys", raising=False)
        with hidden_module("colorsys"), pytest.raises(ImportError):
            importlib.import_module("colorsys")
        assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)

    def test_imported_module_stays_visible(self) -> None:
        with hidden_module("sys"):
            assert importlib.import_module("sys") is sys
