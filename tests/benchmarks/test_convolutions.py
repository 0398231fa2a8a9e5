"""The benchmark of convolutions, with a UNet that is trained for two steps."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from mergestream import Ledger

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from benchmarks import convolutions


def test_a_lora_comes_back_and_a_full_fine_tune_better_than_before(tmp_path: Path) -> None:
    models = convolutions.make_models(tmp_path, steps=2)
    base = convolutions.UNet.from_pretrained(models.base)
    errors: dict[tuple[str, str], dict[int, float]] = {}
    for expert, tuned in models.tuned.items():
        for label, capacity in convolutions.CAPACITIES.items():
            with patch.object(Ledger, "capacity", capacity):
                again = convolutions.read_back(models.base, models.experts[expert])
            errors[expert, label] = convolutions.weight_errors(base, tuned, again)
    full, lora = models.tuned
    before, now = (errors[full, label] for label in convolutions.CAPACITIES)
    assert now[4] < 0.95 * before[4] and now[2] == before[2]
    assert all(error < 0.01 for label in convolutions.CAPACITIES for error in errors[lora, label].values())
