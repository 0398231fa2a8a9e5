"""What a user selects for a readout: the readout, the experts and their weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mergestream.errors import UsageError, did_you_mean
from mergestream.ledger.readouts import READOUTS
from mergestream.ledger.readouts.base import EntriesReadout, StateReadout
from mergestream.ledger.readouts.sum import Expert
from mergestream.methods.base import Method

ONE_EXPERT = "expert:"


@dataclass(frozen=True)
class Selection:
    """The readout, the experts and their weights; the scale is chosen separately."""

    readout: str | None = None
    """By default ``agree`` for a ledger, ``tempered`` where an adapter is merged, and ``plain`` for other methods;
    ``expert:NAME`` is one expert"""
    only: Sequence[str] = ()
    without: Sequence[str] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    """By expert; 1 for those that are not named"""

    @property
    def one_expert(self) -> str | None:
        """The expert that is read out alone, if one is."""
        name, _, one = (self.readout or "").partition(":")
        return one if name == "expert" and one else None

    def of_state(self, method: Method) -> StateReadout:
        """The readout of a state that has absorbed all experts."""
        if self.only or self.without or self.weights or (self.readout or "").startswith(ONE_EXPERT):
            raise UsageError(
                f"{method.name} keeps one state for all experts, so they cannot be selected; a store made with "
                "--method ledger can"
            )
        readout = READOUTS.choose(self.readout or "plain")()
        if not isinstance(readout, StateReadout) or not (readout.name == "plain" or method.additive):
            raise UsageError(f"{method.name} cannot be read out by {readout.name}{_can(method)}")
        return readout

    def of_entries(
        self, names: Sequence[str], adapters: Collection[str] = ()
    ) -> tuple[EntriesReadout, dict[str, float]]:
        """The readout of a ledger with these experts, and the weights of the selected ones."""
        name, _, one = (self.readout or "").partition(":")
        if name == "expert":
            return Expert(), self._one_expert(one, names)
        if one:
            raise UsageError(f"there is no readout {self.readout}; {ONE_EXPERT}NAME is the one that takes a name")
        selected = self._selected(names)
        name = name or ("agree" if selected.keys().isdisjoint(adapters) else "tempered")
        readout = READOUTS.choose(name)()
        if not isinstance(readout, EntriesReadout):
            raise UsageError(
                f"a ledger cannot be read out by {name}; choose agree, regress, outputs, tsv, tempered, iso, sum or "
                "expert:NAME"
            )
        return readout, selected

    def _selected(self, names: Sequence[str]) -> dict[str, float]:
        """The weights of the selected experts."""
        for option, chosen in (("--only ", self.only), ("--without ", self.without), ("--weight ", self.weights)):
            _check_known(chosen, names, option)
        if self.only and self.without:
            raise UsageError("--only and --without exclude each other; give one of them")
        for expert, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise UsageError(f"the weight {weight:g} of {expert} is not a number from 0 on")
        chosen_names = [each for each in names if each not in self.without and (not self.only or each in self.only)]
        selected = {each: float(self.weights.get(each, 1.0)) for each in chosen_names}
        selected = {each: weight for each, weight in selected.items() if weight}
        if not selected:
            raise UsageError("no expert is left to merge: all are left out, or have the weight 0")
        return selected

    def _one_expert(self, one: str, names: Sequence[str]) -> dict[str, float]:
        if not one:
            raise UsageError(f"say which expert is meant: {ONE_EXPERT}NAME (there are: {', '.join(names)})")
        _check_known([one], names, ONE_EXPERT)
        if self.only or self.without or self.weights:
            raise UsageError(f"{self.readout} is one expert: --only, --without and --weight do not go with it")
        return {one: 1.0}


def _check_known(chosen: Sequence[str] | Mapping[str, float], names: Sequence[str], option: str) -> None:
    for name in chosen:
        if name not in names:
            raise UsageError(
                f"{option}{name}: there is no such expert{did_you_mean(name, names)} (there are: {', '.join(names)})"
            )


def _can(method: Method) -> str:
    return "; it can by plain or iso" if method.additive else "; it can by plain only"
