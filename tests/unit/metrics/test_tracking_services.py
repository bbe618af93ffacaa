"""Tracking services without a network: what they store, and that a resumed run continues the run of the service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from recipe_gkd.config import validate as validate_module
from recipe_gkd.config.schema import TRACKING_SERVICES
from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics.loggers.loggers import Loggers
from tests._support.base_config import base_config
from tests._support.errors import raises

METRICS = {"actor/kl_loss": 0.25, "val/data/f/best@2": 0.5}
SECRET = "token-of-the-user"
COMPOSED = (
    "trainer:\n  project_name: recipe_gkd\n  logger: [console]\ngkd:\n  beta: 0.5\n"
    f"ray_init:\n  env_vars:\n    HF_TOKEN: {SECRET}\n"
)


def import_client(name: str) -> ModuleType:
    return pytest.importorskip(name, reason=f"the package {name} is not installed: pip install 'recipe-gkd[{name}]'")


def log_steps(folder: Path, service: str, steps: Mapping[int, Mapping[str, float]], completed_steps: int = 0) -> None:
    trainer = base_config(f"trainer.logger=[{service}]", f"trainer.default_local_dir={folder}").trainer

    async def scenario() -> None:
        async with Loggers(trainer, completed_steps=completed_steps, last_step=3) as loggers:
            for step, metrics in steps.items():
                loggers.log(step, metrics)

    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(COMPOSED)
    asyncio.run(scenario())


def log_with_resume(folder: Path, service: str, starts: tuple[int, ...] = (0, 2)) -> list[str]:
    """Log steps 1 to 3, then resume from step 2; return the ids at the service. Start 0 is a new run."""
    ids = []
    for completed_steps in starts:
        steps = {step: METRICS for step in (1, 2, 3) if step > completed_steps}
        log_steps(folder, service, steps, completed_steps)
        [path] = (folder / service).glob("run_id*")
        ids.append(path.read_text().strip())
    return ids


class TestWandb:
    def test_offline_run_is_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wandb = import_client("wandb")
        wandb.teardown()  # another test may have read the environment
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        first, resumed = log_with_resume(tmp_path, "wandb")
        wandb.teardown()
        assert first == resumed
        # Starts within one second share a folder.
        assert len(list(tmp_path.glob(f"wandb/wandb/offline-run-*-{first}"))) in (1, 2)
        content = b"".join(file.read_bytes() for file in tmp_path.glob(f"wandb/wandb/*/run-{first}.wandb"))
        stored = [b"training/global_step", b"actor/kl_loss", b"best@2", b"on_policy_distill", b"beta"]
        assert [text for text in stored if text not in content] == []
        assert SECRET.encode() not in content


class TestMlflow:
    def test_run_without_server_is_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import_client("mlflow")
        from mlflow.tracking import MlflowClient

        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        first, resumed, new = log_with_resume(tmp_path, "mlflow", (0, 2, 0))
        assert first == resumed != new
        client = MlflowClient((tmp_path / "mlflow" / "mlruns").as_uri())
        run = client.get_run(first)
        assert run.info.status == "FINISHED" and run.info.run_name == "on_policy_distill"
        assert run.data.params == {
            "trainer.project_name": "recipe_gkd",
            "trainer.logger": "['console']",
            "gkd.beta": "0.5",
            "ray_init.env_vars": "(not uploaded)",
        }
        assert run.data.metrics == {"training/global_step": 3.0, "actor/kl_loss": 0.25, "val/data/f/best_2": 0.5}
        assert [metric.step for metric in client.get_metric_history(first, "actor/kl_loss")] == [1, 2, 3, 3]


class TestSwanLab:
    def test_offline_run_is_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import_client("swanlab")
        monkeypatch.setenv("SWANLAB_MODE", "offline")
        first, resumed = log_with_resume(tmp_path, "swanlab")
        assert first == resumed
        content = b"".join(file.read_bytes() for file in tmp_path.glob(f"swanlab/run-*/run-{first}.swanlab"))
        assert b"training/global_step" in content and b"actor/kl_loss" in content


class TestMissingPackage:
    @pytest.mark.parametrize("service", TRACKING_SERVICES)
    def test_validate_names_the_command(self, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(validate_module, "find_spec", lambda _: None)
        with raises(ConfigError, keys=("trainer.logger",)) as caught:
            base_config(f"trainer.logger=[{service}]")
        assert f"`pip install 'recipe-gkd[{service}]'`" in caught.value.remedy

    def test_folder_of_the_service_is_not_the_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A client may make a folder with its own name in the working directory."""
        (tmp_path / "folder_only").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        found = find_spec("folder_only")
        monkeypatch.setattr(validate_module, "find_spec", lambda _: found)
        with raises(ConfigError, keys=("trainer.logger",)):
            base_config("trainer.logger=[mlflow]")
