"""Hidden modules: imports fail only in the body, and a module in use stays visible. Compilation is off in a body."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from recipe_gkd.actor.library_imports import hidden_module, uncompiled


class TestHiddenModule:
    def test_import_fails_in_the_body_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "colorsys", raising=False)
        with hidden_module("colorsys"), pytest.raises(ImportError):
            importlib.import_module("colorsys")
        assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)

    def test_imported_module_stays_visible(self) -> None:
        with hidden_module("sys"):
            assert importlib.import_module("sys") is sys


class TestUncompiled:
    def test_functions_are_not_compiled_in_the_body_only(self) -> None:
        original = torch.compile

        def double(value: int) -> int:
            return 2 * value

        with uncompiled():
            assert torch.compile(double) is double
            assert torch.compile(dynamic=True)(double) is double
        assert torch.compile is original
