"""Steps on disk: ``steps/NNNN`` holds the state after the expert of that number, or in a ledger its entry.

A step is written into its place and counts only when the manifest says so. Until then its
``plan.json`` says what it is to become and ``journal`` which tensors are done, each with the
digests of what was written; a step that was cut short is resumed after checking them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints import SafetensorsWriter, TensorSpec
from mergestream.digest import combined_digest, json_digest, tensor_digest, text_digest
from mergestream.errors import MergestreamError
from mergestream.files import cannot_write, read_json, remove, sync_directory, write_json
from mergestream.schema import BACKUP, conform, damaged, parse, read_text
from mergestream.store.checked import CheckedTensors
from mergestream.store.factors import (
    INDEX,
    FactorReader,
    FactorWriter,
    core_name,
    file_prefix,
    padded_to,
    used_steps,
)

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank
    from mergestream.engine import Engine
    from mergestream.merging.step import Outcome
    from mergestream.store.manifest import Expert

_PLAN, _JOURNAL, DIGESTS = "plan.json", "journal", "digests.json"
UNFINISHED = _PLAN, _JOURNAL
"""What a step is resumed with"""
_UNDO = f"go back to before it with undo, or {BACKUP}"
_ADD_AGAIN = f"remove the expert and add it once more, or {BACKUP}"
"""What helps where a state is damaged, and where an entry of a ledger is"""


def step_directory(store: Path, number: int) -> Path:
    return store / "steps" / f"{number:04d}"


def step_bytes(store: Path, number: int) -> int:
    """What a step takes on disk."""
    sizes = 0
    with suppress(FileNotFoundError):  # a writer has removed it just now
        for path in step_directory(store, number).iterdir():
            sizes += path.stat().st_size
    return sizes


def slot_name(slot: str, name: str) -> str:
    """How the state names a slot of a tensor: ``sum:encoder.layer.0.weight``."""
    return f"{slot}:{name}"


def is_begun(store: Path, number: int) -> bool:
    """Whether a step is in the making, and can be resumed."""
    return (step_directory(store, number) / _PLAN).is_file()


def tidy(store: Path, number: int) -> None:
    """Remove what a step is resumed with: it is real now."""
    for path in (step_directory(store, number) / name for name in UNFINISHED):
        if path.exists():
            path.unlink()


class StepReader:
    """What a step has written, checked as it is read; files stay readable while it is open, even if removed."""

    def __init__(self, store: Path, expert: Expert) -> None:
        """``expert`` is whose state or entry it is, by the manifest."""
        self.directory, remedy = step_directory(store, expert.number), _ADD_AGAIN if expert.cut else _UNDO
        path = self.directory / DIGESTS
        self.digests = conform(parse(read_text(path), path), dict[str, str], path)
        if combined_digest(self.digests) != expert.state:
            raise damaged(path, "it does not match the manifest", remedy)
        self.factors = FactorReader(self.directory, expert.number, self.digests, remedy)
        dense = self.digests.keys() - {INDEX} - self.factors.names
        self._dense: CheckedTensors | None = None
        try:
            if dense:
                self._dense = CheckedTensors(self.directory, {name: self.digests[name] for name in dense}, remedy)
            self.factors.check(self._dense)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return sum(files.nbytes for files in self._files())

    def read(self, slot: str, name: str) -> Tensor | LowRank:
        key = slot_name(slot, name)
        if key in self.factors.index:
            return self.factors.read(key, name, self._dense)
        assert self._dense is not None
        return self._dense.read(key)

    def entry(self, name: str, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """All slots of a tensor in a ledger's entry, or only these."""
        wanted = [slot for slot in self._slots.get(name, ()) if only is None or slot in only]
        return {slot: self._dense.read(slot_name(slot, name)) for slot in wanted} if self._dense else {}

    @cached_property
    def _slots(self) -> dict[str, list[str]]:
        """Those of every tensor."""
        slots: dict[str, list[str]] = {}
        for key in (*(self._dense.tensors if self._dense else ()), *self.factors.index):
            slot, _, name = key.partition(":")
            slots.setdefault(name, []).append(slot)
        return slots

    def forms(self, name: str) -> dict[str, TensorSpec]:
        """The slots of a tensor, as they are meant to be read."""
        found = {}
        for slot in self._slots.get(name, ()):
            key = slot_name(slot, name)
            if key in self.factors.index:
                found[slot] = TensorSpec(self.factors.index[key]["dtype"], self.factors.index[key]["shape"])
            elif self._dense:
                found[slot] = TensorSpec(self._dense.tensors[key].dtype, self._dense.tensors[key].shape)
        return found

    def ranks(self, slots: Collection[str], name: str) -> list[tuple[int, int]] | None:
        """The ranks of the left and the right basis of each of these slots; None where they are dense."""
        keys = [slot_name(slot, name) for slot in slots]
        if not all(key in self.factors.index for key in keys):
            return None
        return [self.factors.ranks(key) for key in keys]

    def _files(self) -> list[CheckedTensors]:
        return [*((self._dense,) if self._dense else ()), *self.factors.files.values()]

    def verify(self, engine: Engine) -> Iterator[int]:
        """Read all that is there; yields the bytes done, raises at the first digest that does not match."""
        for files in self._files():
            yield from files.verify(engine)

    def close(self) -> None:
        for files in self._files():
            files.close()


