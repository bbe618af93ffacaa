"""Check of the installed packages against the requirements of this project and its tested versions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from recipe_gkd.commands.doctor.findings import Finding
from recipe_gkd.commands.gpu_smoke.machine import versions

CHECK = "versions"
_CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints"
_PROJECT = "recipe_gkd"
_TESTED = ("torch", "vllm", "ray", "megatron-core", "transformers")
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)==(?P<version>[^\s;#]+)")


def version_findings(device: str) -> list[Finding]:
    """Compare the packages that compute with the project's requirements and with the versions that it is tested with.

    Args:
        device: ``"cuda"`` or ``"cpu"``; selects the file of tested versions.
    """
    installed = versions()
    install = f"pip install -c constraints/{'gpu' if device == 'cuda' else 'cpu'}.txt -e '.[{_extra(device)}]'"
    found = list(_differences(installed, _requirements(), tested_versions(device), install))
    listed = ", ".join(f"{name} {installed[name]}" for name in _TESTED if installed.get(name))
    return found or [Finding(CHECK, "ok", listed)]


def tested_versions(device: str) -> dict[str, str]:
    """Return name -> version of the constraints file. Empty if the installation does not contain the file."""
    file = _CONSTRAINTS / f"{'gpu' if device == 'cuda' else 'cpu'}.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    pins = (_PIN.match(line) for line in lines)
    return {pin["name"].lower(): pin["version"] for pin in pins if pin is not None}


def _requirements() -> dict[str, Requirement]:
    """Return the requirements of the installed project by name, without its extras."""
    try:
        lines = metadata.requires(_PROJECT) or []
    except metadata.PackageNotFoundError:  # run from a folder without installation
        return {}
    found = {}
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found[requirement.name.lower()] = requirement
    return found


def _differences(
    installed: Mapping[str, str | None], required: Mapping[str, Requirement], tested: Mapping[str, str], install: str
) -> Iterator[Finding]:
    for name in _TESTED:
        version = installed.get(name)
        requirement = required.get(name)
        expected = f"{name} {requirement.specifier}" if requirement is not None else name
        if version is None:
            yield Finding(CHECK, "problem", f"{name} is not installed, expected {expected}; run: {install}")
        elif requirement is not None and not requirement.specifier.contains(version, prereleases=True):
            yield Finding(CHECK, "problem", f"found {name} {version}, expected {expected}; run: {install}")
        elif name in tested and _release(version) != _release(tested[name]):
            yield Finding(
                CHECK, "warning", f"found {name} {version}, tested is {tested[name]}; if anything fails, run: {install}"
            )


def _extra(device: str) -> str:
    return "gpu" if device == "cuda" else "cpu"


def _release(version: str) -> str:
    return version.partition("+")[0]  # the local part names the build, such as cpu
