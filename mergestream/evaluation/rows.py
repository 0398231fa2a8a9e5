"""Rows of a results table: a method with its parameters and readout."""

from __future__ import annotations

from dataclasses import dataclass, field

from mergestream import METHODS, Merger, Method, make_method
from mergestream.errors import UsageError

PAPER_NAMES = {
    "continual_finetuning": "C. Fine-Tuned",  # benchmarks/finetuning.py
    "average": "Average (SWA)",
    "task_arithmetic": "C. Task Arithmetic",
    "ties": "C. Ties-Merging",
    "opcm": "OPCM",
    "ledger": "Ledger",
}

DEFAULT_ROWS = (
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
"""Readout of a row that scores each task with its own expert, as the ledger returns it"""


@dataclass(frozen=True)
class Row:
    """A method, its parameters and its readout, written as ``opcm:alpha=0.3:projection=paper@iso``."""

    name: str
    parameters: dict[str, str] = field(default_factory=dict)
    readout: str = ""

    @staticmethod
    def parse(text: str) -> Row:
        """Read ``name:key=value@readout``."""
        method, _, readout = text.strip().partition("@")
        name, *settings = method.split(":")
        if any("=" not in setting for setting in settings):
            raise UsageError(f"{text!r} is not a method; write name, name:key=value:key=value or name@readout")
        return Row(name, dict(setting.split("=", 1) for setting in settings), readout)

    def check(self) -> None:
        """Refuse unknown methods, parameters and readouts, by merging two tiny experts."""
        import torch

        base = {"layer.weight": torch.eye(8)}
        merger = Merger(base, self.method())
        for scale in (2, 3):
            merger.add({"layer.weight": scale * base["layer.weight"]}, f"task {scale}")
        merger.state_dict(readout=self.readout_for("task 2"))

    def readout_for(self, task: str) -> str | None:
        """The readout of the model that is scored on a task."""
        return f"expert:{task}" if self.readout == READ_BACK else self.readout or None

    def method(self) -> Method:
        """Make the method."""
        return make_method(self.name, self.parameters)

    @property
    def method_key(self) -> str:
        """The key without the readout."""
        return ":".join([self.name, *(f"{key}={value}" for key, value in sorted(self.parameters.items()))])

    @property
    def key(self) -> str:
        """The text that `parse` reads, with sorted parameters."""
        return f"{self.method_key}@{self.readout}" if self.readout else self.method_key

    @property
    def label(self) -> str:
        """The paper's name for the method, with the parameters and the readout."""
        label = PAPER_NAMES.get(self.name, self.name)
        changed = [f"{key} {value}" for key, value in sorted(self.parameters.items())]
        if self.readout:
            changed.append("experts read back" if self.readout == READ_BACK else f"readout {self.readout}")
        return ", ".join([label, *changed])


def parse_rows(text: str) -> list[Row]:
    """Read and check a comma-separated list of rows; ``all`` stands for the paper's rows and every other method."""
    every = [*DEFAULT_ROWS, *(name for name in METHODS if not any(row.split(":")[0] == name for row in DEFAULT_ROWS))]
    names = [name for part in text.split(",") if part.strip() for name in (every if part.strip() == "all" else [part])]
    rows = {row.key: row for row in map(Row.parse, names)}
    if not rows:
        raise UsageError("no methods are named; try --methods opcm,average")
    for row in rows.values():
        row.check()
    return list(rows.values())
