"""Root folder of the repository under test."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