class StepWriter:
    """A step in the making."""

    def __init__(
        self,
        store: Path,
        number: int,
        layout: Mapping[str, TensorSpec],
        blocks: Mapping[str, TensorSpec],
        before: StepReader | None,
        plan: Mapping[str, Any],
    ) -> None:
        """``layout`` has the dense slots and the cores, ``blocks`` what the bases of factored slots may gain.

        ``before`` is the state before it, with the directory that its files are in.
        """
        self.directory, self._before = step_directory(store, number), before
        self._layout, self._number = layout, number
        self.done: dict[str, tuple[Outcome, str | None]] = {}
        """Tensors that an earlier, interrupted run has written, with the digest of the expert's."""
        self._open = ExitStack()
        """Lets go of the files as they are"""
        try:
            self._begin(blocks, json.loads(json.dumps(plan)))
        except (MergestreamError, OSError):  # what takes room on a disk that is full must not stay
            self.abandon()
            raise

    def _begin(self, blocks: Mapping[str, TensorSpec], plan: Mapping[str, Any]) -> None:
        from mergestream.merging.step import Outcome

        resumable = False
        if plan["fingerprint"] is not None:
            with suppress(MergestreamError):  # there is no plan, or none that can be read
                resumable = read_json(self.directory / _PLAN) == plan
        if not resumable:
            remove(self.directory)
            self.directory.mkdir(parents=True)
        self._writer = SafetensorsWriter(self.directory, self._layout, resume=resumable) if self._layout else None
        if self._writer:
            self._open.callback(self._writer.abandon)
        factors = self._before.factors if self._before else None
        resumed = self._writer.resumed if self._writer else resumable
        self._factors = FactorWriter(self.directory, self._number, blocks, factors, resumed)
        if self._factors.writer:
            self._open.callback(self._factors.writer.abandon)
        if resumed and self._factors.resumed:
            for entry in _entries(self.directory / _JOURNAL):
                outcome = Outcome(**entry["outcome"])
                if self._keep(stored_digests(entry["tensor"], outcome)):
                    self.done[entry["tensor"]] = outcome, entry["expert"]
        else:
            write_json(self.directory / _PLAN, plan)
        self._journal = self._open.enter_context((self.directory / _JOURNAL).open("ab", buffering=0))

    def _keep(self, digests: Mapping[str, str]) -> bool:
        """Keep what was written before, if it is still what was meant."""
        written = []
        for key, digest in digests.items():
            owner, name = (self._writer, key) if key in self._layout else (self._factors.writer, key.partition("/")[2])
            if owner is None or tensor_digest(owner.read(name)) != digest:
                return False
            written.append((owner, name))
        for owner, name in written:
            owner.keep(name)
        return True

    def write(self, slot: str, name: str, start: int, piece: Tensor) -> None:
        assert self._writer is not None
        self._writer.write_piece(slot_name(slot, name), start, piece)

    def write_factors(self, name: str, state: Mapping[str, LowRank]) -> dict[str, Any]:
        """Write all slots of a tensor that is kept in factors."""
        values = {slot_name(slot, name): value for slot, value in state.items()}
        index, digests = self._factors.write(name, values)
        for slot, value in values.items():
            spec = self._layout.get(core_name(slot))
            if spec is not None and self._writer is not None:
                core = padded_to(value.core, spec.shape)
                self._writer.write(core_name(slot), core)
                digests[core_name(slot)] = tensor_digest(core)
        return {"index": index, "digests": digests}

    def record(self, name: str, outcome: Outcome, expert_digest: str | None) -> None:
        """Note a finished tensor, so that it need not be done again."""
        text = json.dumps({"tensor": name, "outcome": dataclasses.asdict(outcome), "expert": expert_digest})
        try:
            self._journal.write(f"\n{text_digest(text)} {text}".encode())
        except OSError as error:
            raise cannot_write(self.directory / _JOURNAL, error) from error

    def __getstate__(self) -> dict[str, Any]:
        """A copy writes tensors; the plan and the journal stay here."""
        return {key: value for key, value in vars(self).items() if key not in ("done", "_open", "_journal")}

    def finish(self, outcomes: Mapping[str, Outcome]) -> str:
        """Bring all to the disk; returns the digest of the state."""
        self._journal.close()
        if self._writer:
            self._writer.close()
        digests: dict[str, str] = {}
        index: dict[str, Any] = {}
        for name, outcome in sorted(outcomes.items()):
            digests |= stored_digests(name, outcome)
            index |= outcome.factors["index"] if outcome.factors else {}
        if index:
            used = used_steps(index)
            self._factors.finish(self._before.directory if self._before else self.directory, used)
            own = f"{file_prefix(self._number)}/"
            older = self._before.digests if self._before else {}
            taken_over = tuple(f"{file_prefix(step)}/" for step in used if step != self._number)
            digests = {k: d for k, d in digests.items() if self._number in used or not k.startswith(own)}
            digests |= {k: d for k, d in older.items() if k.startswith(taken_over)}
            write_json(self.directory / INDEX, index)
            digests[INDEX] = json_digest(index)
        write_json(self.directory / DIGESTS, digests)
        sync_directory(self.directory.parent)
        return combined_digest(digests)

    def pause(self) -> None:
        """Stop here; what is done will be found again."""
        self._open.close()

    def abandon(self) -> None:
        self.pause()
        with suppress(OSError):  # why it is abandoned is what counts; the next writer tries again
            remove(self.directory)


def stored_digests(name: str, outcome: Outcome) -> dict[str, str]:
    """The digest of everything that was written for one tensor."""
    dense = {slot_name(slot, name): digest for slot, digest in outcome.slots.items()}
    return dense | (outcome.factors["digests"] if outcome.factors else {})


def _entries(journal: Path) -> Iterator[dict[str, Any]]:
    """The journal's lines, each after its digest: one that was cut short does not count."""
    if not journal.is_file():
        return
    for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
        digest, _, text = line.partition(" ")
        if digest == text_digest(text):
            yield json.loads(text)
