"""Choice between Transformer Engine and torch's own modules for the layers of the actor.

Megatron imports Transformer Engine on its own if it finds the package. If the package cannot be imported completely,
``import megatron.core`` fails with an error that names no remedy (megatron/core/fp8_utils.py imports
``transformer_engine.pytorch.tensor`` without a guard). If it can be imported, Megatron uses its optimizer, also on a
CPU, where it does not work. An actor process therefore calls :func:`resolve_transformer_impl` before it imports
Megatron. This module imports neither of the two, and no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from typing import Literal

from recipe_gkd.config.keys import key_name
from recipe_gkd.config.schema.actor import ActorConfig, TransformerImpl
from recipe_gkd.errors import ConfigError

KEY = key_name(lambda config: config.actor_rollout_ref.actor.megatron.transformer_impl)
PACKAGE = "transformer_engine"

# The range of megatron-core 0.16.1 (its extra `dev`), and of our extra `gpu-te`.
OLDEST_VERSION, FIRST_UNTESTED_VERSION = (2, 9), (2, 12)
VERSION_RANGE = "2.9 to 2.11"

INSTALL = "pip install --no-build-isolation -e '.[gpu-te]'"
REMEDY = (
    f"install version {VERSION_RANGE}, compiled for the installed torch ({INSTALL}), uninstall it (pip uninstall "
    f"transformer-engine), or set {KEY}=local"
)

ResolvedImpl = Literal["transformer_engine", "local"]

# Values that Megatron gives to Transformer Engine's variables for the `attention_backend` of each implementation, fused
# and auto (language_module.py `_set_attention_backend`). It asserts that they have no other values.
ATTENTION_VARIABLES: dict[ResolvedImpl, dict[str, str]] = {
    "transformer_engine": {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"},
    "local": {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "1"},
}


def impl_setting(actor: ActorConfig) -> TransformerImpl:
    """Return ``megatron.transformer_impl``, or ``local`` for ``auto`` with adapters.

    Transformer Engine merges a norm into the next linear layer. The adapter of that layer would need its result.
    """
    setting = actor.megatron.transformer_impl
    return "local" if actor.lora.rank and setting == "auto" else setting


def resolve_transformer_impl(setting: TransformerImpl, device_type: str) -> ResolvedImpl:
    """Return the implementation of the layers. Hide Transformer Engine from Megatron if it is not used.

    Must be called before Megatron is imported. Further calls return the same result.

    Args:
        setting: Value of ``actor.megatron.transformer_impl``.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: Transformer Engine is required and not installed, or is installed and cannot be used. With
            ``auto``, an installation that cannot be used is an error as well, because slower layers would hide it.
            A variable of the environment selects another attention than Megatron is configured for.
    """
    impl = _resolve(setting, device_type)
    for name, expected in ATTENTION_VARIABLES[impl].items():
        if (value := os.environ.get(name, expected)) != expected:
            raise ConfigError(
                f"the environment variable {name} is {value!r} in the actor's process; expected no value or "
                f"{expected!r}, because the actor chooses the attention itself",
                remedy="unset it in the shell that starts the run or its Ray nodes",
                keys=(name,),
            )
    return impl


def _resolve(setting: TransformerImpl, device_type: str) -> ResolvedImpl:
    if setting == "transformer_engine" and device_type != "cuda":
        raise ConfigError(
            f"{KEY}=transformer_engine needs a GPU, and the actor runs on the device {device_type!r}",
            remedy="set it to auto",
            keys=(KEY, "trainer.device"),
        )
    if setting == "local" or device_type != "cuda":
        _hide_from_megatron()
        return "local"
    if importlib.util.find_spec(PACKAGE) is None:
        if setting == "transformer_engine":
            raise ConfigError(
                f"{KEY}=transformer_engine, but Transformer Engine is not installed", remedy=REMEDY, keys=(KEY,)
            )
        return "local"
    if problem := find_problem():
        raise ConfigError(problem, remedy=REMEDY, keys=(KEY,))
    return "transformer_engine"


def find_problem() -> str | None:
    """Return why the installed Transformer Engine cannot be used, or None if it can. Imports it."""
    spec = importlib.util.find_spec(PACKAGE)
    place = spec.origin if spec is not None and spec.origin is not None else PACKAGE
    try:
        importlib.import_module(f"{PACKAGE}.pytorch")
    except Exception as error:  # noqa: BLE001 - missing modules and libraries, another ABI, failed assertions
        reason = " ".join(str(error).split())
        return f"Transformer Engine ({place}) cannot be imported: {type(error).__name__}: {reason}"
    version = installed_version()
    if version is None:
        return f"Transformer Engine ({place}) is not an installed package: it has no version"
    if _release(version) < OLDEST_VERSION:
        return f"Transformer Engine {version} ({place}) is too old: megatron-core needs version {VERSION_RANGE}"
    return None


def version_warning() -> str | None:
    """Return a warning if the installed Transformer Engine is newer than the tested versions, else None."""
    version = installed_version()
    if version is None or _release(version) < FIRST_UNTESTED_VERSION:
        return None
    return (
        f"Transformer Engine {version} is newer than the versions that megatron-core 0.16.1 was made for "
        f"({VERSION_RANGE}). If the actor fails in its layers: {REMEDY}"
    )


def installed_version() -> str | None:
    """Return the version of the installed Transformer Engine, or None."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _hide_from_megatron() -> None:
    """Let each import of Transformer Engine in this process fail as if it was not installed."""
    if "megatron.core" not in sys.modules and PACKAGE not in sys.modules and importlib.util.find_spec(PACKAGE):
        sys.modules[PACKAGE] = None  # type: ignore[assignment]  # `import` raises ModuleNotFoundError for None
