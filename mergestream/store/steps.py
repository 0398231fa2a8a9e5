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

from mergestream.checkpoints import TensorSpec
from mergestream.digest import combined_digest, json_digest, tensor_digest
from mergestream.errors import MergestreamError
from mergestream.schema import BACKUP, damaged, parse, read_text, validate
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
from mergestream.store.mirror import JOURNAL, PLAN, Mirror, Place, located
from mergestream.store.site import site_of

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank
    from mergestream.engine import Engine
    from mergestream.merging.step import Outcome
    from mergestream.store.manifest import Expert

DIGESTS = "digests.json"
UNFINISHED = PLAN, JOURNAL
"""What a step is resumed with"""
_UNDO = f"go back to before it with undo, or {BACKUP}"
_ADD_AGAIN = f"remove the expert and add it once more, or {BACKUP}"
"""What helps where a state is damaged, and where an entry of a ledger is"""


def step_bytes(store: Place, folder: str) -> int:
    """What a step takes on disk, or in its bucket."""
    if isinstance(store, Mirror):
        return sum(found.size for found in store.objects(f"steps/{folder}").values())
    sizes = 0
    with suppress(FileNotFoundError):  # a writer has removed it just now
        for path in (store / "steps" / folder).iterdir():
            sizes += path.stat().st_size
    return sizes


def slot_name(slot: str, name: str) -> str:
    """How the state names a slot of a tensor: ``sum:encoder.layer.0.weight``."""
    return f"{slot}:{name}"


def is_begun(store: Path, folder: str) -> bool:
    """Whether a step is in the making, and can be resumed."""
    return (store / "steps" / folder / PLAN).is_file()


def tidy(store: Path, folder: str) -> None:
    """Remove what a step is resumed with: it is real now."""
    for path in (store / "steps" / folder / name for name in UNFINISHED):
        if path.exists():
            path.unlink()


class StepReader:
    """What a step has written, checked as it is read; files stay readable while it is open, even if removed."""

    def __init__(self, store: Place, expert: Expert) -> None:
        """``expert`` is whose state or entry it is, by the manifest."""
        files, remedy = located(store, f"steps/{expert.folder}"), _ADD_AGAIN if expert.cut else _UNDO
        self.folder, self.directory = expert.folder, files.path
        path = self.directory / DIGESTS
        self.digests = validate(parse(read_text(path), path), dict[str, str], path)
        if combined_digest(self.digests) != expert.state:
            raise damaged(path, "it does not match the manifest", remedy)
        self.factors = FactorReader(files, expert.number, self.digests, remedy)
        dense = self.digests.keys() - {INDEX} - self.factors.names
        self._dense: CheckedTensors | None = None
        try:
            if dense:
                self._dense = CheckedTensors(files, {name: self.digests[name] for name in dense}, remedy)
            self.factors.check(self._dense)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return sum(files.nbytes for files in self._files())

    @property
    def copies(self) -> int:
        """How often a tensor is in memory while it is read."""
        return self._dense.copies if self._dense else 0

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
        store: Place,
        folder: str,
        number: int,
        layout: Mapping[str, TensorSpec],
        blocks: Mapping[str, TensorSpec],
        before: StepReader | None,
        plan: Mapping[str, Any],
    ) -> None:
        """``layout`` has the dense slots and the cores, ``blocks`` what the bases of factored slots may gain.

        ``before`` is the state before it, with the folder that its files are in.
        """
        self._site, self._before = site_of(store, folder), before
        self._layout, self._number = layout, number
        self.done: dict[str, tuple[Outcome, str | None]] = {}
        """Tensors that an earlier, interrupted run has written, with the digest of the expert's."""
        self._open = ExitStack()
        """Lets go of the files as they are"""
        self._open.callback(self._site.close)
        try:
            self._begin(blocks, json.loads(json.dumps(plan)))
        except (MergestreamError, OSError):  # what takes room on a disk that is full must not stay
            self.abandon()
            raise

    def _begin(self, blocks: Mapping[str, TensorSpec], plan: Mapping[str, Any]) -> None:
        from mergestream.merging.step import Outcome

        resumable = self._site.begin(plan, resumable=plan["fingerprint"] is not None)
        self._writer = self._site.writer(self._layout, "model", resumable) if self._layout else None
        if self._writer:
            self._open.callback(self._writer.abandon)
        factors = self._before.factors if self._before else None
        resumed = self._writer.resumed if self._writer else resumable
        self._factors = FactorWriter(self._site, self._number, blocks, factors, resumed)
        if self._factors.writer:
            self._open.callback(self._factors.writer.abandon)
        if resumed and self._factors.resumed:
            for entry in self._site.entries():
                outcome = Outcome(**entry["outcome"])
                if self._keep(stored_digests(entry["tensor"], outcome)):
                    self.done[entry["tensor"]] = outcome, entry["expert"]

    def _keep(self, digests: Mapping[str, str]) -> bool:
        """Keep what was written before, if it is still what was meant."""
        written = []
        for key, digest in digests.items():
            owner, name = (self._writer, key) if key in self._layout else (self._factors.writer, key.partition("/")[2])
            if owner is None or not owner.holds(name, digest):
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
        entry = {"tensor": name, "outcome": dataclasses.asdict(outcome), "expert": expert_digest}
        self._site.record(entry, sum(writer.written for writer in (self._writer, self._factors.writer) if writer))

    def __getstate__(self) -> dict[str, Any]:
        """A copy writes tensors; the plan and the journal stay here."""
        return {key: value for key, value in vars(self).items() if key not in ("done", "_open", "_site")}

    def finish(self, outcomes: Mapping[str, Outcome]) -> str:
        """Bring all to the disk; returns the digest of the state."""
        self._site.close()
        if self._writer:
            self._writer.close()
        digests: dict[str, str] = {}
        index: dict[str, Any] = {}
        for name, outcome in sorted(outcomes.items()):
            digests |= stored_digests(name, outcome)
            index |= outcome.factors["index"] if outcome.factors else {}
        if index:
            used = used_steps(index)
            self._factors.finish(used)
            for step in used:
                if step != self._number and self._before:
                    self._site.take_over(self._before.folder, file_prefix(step))
            own = f"{file_prefix(self._number)}/"
            older = self._before.digests if self._before else {}
            taken_over = tuple(f"{file_prefix(step)}/" for step in used if step != self._number)
            digests = {k: d for k, d in digests.items() if self._number in used or not k.startswith(own)}
            digests |= {k: d for k, d in older.items() if k.startswith(taken_over)}
            self._site.save(INDEX, index)
            digests[INDEX] = json_digest(index)
        self._site.save(DIGESTS, digests)
        self._site.finish()
        return combined_digest(digests)

    def pause(self) -> None:
        """Stop here; what is done will be found again."""
        self._open.close()

    def abandon(self) -> None:
        self.pause()
        self._site.remove()


def stored_digests(name: str, outcome: Outcome) -> dict[str, str]:
    """The digest of everything that was written for one tensor."""
    dense = {slot_name(slot, name): digest for slot, digest in outcome.slots.items()}
    return dense | (outcome.factors["digests"] if outcome.factors else {})
