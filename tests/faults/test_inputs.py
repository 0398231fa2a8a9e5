"""A sample of the inputs that `make torture` feeds to every parser."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults import surfaces
from tests.faults.inputs import KINDS, Case, case, fault, known

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")
SEEDS = st.integers(0, 2**32)


def taken(one: Case) -> None:
    with tempfile.TemporaryDirectory() as place:
        found = fault(one, Path(place))
    assert found is None, f"{one.label}: {found}"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "config"])
@settings(max_examples=40)
@given(SEEDS)
def test_strange_inputs_are_taken_or_refused(kind: Any, seed: Any) -> None:
    taken(case(seed, kind))


@settings(max_examples=10)
@given(SEEDS)
def test_strange_configurations_are_taken_or_refused(seed: Any) -> None:
    pytest.importorskip("transformers")
    taken(case(seed, "config"))


@pytest.mark.parametrize("kind", surfaces.SURFACES)
@settings(max_examples=8)
@given(SEEDS)
def test_strange_recipes_samples_exports_and_servers_are_taken_or_refused(kind: Any, seed: Any) -> None:
    taken(surfaces.case(seed, kind))


@pytest.mark.parametrize("one", list(known()), ids=lambda one: one.label)
def test_what_once_did_harm(one: Any) -> None:
    taken(one)


def test_the_check_sees_what_is_wrong(tmp_path: Path) -> None:
    def reach_out(place: Path) -> Path:
        (place.parent / "outside").mkdir()
        return place / "nothing"

    def crash(place: Path) -> None:
        raise ZeroDivisionError

    for one in (Case("out", reach_out), Case("crash", lambda place: place, crash)):
        (tmp_path / one.label).mkdir()
        assert fault(one, tmp_path / one.label) is not None
