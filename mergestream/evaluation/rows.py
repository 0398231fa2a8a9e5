"""What is compared: the rows of a results table, each a method with its parameters or a baseline."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mergestream.errors import UsageError

if TYPE_CHECKING:
    from mergestream.ledger.selection import Selection
    from mergestream.methods.base import Method

CONTINUAL_FINE_TUNING = "continual_finetuning"

PAPER_NAMES = {
    CONTINUAL_FINE_TUNING: "C. Fine-Tuned",
    "average": "Average (SWA)",
    "task_arithmetic": "C. Task Arithmetic",
    "ties": "C. Ties-Merging",
    "opcm": "OPCM",
    "ledger": "Ledger",
}

DEFAULT_ROWS = (
    CONTINUAL_FINE_TUNING,
    "ledger",
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


READ_BACK = "expert"
"""As the readout of a row: each task is scored by its own expert, as the ledger gives it back."""
_BALANCED = "+balance"


@dataclass(frozen=True)
class Row:
    """``opcm:alpha=0.3:projection=paper@iso``: a name, the parameters that differ from their defaults, a readout."""

    name: str
    parameters: dict[str, str] = field(default_factory=dict)
    readout: str = ""

    @staticmethod
    def parse(text: str) -> Row:
        method, _, readout = text.strip().partition("@")
        name, *settings = method.split(":")
        if any("=" not in setting for setting in settings):
            raise UsageError(f"{text!r} is no method; write name, name:key=value:key=value or name@readout")
        row = Row(name, dict(setting.split("=", 1) for setting in settings), readout)
        if name != CONTINUAL_FINE_TUNING:
            row.check()  # an unknown name or parameter is told now, not after the training
        elif settings or readout:
            raise UsageError(f"{CONTINUAL_FINE_TUNING} has no parameters")
        return row

    def check(self) -> None:
        """Refuse what is not known, or cannot be read out so."""
        method, selection = self.method(), self.selection("a task")
        if method.remembers_experts:
            selection.of_entries(["a task"])
        else:
            selection.of_state(method)

    def selection(self, task: str) -> Selection:
        """How the model is read out that is scored on a task."""
        from mergestream.ledger.selection import ONE_EXPERT, Selection

        readout = self.readout.removesuffix(_BALANCED)
        chosen = f"{ONE_EXPERT}{task}" if readout == READ_BACK else readout
        return Selection(chosen or None, balance=self.readout.endswith(_BALANCED))

    def method(self) -> Method:
        from mergestream.methods import make_method

        return make_method(self.name, self.parameters)

    @property
    def key(self) -> str:
        method = ":".join([self.name, *(f"{key}={value}" for key, value in sorted(self.parameters.items()))])
        return f"{method}@{self.readout}" if self.readout else method

    @property
    def label(self) -> str:
        """The paper's name for the method, and what is not as in the paper."""
        label = PAPER_NAMES.get(self.name, self.name)
        changed = [f"{key} {value}" for key, value in sorted(self.parameters.items())]
        if self.readout:
            changed.append("experts read back" if self.readout == READ_BACK else f"readout {self.readout}")
        return ", ".join([label, *changed])


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
            replace(row, parameters={**row.parameters, self.parameter: f"{value:g}"})
            for row in having
            for value in self.values
        ]
        for row in swept:
            row.method()  # a value out of range is told now, not after the training
        return swept
