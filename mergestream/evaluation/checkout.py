"""What a checkout of the repository has beside the package: the offline suites, and the paper's numbers."""

from __future__ import annotations

from pathlib import Path

OFFLINE_SUITES = ("text", "vision")
SUITES = Path(__file__).resolve().parents[2] / "benchmarks" / "suites"


def find(name: str) -> Path | None:
    """A file of ``benchmarks/suites``; None where the package was installed without it."""
    path = SUITES / name
    return path if path.is_file() else None
