"""The manifest: all that a store is, but for the tensors. Replacing it is what makes a step real."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.base.model import BaseModel
from mergestream.base.skeleton import under_names
from mergestream.checkpoints import Checkpoint, open_checkpoint
from mergestream.digest import text_digest
from mergestream.errors import MergestreamError, nearest
from mergestream.files import read_json, write_json
from mergestream.methods.scale import inverse

if TYPE_CHECKING:
    from mergestream.methods.base import Method

FORMAT = 2
READABLE = (1, FORMAT)
"""Format 1 lacks some facts of the base, which are told from others, and has always measured ‖direction‖."""
NAME = "manifest.json"


@dataclass(frozen=True)
class Expert:
    """One absorbed model, and the scalars of the store after it."""

    name: str
    source: str
    digest: str
    added: str
    """When, in UTC."""
    seconds: float
    norm: float
    """‖Δ_t‖, before any projection"""
    kept: float
    """The share of ‖Δ_t‖² that entered the state"""
    scale: float
    """1/λ_t: merged = θ⁰ + scale · direction"""
    mean_norm: float
    """n_t"""
    direction_norm: float | None
    """None where the method's scale does not need it and nobody asked for it"""
    distance: float | None
    """‖merged − θ⁰‖ by the method's own scale, where it is known"""
    lost: float
    """The share of the state's energy that was cut off to bound its rank"""
    rank: int
    """The largest rank that a tensor in factors may have now; 0 where all are dense"""
    state: str
    """Digest of the state after this step"""
    record: str
    """Digest of ``experts/NNNN/tensors.json``"""
    fates: Mapping[str, int]
    """How many tensors were merged, copied, kept as a head, tied, unchanged, ignored"""
    options: Mapping[str, Any]
    gates: Sequence[Mapping[str, Any]] = ()
    """The gates that it passed, each with the value that was found"""
    evaluation: Mapping[str, Any] | None = None
    """The command that evaluated it before it was absorbed, and the score"""

    @property
    def lambda_(self) -> float:
        return inverse(self.scale)


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` holds; ``step`` is how many models have been absorbed."""

    method: str
    parameters: Mapping[str, Any]
    base: BaseModel
    keep: int
    max_rank: int | None = None
    """The largest rank of what is kept in factors"""
    history: tuple[Expert, ...] = ()

    @property
    def step(self) -> int:
        return len(self.history)

    def make_method(self) -> Method:
        from mergestream.methods import make_method

        return make_method(self.method, self.parameters)

    def open_base(self) -> Checkpoint:
        """The base's files, checked by their headers."""
        try:
            checkpoint = open_checkpoint(self.base.source)
        except MergestreamError as error:
            needed = "if it has moved, pass" if self.base.measured else "its weights are needed now: pass"
            raise MergestreamError(f"the base cannot be opened: {error}; {needed} --base PATH") from error
        checkpoint = under_names(checkpoint, self.base.tensors)
        self.base.check(checkpoint)
        return checkpoint

    def number(self, name: str) -> int:
        """The step of the expert of that name."""
        for number, entry in enumerate(self.history, 1):
            if entry.name == name:
                return number
        known = [entry.name for entry in self.history]
        raise MergestreamError(
            f"no expert named {name} has been absorbed{nearest(name, known)} "
            f"(there are: {', '.join(known) or 'none yet'})"
        )

    def with_expert(self, expert: Expert) -> Manifest:
        return dataclasses.replace(self, history=(*self.history, expert))

    def at(self, step: int) -> Manifest:
        """As it was after a step."""
        return dataclasses.replace(self, history=self.history[:step])

    def save(self, store: Path) -> None:
        data = {
            "format": FORMAT,
            "step": self.step,
            "method": {"name": self.method, "parameters": dict(self.parameters)},
            "keep": self.keep,
            "max_rank": self.max_rank,
            "base": self.base.to_json(),
            "history": [dataclasses.asdict(expert) for expert in self.history],
        }
        write_json(store / NAME, {**data, "digest": text_digest(_canonical(data))})

    @classmethod
    def load(cls, store: Path) -> Manifest:
        path = store / NAME
        if not path.is_file():
            raise MergestreamError(
                f"{store} is not a mergestream store; make one with: mergestream init {store} --base MODEL"
            )
        data = read_json(path)
        if not isinstance(data.get("format"), int):
            raise MergestreamError(f"{path} is not the manifest of a mergestream store")
        if data["format"] not in READABLE:
            raise MergestreamError(
                f"{path} has format {data['format']}, this version of mergestream reads up to {FORMAT}; "
                "upgrade mergestream"
            )
        digest = data.pop("digest", None)
        if digest != text_digest(_canonical(data)):
            raise MergestreamError(
                f"{path} is damaged or was edited: its digest does not match; restore it from a backup"
            )
        return cls(
            method=data["method"]["name"],
            parameters=data["method"]["parameters"],
            base=BaseModel.from_json(data["base"]),
            keep=data["keep"],
            max_rank=data["max_rank"],
            history=tuple(Expert(**entry) for entry in data["history"]),
        )


def _canonical(data: Mapping[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
