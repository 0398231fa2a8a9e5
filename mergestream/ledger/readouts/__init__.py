"""Readouts: one file, one formula each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mergestream.registry import Registry

if TYPE_CHECKING:
    from mergestream.ledger.readouts.base import Readout


def _check_readout(name: str, readout: object) -> None:
    from mergestream.ledger.readouts.base import Readout

    if not (isinstance(readout, type) and issubclass(readout, Readout)):
        raise TypeError("it is no subclass of mergestream.Readout")
    if readout.name != name:
        raise ValueError(f"its class has the name {readout.name}")
    readout()  # all that is abstract must be there


READOUTS: Registry[type[Readout]] = Registry(
    "readout",
    "mergestream.readouts",
    {
        **{
            name: f"mergestream.ledger.readouts.{name}:{name.capitalize()}"
            for name in ("agree", "regress", "outputs", "tsv", "iso", "sum")
        },
        "tempered": "mergestream.ledger.readouts.tsv:Tempered",
        "expert": "mergestream.ledger.readouts.sum:Expert",
        "plain": "mergestream.ledger.readouts.base:Plain",
    },
    _check_readout,
)


def register_readout(readout: type[Readout]) -> type[Readout]:
    """Register your own readout by its name in this process."""
    return READOUTS.register(readout.name, readout)
