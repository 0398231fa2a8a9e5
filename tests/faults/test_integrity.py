"""A few of the forged stores and flipped bits; ``make torture`` tries all of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.faults import flips, forged
from tests.faults.cases import Case


@pytest.mark.parametrize(("cases", "count"), [(forged.cases, 40), (flips.cases, 15)], ids=["forged", "flips"])
def test_no_store_is_believed_more_than_its_digests(
    cases: Callable[[Path], Iterable[Case]], count: int, tmp_path: Path
) -> None:
    for case in random.Random(0).sample(list(cases(tmp_path / "stores")), count):
        place = tmp_path / "place"
        place.mkdir()
        assert case.run(place) is None, case.name
        shutil.rmtree(place)
