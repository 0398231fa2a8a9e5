"""Reading and writing steps: ``steps/NNNN`` holds the state after expert NNNN, or its entry in a ledger.

A step counts once the manifest names it. Until then ``plan.json`` says what it will become and which commit its writer
has read, and ``journal`` lists the finished tensors with the digests of what was written. On a disk a step is written
in place, and an interrupted one is continued after these are checked. For a bucket it is written to a temporary
directory and uploaded when it is complete; an interrupted one is begun again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints import SafetensorsWriter, TensorSpec, dtype_name
from mergestream.digest import combined_digest, json_digest, tensor_digest, text_digest
from mergestream.errors import MergestreamError
from mergestream.files import to_json, write_error, write_json
from mergestream.schema import BACKUP, damaged, validate
from mergestream.storage import Storage, read_json
from mergestream.store.factors import (
    INDEX,
    SIDES,
    STEM,
    FactorReader,
    block_name,
    core_name,
    describe_slots,
    file_prefix,
    padded_to,
    read_index,
    used_steps,
)
from mergestream.store.tensors import CheckedTensors

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank
    from mergestream.engine import Engine
    from mergestream.merging.step import Outcome, Step
    from mergestream.methods.base import State
    from mergestream.store.expert import Expert

DIGESTS = "digests.json"
PLAN, JOURNAL = "plan.json", "journal"
_UNDO = f"go back to before it with undo, or {BACKUP}"
_ADD_AGAIN = f"remove the expert and add it once more, or {BACKUP}"
_SHARED = f"steps share it, so that undo does not help: {BACKUP}, or add all experts to a new one"
"""Remedies for a damaged state, for a damaged entry of a ledger, and for blocks of an earlier step"""


class StepReader:
    """Reads a step and checks its digests. Open files stay readable, even if a writer removes the step."""

    def __init__(self, storage: Storage, expert: Expert) -> None:
        """``expert`` is the manifest's entry of the step."""
        folder, remedy = f"steps/{expert.folder}", _ADD_AGAIN if expert.cut else _UNDO
        self.folder, self.where, self.is_entry = expert.folder, f"{storage}/{folder}", expert.is_entry
        name = f"{folder}/{DIGESTS}"
        self.digests = validate(read_json(storage, name), dict[str, str], f"{storage}/{name}")
        if combined_digest(self.digests) != expert.state:
            raise damaged(f"{storage}/{name}", "it does not match the manifest", remedy)
        index = read_index(storage, folder, self.digests)
        by_file: dict[str, dict[str, str]] = {STEM: {}, **{file_prefix(step): {} for step in used_steps(index)}}
        for key, digest in self.digests.items():
            file, _, block = key.partition("/")
            if file in by_file:
                by_file[file][block] = digest
            elif key != INDEX:
                by_file[STEM][key] = digest
        self._files: dict[str, CheckedTensors] = {}
        try:
            for file, digests in by_file.items():
                helps = remedy if file in (STEM, file_prefix(expert.number)) else _SHARED
                self._files[file] = CheckedTensors(storage, folder, file, digests, helps)
            self._dense, self.factors = self._files[STEM], FactorReader(index, self._files, self.where)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(file.nbytes for file in self._files.values())

    def memory(self, name: str) -> int:
        """Bytes that reading the slots of a tensor takes; 0 where they are views of a file."""
        if not self._dense.copies:
            return 0
        keys, dense = [slot_name(slot, name) for slot in self.forms.get(name, {})], self._dense.tensors
        return self._dense.copies * sum(dense[key].nbytes for key in keys if key in dense)

    def read(self, name: str, only: Collection[str] | None = None, *, thorough: bool = False) -> State:
        """The slots of a tensor, all or ``only`` these: dense, or in factors; none where an expert has not changed it.

        Those of a ledger are checked to be what an entry must be, with ``thorough`` also whether they are orthogonal.
        """
        keys = {slot_name(slot, name): slot for slot in self.forms.get(name, {}) if only is None or slot in only}
        if keys and keys.keys() <= self.factors.index.keys():
            return {slot: self.factors.read(key, name) for key, slot in keys.items()}
        slots = {keys[key]: value for key, value in self._dense.read_all(keys).items()}
        if self.is_entry:
            from mergestream.ledger.soundness import find_fault

            if fault := find_fault(slots, thorough=thorough):
                file = self._dense.tensors[next(iter(keys))].file
                raise damaged(f"{self.where}/{file}", f"the entry of {name} cannot be right: {fault}", _ADD_AGAIN)
        return {**slots}

    @cached_property
    def forms(self) -> dict[str, dict[str, TensorSpec]]:
        """The dtype and shape of every slot, by tensor."""
        specs = {key: TensorSpec(info.dtype, info.shape) for key, info in self._dense.tensors.items()}
        specs |= {key: TensorSpec(entry["dtype"], entry["shape"]) for key, entry in self.factors.index.items()}
        forms: dict[str, dict[str, TensorSpec]] = {}
        for key, spec in specs.items():
            slot, _, name = key.partition(":")
            forms.setdefault(name, {})[slot] = spec
        return forms

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the slots of a tensor."""
        return {slot: form.shape for slot, form in self.forms.get(name, {}).items()}

    def ranks(self, name: str) -> list[tuple[int, int]] | None:
        """The ranks of the left and the right basis of each slot; None if they are dense."""
        keys = [slot_name(slot, name) for slot in self.forms.get(name, {})]
        if not keys or not self.factors.index.keys() >= set(keys):
            return None
        return [self.factors.ranks(key) for key in keys]

    def verify(self, engine: Engine) -> Iterator[int]:
        """Read all tensors; yields the bytes of each, and raises at the first digest that does not match.

        The directions of an entry in a ledger must be orthonormal, too.
        """
        if self.is_entry:
            sizes = {name: sum(form.nbytes for form in slots.values()) for name, slots in self.forms.items()}
            yield from (sizes[name] for name, _ in engine.run(sizes, self._verify_entry))
            return
        for file in self._files.values():
            yield from file.verify(engine)

    def _verify_entry(self, name: str) -> None:
        self.read(name, thorough=True)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class StepWriter:
    """Writes a step; it counts once the manifest names it."""

    def __init__(self, storage: Storage, folder: str, plan: Mapping[str, Any], step: Step) -> None:
        self._files, self._number = StepStorage(storage, folder), int(folder.partition("-")[0])
        self._before = step.state if isinstance(step.state, StepReader) else None
        self._layouts = lay_out(step, self._number)
        self._writers: dict[str, SafetensorsWriter] = {}
        """By the beginning of the names of their files, as the layouts"""
        self.done: dict[str, tuple[Outcome, str | None]] = {}
        """Tensors that an interrupted run has written, with the digest of the expert's tensor"""
        self._open = ExitStack()
        """Closes the files as they are"""
        self._open.callback(self._files.close)
        try:
            self._begin(json.loads(json.dumps(plan)))
        except (MergestreamError, OSError):  # free the space, the disk may be full
            self.abandon()
            raise

    def _begin(self, plan: Mapping[str, Any]) -> None:
        from mergestream.merging.step import Outcome

        resumed = self._files.begin(plan, resumable=plan["fingerprint"] is not None)
        for stem, layout in self._layouts.items():
            self._writers[stem] = writer = self._files.open_writer(layout, stem, resume=resumed)
            self._open.callback(writer.abandon)
            resumed = writer.resumed
        for entry in self._files.read_journal() if resumed else ():
            outcome = Outcome(**entry["outcome"])
            written = [(*self._place(key), digest) for key, digest in stored_digests(entry["tensor"], outcome).items()]
            if all(self._writers[stem].keep(name, digest) for stem, name, digest in written):
                self.done[entry["tensor"]] = outcome, entry["expert"]

    def _place(self, key: str) -> tuple[str, str]:
        """The file that holds a tensor, and its name in the file, by its key in ``digests.json``."""
        stem, _, name = key.partition("/")
        return (stem, name) if stem in self._layouts else (STEM, key)

    def write(self, name: str, start: int, slots: Mapping[str, Tensor]) -> None:
        """Write consecutive elements of the dense slots of a tensor."""
        for slot, piece in slots.items():
            self._writers[STEM].write_piece(slot_name(slot, name), start, piece)

    def write_factors(self, name: str, state: Mapping[str, LowRank]) -> dict[str, Any]:
        """Write all slots of a factored tensor; returns their index entries and digests."""
        values, own = {slot_name(slot, name): value for slot, value in state.items()}, file_prefix(self._number)
        index, blocks = describe_slots(name, values, self._number, self._before.factors if self._before else None)
        cores = {(STEM, core_name(slot)): value.core for slot, value in values.items()}
        digests: dict[str, str] = {}
        for (stem, key), part in {**{(own, block): rows for block, rows in blocks.items()}, **cores}.items():
            spec = self._layouts.get(stem, {}).get(key)
            if spec is None:
                assert not part.numel(), f"{key} has no place in {stem}"
                continue
            padded = padded_to(part, spec.shape)
            self._writers[stem].write(key, padded)
            digests[key if stem == STEM else f"{stem}/{key}"] = tensor_digest(padded)
        return {"index": index, "digests": digests}

    def record(self, name: str, outcome: Outcome, expert_digest: str | None) -> None:
        """Write a finished tensor to the journal, so that a resumed run skips it."""
        self._files.record({"tensor": name, "outcome": dataclasses.asdict(outcome), "expert": expert_digest})

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process writes tensors; the plan and the journal stay here."""
        return {key: value for key, value in vars(self).items() if key not in ("done", "_open", "_files")}

    def finish(self, outcomes: Mapping[str, Outcome]) -> str:
        """Make all files durable; returns the digest of the state."""
        for writer in self._writers.values():
            writer.close()
        digests: dict[str, str] = {}
        index: dict[str, Any] = {}
        for name, outcome in sorted(outcomes.items()):
            digests |= stored_digests(name, outcome)
            index |= outcome.factors["index"] if outcome.factors else {}
        if index:
            used, own = used_steps(index), file_prefix(self._number)
            if self._number not in used:  # all its blocks are zero
                self._files.drop(own)
                digests = {key: digest for key, digest in digests.items() if not key.startswith(f"{own}/")}
            for step in used:
                if step != self._number and self._before:
                    taken = file_prefix(step)
                    self._files.take_over(self._before.folder, taken)
                    older = self._before.digests.items()
                    digests |= {key: digest for key, digest in older if key.startswith(f"{taken}/")}
            self._files.save(INDEX, index)
            digests[INDEX] = json_digest(index)
        self._files.save(DIGESTS, digests)
        self._files.finish()
        return combined_digest(digests)

    def pause(self) -> None:
        """Close all files; the step can be resumed."""
        self._open.close()

    def abandon(self) -> None:
        """Close and delete all files."""
        self.pause()
        self._files.remove()


def lay_out(step: Step, number: int) -> dict[str, dict[str, TensorSpec]]:
    """The tensors that a step writes, by file: dense slots and cores, and the blocks that it may add to the bases.

    Cores are in float64: rounding them at every step would mix nearly equal singular values.
    """
    layout: dict[str, TensorSpec] = {}
    blocks: dict[str, TensorSpec] = {}
    for name, plan in step.plans.items():
        for slot, form in plan.layout.items():
            if plan.bounds is None:
                layout[slot_name(slot, name)] = TensorSpec(dtype_name(form.dtype), form.shape)
            elif all(plan.bounds.core):
                layout[core_name(slot_name(slot, name))] = TensorSpec("F64", plan.bounds.core)
        if plan.bounds:
            dtype = step.vector.model.tensors[name].state_dtype
            for side, rows, length in zip(SIDES, plan.bounds.new, plan.bounds.shape, strict=True):
                if rows:
                    blocks[block_name(side, name)] = TensorSpec(dtype, (rows, length))
    return {stem: found for stem, found in {STEM: layout, file_prefix(number): blocks}.items() if found}


def slot_name(slot: str, name: str) -> str:
    """The name of a tensor's slot in the state: ``sum:encoder.layer.0.weight``."""
    return f"{slot}:{name}"


