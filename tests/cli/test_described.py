"""What the methods command says is what the code is, and it is said without loading torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from inspect import getdoc

import pytest

from mergestream.cli import described
from mergestream.ledger.readouts import READOUTS
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.methods import METHODS


def test_methods_are_read_as_they_are():
    for told in described.described_methods():
        if not METHODS.place(told["name"]):
            continue  # of another test
        method = METHODS[told["name"]]
        assert told["summary"] and told["summary"] == getdoc(method).partition("\n")[0]
        assert told["commutative"] == method().commutative
        assert told["parameters"] == [
            {
                "name": field.name,
                "default": field.default,
                "help": field.metadata["help"],
                "choices": list(field.metadata["choices"]),
            }
            for field in fields(method)
        ]


def test_readouts_are_read_as_they_are():
    for told in described.described_readouts():
        readout = READOUTS[told["name"]]
        assert told["summary"] and told["summary"] == getdoc(readout).partition("\n")[0]
        assert told["of_ledgers"] == issubclass(readout, EntriesReadout)


@pytest.mark.parametrize("error", [OSError("no source"), LookupError("elsewhere")])
def test_without_the_source_they_are_imported(error, monkeypatch):
    read = described.described_methods(), described.described_readouts()

    def fail(place: str) -> None:
        raise error

    monkeypatch.setattr(described, "_lineage", fail)
    assert (described.described_methods(), described.described_readouts()) == read


def test_torch_is_not_loaded_to_list_them():
    code = """
import sys
from mergestream.cli import main
assert main(["methods"]) == main(["methods", "--json"]) == 0
assert not {"torch", "numpy", "rich"} & sys.modules.keys()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
