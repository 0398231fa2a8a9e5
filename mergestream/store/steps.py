"""Steps on disk: ``steps/NNNN`` holds the state after NNNN models.

A step is written into its place and counts only when the manifest says so. Until then its
``plan.json`` says what it is to become and ``journal.jsonl`` which tensors are done, each with the
digests of what was written; a step that was cut short is gone on with after checking them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints import Checkpoint, SafetensorsWriter, TensorSpec, open_checkpoint
from mergestream.digest import combined_digest, tensor_digest
from mergestream.errors import MergestreamError
from mergestream.store.files import read_json, remove, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.step import Outcome

_PLAN, _JOURNAL, _DIGESTS = "plan.json", "journal.jsonl", "digests.json"


def step_directory(store: Path, number: int) -> Path:
    return store / "steps" / f"{number:04d}"


def slot_name(slot: str, name: str) -> str:
    """How the state names a slot of a tensor: ``sum:encoder.layer.0.weight``."""
    return f"{slot}:{name}"


class StepReader:
    """The state after some step; files stay readable while it is open, even if they are pruned."""

    def __init__(self, store: Path, number: int) -> None:
        self._directory = step_directory(store, number)
        self._checkpoint: Checkpoint = open_checkpoint(self._directory)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self._checkpoint.tensors.values())

    def read(self, slot: str, name: str) -> Tensor:
        return self._checkpoint.read(slot_name(slot, name))

    def digests(self) -> dict[str, str]:
        digests: dict[str, str] = read_json(self._directory / _DIGESTS)
        return digests

    def verify(self, recorded: str) -> Iterator[int]:
        """Recompute every digest; yields the bytes done, raises at the first that does not match."""
        digests = self.digests()
        if combined_digest(digests) != recorded or digests.keys() != self._checkpoint.tensors.keys():
            raise MergestreamError(f"{self._directory / _DIGESTS} is damaged: it does not match the manifest")
        for name, info in self._checkpoint.tensors.items():
            if tensor_digest(self._checkpoint.read(name)) != digests[name]:
                raise MergestreamError(
                    f"{self._directory / info.file} is damaged: the digest of {name} does not match; "
                    "go back a step with undo, or restore the store from a backup"
                )
            yield info.nbytes

    def close(self) -> None:
        self._checkpoint.close()


class StepWriter:
    """A step in the making."""

    def __init__(self, store: Path, number: int, layout: Mapping[str, TensorSpec], plan: Mapping[str, Any]) -> None:
        from mergestream.step import Outcome

        self.directory = step_directory(store, number)
        self.done: dict[str, tuple[Outcome, str | None]] = {}
        """Tensors that an earlier, interrupted run has written, with the digest of the expert's."""
        self._lock = Lock()
        plan = json.loads(json.dumps(plan))
        resumable = plan["fingerprint"] is not None and self._is_planned(plan)
        if not resumable:
            remove(self.directory)
            self.directory.mkdir(parents=True)
        self._writer = SafetensorsWriter(self.directory, layout, resume=resumable)
        if self._writer.resumed:
            for entry in _entries(self.directory / _JOURNAL):
                outcome = Outcome(**entry["outcome"])
                slots = [slot_name(slot, entry["tensor"]) for slot in outcome.slots]
                written = {slot: tensor_digest(self._writer.read(slot)) for slot in slots}
                if list(written.values()) == list(outcome.slots.values()):
                    self.done[entry["tensor"]] = outcome, entry["expert"]
                    for slot in slots:
                        self._writer.keep(slot)
        else:
            write_json(self.directory / _PLAN, plan)
        self._journal = (self.directory / _JOURNAL).open("a", encoding="utf-8")

    def _is_planned(self, plan: Mapping[str, Any]) -> bool:
        path = self.directory / _PLAN
        try:
            return path.is_file() and bool(read_json(path) == plan)
        except MergestreamError:
            return False

    def write(self, slot: str, name: str, start: int, piece: Tensor) -> None:
        self._writer.write_piece(slot_name(slot, name), start, piece)

    def record(self, name: str, outcome: Outcome, expert_digest: str | None) -> None:
        """Note a finished tensor, so that it need not be done again."""
        entry = {"tensor": name, "outcome": dataclasses.asdict(outcome), "expert": expert_digest}
        with self._lock:
            self._journal.write(json.dumps(entry) + "\n")
            self._journal.flush()

    def finish(self, outcomes: Mapping[str, Outcome]) -> str:
        """Bring all to the disk; returns the digest of the state."""
        self._journal.close()
        self._writer.close()
        digests = {
            slot_name(slot, name): digest
            for name, outcome in sorted(outcomes.items())
            for slot, digest in outcome.slots.items()
        }
        write_json(self.directory / _DIGESTS, digests)
        return combined_digest(digests)

    def tidy(self) -> None:
        """The step is real now: nothing is left to resume."""
        for name in (_PLAN, _JOURNAL):
            (self.directory / name).unlink(missing_ok=True)

    def pause(self) -> None:
        """Stop here; what is done will be found again."""
        self._journal.close()
        self._writer.abandon()

    def abandon(self) -> None:
        self.pause()
        remove(self.directory)


def _entries(journal: Path) -> Iterator[dict[str, Any]]:
    """The journal's lines; the last one may have been cut short."""
    try:
        lines = journal.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue
