"""The recipe in ``mergestream.json``: what an export was made from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mergestream.checkpoints.location import public_name
from mergestream.ledger.selection import Selection
from mergestream.store.manifest import Manifest

FORMAT = 1


@dataclass(frozen=True)
class ReadoutChoice(Selection):
    """How a model is read out: the readout and its experts, the scale, and the expert whose head is included."""

    scale: str | float | None = None
    task: str | None = None
    files_from: str | None = None
    """The expert whose chat template, special tokens and generation settings are written, or ``base``"""

    def with_own_head(self, tasks: Collection[str]) -> ReadoutChoice:
        """An expert that is read out alone brings its head, if it is one of the ``tasks`` and no other was chosen."""
        is_implied = self.task is None and self.one_expert in tasks
        return replace(self, task=self.one_expert) if is_implied else self


def make_recipe(
    manifest: Manifest,
    form: Mapping[str, Any],
    result: str,
    choice: ReadoutChoice | None = None,
    made_by: Literal["store", "merge"] = "store",
) -> dict[str, Any]:
    """The recipe of an export of a store with this manifest.

    ``form`` is the format of the files, and ``result`` the digest of the written tensors. ``made_by`` is ``store`` if
    experts were added one by one, and ``merge`` if each tensor was merged in one pass over all experts.
    """
    base, history = manifest.base, manifest.history
    defaults = {"format": "full", "rank": None, "dtype": None, "max_shard_size": None}
    return {
        "recipe": FORMAT,
        "made_by": made_by,
        "base": {
            "source": public_name(base.source, base.given),
            "digest": base.digest if base.measured else None,
            **{key: getattr(base, key) for key in ("linear", "not_linear", "heads")},
        },
        "method": manifest.method,
        "parameters": manifest.parameters,
        "experts": [
            {
                **{key: getattr(entry, key) for key in ("name", "digest", "options", "cut")},
                "source": public_name(entry.source, entry.given),
            }
            for entry in history
        ],
        "form": {**defaults, **form},
        "result": result,
        "readout": asdict(choice or ReadoutChoice()),
        # Up to 0.2 an expert could be subtracted from a sum: a gap in the numbers, and rounding errors.
        "exact": bool(manifest.entries) or [entry.number for entry in history] == [*range(1, len(history) + 1)],
    }