def stored_digests(name: str, outcome: Outcome) -> dict[str, str]:
    """The digest of everything that was written for one tensor."""
    dense = {slot_name(slot, name): digest for slot, digest in outcome.slots.items()}
    return dense | (outcome.factors["digests"] if outcome.factors else {})


class StepStorage:
    """The folder of one step while it is being written."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._name, self._folder = storage, folder, f"steps/{folder}"
        self._temporary = ExitStack()
        self._draft = storage.path(self._folder) or self._temporary.enter_context(storage.workspace())

    def begin(self, plan: Mapping[str, Any], *, resumable: bool) -> bool:
        """Write the plan; returns whether an interrupted run with the same plan is continued."""
        if resumable and self._storage.has_lock and read_plan(self._storage, self._name) == plan:
            return True
        self._storage.remove(self._folder)
        self._storage.put_if(f"{self._folder}/{PLAN}", to_json(plan).encode(), None)
        return False

    def open_writer(
        self, layout: Mapping[str, TensorSpec], stem: str = "model", *, resume: bool = False
    ) -> SafetensorsWriter:
        """A writer of tensors to the file ``stem``, or to shards of it."""
        return SafetensorsWriter(self._draft, layout, prefix=stem, resume=resume)

    def read_journal(self) -> Iterator[dict[str, Any]]:
        """The complete lines of the journal, each of which follows its digest."""
        with suppress(FileNotFoundError):
            for line in (self._draft / JOURNAL).read_text(encoding="utf-8", errors="replace").splitlines():
                digest, _, text = line.partition(" ")
                if digest == text_digest(text):
                    yield json.loads(text)

    def record(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the journal, if the step can be resumed."""
        if not self._storage.has_lock:
            return
        text, path = json.dumps(entry), self._draft / JOURNAL
        try:
            with path.open("ab", buffering=0) as file:
                file.write(f"\n{text_digest(text)} {text}".encode())
        except OSError as error:
            raise write_error(path, error) from error

    def save(self, name: str, data: Any) -> None:
        """Write a JSON file."""
        write_json(self._draft / name, data)

    def take_over(self, previous: str, stem: str) -> None:
        """Link or copy the safetensors file ``stem`` of another step, or its shards."""
        for name in _files_of(stem, self._storage.files(f"steps/{previous}")):
            self._storage.copy(f"steps/{previous}/{name}", f"{self._folder}/{name}")

    def drop(self, stem: str) -> None:
        """Delete the safetensors file ``stem``, or its shards."""
        for name in _files_of(stem, [path.name for path in self._draft.iterdir()]):
            (self._draft / name).unlink()

    def finish(self) -> None:
        """Make the folder durable, or upload it."""
        self._storage.publish(self._draft, self._folder)
        self._temporary.close()

    def close(self) -> None:
        """Remove temporary files; on a disk the step can be resumed."""
        self._temporary.close()

    def remove(self) -> None:
        """Delete the folder. A failure is ignored: the next writer cleans up."""
        self.close()
        with suppress(OSError, MergestreamError):
            self._storage.remove(self._folder)


def read_plan(storage: Storage, folder: str) -> dict[str, Any] | None:
    """The plan of a step that is being written; None if there is none, or none that can be read."""
    try:
        found = json.loads(storage.read(f"steps/{folder}/{PLAN}") or b"null")
    except (MergestreamError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _files_of(stem: str, names: Collection[str]) -> list[str]:
    return [name for name in names if name.startswith((f"{stem}-", f"{stem}."))]
