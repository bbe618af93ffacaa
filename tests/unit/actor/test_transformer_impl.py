"""Choice between Transformer Engine and torch's own modules: installations that are absent, broken or unsuitable."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.enums import AttnBackend

from recipe_gkd.actor.megatron import transformer_impl
from recipe_gkd.actor.megatron.transformer_impl import (
    ATTENTION_VARIABLES,
    KEY,
    PACKAGE,
    REMEDY,
    resolve_transformer_impl,
    version_warning,
)
from recipe_gkd.actor.ranks import RankSpec
from recipe_gkd.actor.strategy import build_backend
from recipe_gkd.errors import ConfigError
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.repository import REPO
from tests._support.tiny_models import MEGATRON

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Function that puts a stand-in for Transformer Engine on the path: its ``pytorch`` module and its version."""

    def write(pytorch: str | None = "", version: str | None = "2.11.0") -> Path:
        package = tmp_path / PACKAGE
        package.mkdir()
        (package / "__init__.py").touch()
        if pytorch is not None:
            (package / "pytorch.py").write_text(pytorch)
        if version is not None:
            info = tmp_path / f"{PACKAGE}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        for name in (PACKAGE, f"{PACKAGE}.pytorch"):
            monkeypatch.setitem(sys.modules, name, None)  # records the state, which is restored at the end
            del sys.modules[name]
        for name in ATTENTION_VARIABLES["local"]:
            monkeypatch.delenv(name, raising=False)
        # The choice is made before Megatron is imported, which other tests of this process may have done.
        monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
        return package

    return write


class TestResolve:
    def test_resolve_without_package_is_local_or_refused(self) -> None:
        assert resolve_transformer_impl("auto", "cuda") == "local"
        assert resolve_transformer_impl("local", "cuda") == "local"
        with raises(ConfigError, keys=(KEY,), remedy=REMEDY):
            resolve_transformer_impl("transformer_engine", "cuda")

    @pytest.mark.parametrize("setting", ["auto", "transformer_engine"])
    def test_resolve_with_usable_package_on_gpu_is_transformer_engine(self, setting: str, install: Install) -> None:
        install()
        assert resolve_transformer_impl(setting, "cuda") == "transformer_engine"  # type: ignore[arg-type]

    @pytest.mark.parametrize("setting", ["auto", "transformer_engine"])
    @pytest.mark.parametrize(
        ("pytorch", "version", "reason"),
        [
            (None, None, "cannot be imported: ModuleNotFoundError: No module named 'transformer_engine.pytorch'"),
            ("raise OSError('libcudart.so.13:\\n no such file')", "2.11.0", "OSError: libcudart.so.13: no such file"),
            ("assert False, 'version mismatch'", "2.11.0", "AssertionError: version mismatch"),
            ("", "2.8.0", "Transformer Engine 2.8.0"),
            ("", None, "is not an installed package"),
        ],
    )
    def test_resolve_with_unusable_package_names_file_and_remedies(
        self, setting: str, pytorch: str | None, version: str | None, reason: str, install: Install
    ) -> None:
        package = install(pytorch, version)
        with raises(ConfigError, keys=(KEY,), remedy=REMEDY) as caught:
            resolve_transformer_impl(setting, "cuda")  # type: ignore[arg-type]
        # `what` is text about the foreign package: its place and its own error.
        assert str(package) in caught.value.what and reason in caught.value.what

    @pytest.mark.parametrize(("setting", "device"), [("local", "cuda"), ("auto", "cpu")])
    def test_resolve_local_hides_package_from_megatron(self, setting: str, device: str, install: Install) -> None:
        """Also one that can be imported: Megatron would use its optimizer, on a CPU as well."""
        install()
        assert resolve_transformer_impl(setting, device) == "local"  # type: ignore[arg-type]
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(PACKAGE)
        assert resolve_transformer_impl(setting, device) == "local"  # type: ignore[arg-type]

    def test_resolve_transformer_engine_on_cpu_is_refused(self) -> None:
        with raises(ConfigError, keys=(KEY, "trainer.device")):
            resolve_transformer_impl("transformer_engine", "cpu")
        with raises(ConfigError, keys=(KEY, "trainer.device")):
            base_config(f"{MEGATRON}.transformer_impl=transformer_engine", "trainer.device=cpu")

    def test_newer_version_is_used_with_warning(self, install: Install) -> None:
        install("", "2.12.1")
        assert resolve_transformer_impl("auto", "cuda") == "transformer_engine"
        assert "Transformer Engine 2.12.1 is newer" in (version_warning() or "")

    def test_tested_version_has_no_warning(self, install: Install) -> None:
        install("", "2.11.0")
        assert version_warning() is None

    def test_extra_has_the_same_version_range(self) -> None:
        oldest, newest = transformer_impl.OLDEST_VERSION, transformer_impl.FIRST_UNTESTED_VERSION
        wanted = f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1]}"
        assert f"transformer-engine[core_cu13,pytorch]{wanted}\n" in (REPO / "setup.cfg").read_text()


class TestAttentionVariables:
    @pytest.mark.parametrize(
        ("setting", "device", "name", "value", "expected"),
        [
            ("auto", "cuda", "NVTE_FLASH_ATTN", "1", "0"),
            ("auto", "cuda", "NVTE_FUSED_ATTN", "0", "1"),
            ("local", "cuda", "NVTE_FLASH_ATTN", "0", "1"),
            ("auto", "cpu", "NVTE_UNFUSED_ATTN", "0", "1"),
        ],
    )
    def test_resolve_with_variable_that_megatron_rejects_is_refused(
        self, setting: str, device: str, name: str, value: str, expected: str, install: Install,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        install()
        monkeypatch.setenv(name, value)
        with raises(ConfigError, keys=(name,)):
            resolve_transformer_impl(setting, device)  # type: ignore[arg-type]

    @pytest.mark.parametrize(("setting", "backend"), [("auto", AttnBackend.fused), ("local", AttnBackend.auto)])
    def test_resolve_accepts_the_values_that_megatron_sets(
        self, setting: str, backend: AttnBackend, install: Install
    ) -> None:
        install()
        model: Any = SimpleNamespace(config=SimpleNamespace(attention_backend=backend, flash_attention_version=None))
        with mock.patch.dict(os.environ):
            LanguageModule._set_attention_backend(model)
            impl = resolve_transformer_impl(setting, "cuda")  # type: ignore[arg-type]
            assert ATTENTION_VARIABLES[impl].items() <= os.environ.items()


class TestBackend:
    def test_build_with_broken_package_raises_before_megatron_is_imported(self, install: Install) -> None:
        install(None, None)
        spec = RankSpec(rank=0, world_size=1, local_rank=0, device="cuda", rendezvous=("127.0.0.1", 1))
        with raises(ConfigError, keys=(KEY,)):
            build_backend(base_config(), spec)

    @pytest.mark.slow
    @pytest.mark.parametrize(("setting", "succeeds"), [(None, False), ("local", True)])
    def test_megatron_import_with_broken_package_succeeds_only_if_hidden(
        self, setting: str | None, succeeds: bool, install: Install
    ) -> None:
        package = install(None)
        lines = ["from recipe_gkd.actor.megatron.transformer_impl import resolve_transformer_impl"]
        lines += [f"resolve_transformer_impl({setting!r}, 'cuda')"] if setting else []
        program = "\n".join([*lines, "import megatron.core.fp8_utils"])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package.parent), str(REPO)])}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode == 0) is succeeds, done.stderr
        assert succeeds or "'transformer_engine" in done.stderr.splitlines()[-1]  # the wording is of Megatron's version
