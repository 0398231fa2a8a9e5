"""``mergestream methods`` describes the methods and readouts as they are, in 80 columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from inspect import getdoc

import pytest

from mergestream.cli.methods import describe
from mergestream.ledger.readouts import READOUTS
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.methods import METHODS
from tests.conftest import RunCommand


def test_methods_are_described_as_they_are() -> None:
    for name in METHODS:
        described, method = describe(METHODS, name), METHODS[name]
        assert described["name"] == name and described["origin"] == METHODS.origin(name)
        assert described["summary"] and described["summary"] == (getdoc(method) or "").partition("\n")[0]
        assert described["commutative"] == method().commutative
        assert described["parameters"] == [
            {
                "name": field.name,
                "default": field.default,
                "help": field.metadata.get("help", ""),
                "choices": list(field.metadata.get("choices", ())),
            }
            for field in fields(method)
        ]


def test_readouts_are_described_as_they_are() -> None:
    for name in READOUTS:
        described, readout = describe(READOUTS, name), READOUTS[name]
        assert described["summary"] and described["summary"] == (getdoc(readout) or "").partition("\n")[0]
        assert described["of_ledgers"] == issubclass(readout, EntriesReadout)


def test_the_list_fits_80_columns(done: Callable[..., str]) -> None:
    listed = done("methods")
    assert max(map(len, listed.splitlines())) <= 80
    for name in (*METHODS, *READOUTS):
        assert f"  {name}: " in listed
    assert "--set alpha=0.5" in listed


def test_one_method_or_readout_is_described_alone(done: Callable[..., str]) -> None:
    text = done("methods", "ties")
    assert text.startswith("  ties: ") and "--set density=" in text and "opcm" not in text and "agree" not in text
    assert [item["name"] for item in json.loads(done("methods", "ties", "--json"))] == ["ties"]
    assert [item["name"] for item in json.loads(done("methods", "agree", "--json"))] == ["agree"]


@pytest.mark.parametrize(("name", "right"), [("tsi", "did you mean tsv?"), ("opmc", "did you mean opcm?"), ("x", "")])
def test_an_unknown_name_is_refused(name: str, right: str, mergestream: RunCommand) -> None:
    result = mergestream("methods", name)
    assert result.code == 2 and f"there is no method or readout {name}" in result.err and right in result.err
