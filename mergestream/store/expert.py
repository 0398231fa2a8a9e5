"""The history of a store: its experts, as the manifest has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from mergestream.experts.vocabulary import Vocab
from mergestream.methods.scale import inverse
from mergestream.schema import Count, Finite, Magnitude, Number


def folder_name(number: int, mark: str) -> str:
    return f"{number:04d}-{mark}" if mark else f"{number:04d}"


class Options(TypedDict, total=False):
    """The options that an expert was added with."""

    partial: bool
    ignore: list[str]
    vocab: Vocab
    allow_duplicate: bool
    allow_other_base: bool


class PassedGate(TypedDict):
    """A gate that an expert has passed, with its value; None where there was nothing to compare."""

    gate: str
    value: float | None


class _ByTask(TypedDict, total=False):
    scores: dict[str, float]
    """Scores by task, where the command has written them"""


class Evaluation(_ByTask):
    """The command that evaluated an expert before it was added, and the score."""

    command: str
    score: float


@dataclass(frozen=True)
class InputsEntry:
    """The statistics of an expert's inputs, in ``inputs/NNNN``."""

    number: Number
    count: Count
    """How many inputs there were"""
    record: str
    """Digest of ``inputs.json``"""
    mark: str = ""
    after: str = ""
    """The last expert when `calibrate` added them: as long as it is the last one, `undo` takes them back"""
    before: InputsEntry | None = None
    """Those that `calibrate` replaced"""

    @property
    def folder(self) -> str:
        return folder_name(self.number, self.mark)


@dataclass(frozen=True)
class Expert:
    """One expert of a store, and the scalars of the store after it."""

    name: str
    number: Number
    """The number of its folders: the record in ``experts``, and its entry or the state after it in ``steps``"""
    source: str
    digest: str
    added: str
    """The time, in UTC"""
    seconds: Magnitude
    norm: Magnitude
    """‖Δ_t‖, before any projection"""
    kept: Magnitude
    """The share of ‖Δ_t‖² that entered the state"""
    scale: Finite
    """merged = θ⁰ + scale · direction; 1/λ_t of OPCM"""
    mean_norm: Magnitude
    """n_t"""
    direction_norm: Magnitude | None
    """‖direction‖; None where it was not measured"""
    distance: Magnitude | None
    """‖merged − θ⁰‖ by the method's own scale, where it is known"""
    rank: Count
    """The largest rank that a tensor in factors may have now; in a ledger, that of an adapter; 0 where all are dense"""
    state: str
    """Digest of the state after this step, or of the entry; empty where the state contains a removed expert"""
    record: str
    """Digest of ``experts/NNNN/tensors.json``"""
    fates: Mapping[str, Count]
    """The number of tensors that were merged, copied, kept as a head, tied, unchanged, ignored"""
    options: Options
    cut: Count = 0
    """In a ledger: among how many experts the budget was divided when its entry was written, at least 8; else 0"""
    gates: Sequence[PassedGate] = ()
    """The gates that it passed"""
    evaluation: Evaluation | None = None
    notes: Sequence[str] = field(default_factory=list)
    """The notes that the user saw"""
    mark: str = ""
    """Suffix of its folders in a bucket: no two writers have the same folder"""
    given: str = ""
    """The path or id that the user gave; empty where it is not known, or for a model in memory"""
    lost: Magnitude = 0.0
    """The share of the state's energy that a bound on its rank has cut off; 0 since 0.3, which has none"""
    inputs: InputsEntry | None = None
    """The statistics of its inputs, if a ledger has measured any"""

    @property
    def is_entry(self) -> bool:
        """Whether its step holds its own entry in a ledger, instead of the state after it"""
        return self.cut > 0

    @property
    def is_adapter(self) -> bool:
        """Whether its entry in a ledger is that of an adapter"""
        return self.is_entry and self.rank > 0

    @property
    def folder(self) -> str:
        """The name of its folders in ``steps`` and ``experts``"""
        return folder_name(self.number, self.mark)

    @property
    def lambda_(self) -> float:
        """1/scale, which is λ_t of OPCM"""
        return inverse(self.scale)

    @property
    def score(self) -> float | None:
        """The score of the command that evaluated it, if there was one."""
        return self.evaluation["score"] if self.evaluation else None

    def __repr__(self) -> str:
        kept = "held" if self.cut else "kept"
        return f"<Expert {self.name!r}: ‖Δ‖ {self.norm:.4g}, {kept} {self.kept:.1%}, added {self.added}>"


@dataclass(frozen=True)
class Removal:
    """An expert that `remove` took out, for `log` and `undo`."""

    expert: Expert
    """Its entry; ``state`` is empty once its files are deleted"""
    place: Count
    """Its position in the history, from 0"""
    time: str
    """When it was removed, in UTC"""
    after: str
    """The last expert that was left: as long as it is the last one, `undo` brings the removed one back"""
    next: Number
    """The number that the next folder would have had, to see whether `calibrate` came later"""
