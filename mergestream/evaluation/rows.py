"""What is compared: the rows of a results table, each a method with its parameters or a baseline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mergestream.errors import UsageError

if TYPE_CHECKING:
    from mergestream.methods.base import Method

CONTINUAL_FINE_TUNING = "continual_finetuning"

PAPER_NAMES = {
    CONTINUAL_FINE_TUNING: "C. Fine-Tuned",
    "average": "Average (SWA)",
    "task_arithmetic": "C. Task Arithmetic",
    "ties": "C. Ties-Merging",
    "opcm": "OPCM",
}

DEFAULT_ROWS = (
    CONTINUAL_FINE_TUNING,
    "average",
    "task_arithmetic",
    "ties",
    "opcm",
    "opcm:projection=paper",
    "opcm:projection=block",
    "opcm:scaling=sqrt",
    "ties:mode=streaming",
    "ema",
    "lawa",
    "magmax",
)


@dataclass(frozen=True)
class Row:
    """``opcm:alpha=0.3:projection=paper``: a name and the parameters that differ from their defaults."""

    name: str
    parameters: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> Row:
        name, *settings = text.strip().split(":")
        if any("=" not in setting for setting in settings):
            raise UsageError(f"{text!r} is no method; write name or name:key=value:key=value")
        row = Row(name, dict(setting.split("=", 1) for setting in settings))
        if name != CONTINUAL_FINE_TUNING:
            row.method()  # an unknown name or parameter is told now, not after the training
        elif settings:
            raise UsageError(f"{CONTINUAL_FINE_TUNING} has no parameters")
        return row

    def method(self) -> Method:
        from mergestream.methods import make_method

        return make_method(self.name, self.parameters)

    @property
    def key(self) -> str:
        return ":".join([self.name, *(f"{key}={value}" for key, value in sorted(self.parameters.items()))])

    @property
    def label(self) -> str:
        """The paper's name for the method, and what is not as in the paper."""
        label = PAPER_NAMES.get(self.name, self.name)
        changed = ", ".join(f"{key} {value}" for key, value in sorted(self.parameters.items()))
        return f"{label}, {changed}" if changed else label


def parse_rows(text: str, trains: bool = True) -> list[Row]:
    """A comma-separated list of rows; ``all`` stands for the paper's rows and every method there is.

    Without training data (``trains``) there is no continual fine-tuning, and ``all`` leaves it out.
    """
    from mergestream.methods import METHODS

    every = [*DEFAULT_ROWS, *(name for name in METHODS if not any(row.split(":")[0] == name for row in DEFAULT_ROWS))]
    every = [name for name in every if trains or name != CONTINUAL_FINE_TUNING]
    names = [name for part in text.split(",") if part.strip() for name in (every if part.strip() == "all" else [part])]
    rows = {row.key: row for row in map(Row.parse, names)}
    if not rows:
        raise UsageError("no methods are named; try --methods opcm,average")
    return list(rows.values())


@dataclass(frozen=True)
class Sweep:
    """``alpha=0.1:1.0:0.1``: a parameter and its values, both ends included."""

    parameter: str
    values: tuple[float, ...]

    @staticmethod
    def parse(text: str) -> Sweep:
        try:
            parameter, numbers = text.split("=")
            first, last, step = map(float, numbers.split(":"))
            count = int((last - first) / step + 1e-9) + 1
        except (ValueError, ZeroDivisionError):
            count = 0
        if count < 1:
            raise UsageError(f"{text!r} is no sweep; write parameter=first:last:step, as in alpha=0.1:1.0:0.1")
        return Sweep(parameter, tuple(round(first + index * step, 9) for index in range(count)))

    def rows(self, rows: list[Row]) -> list[Row]:
        """Every row that has the parameter, once for each value."""
        merging = [row for row in rows if row.name != CONTINUAL_FINE_TUNING]
        having = [row for row in merging if self.parameter in row.method().parameters]
        if not having:
            raise UsageError(f"none of the methods has a parameter {self.parameter}")
        swept = [
            Row(row.name, {**row.parameters, self.parameter: f"{value:g}"}) for row in having for value in self.values
        ]
        for row in swept:
            row.method()  # a value out of range is told now, not after the training
        return swept
