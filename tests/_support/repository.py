"""Location of the checkout that is tested."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
