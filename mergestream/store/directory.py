"""The durable directory: absorb models one by one, go back a step, verify; each step is a transaction."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.base.model import BaseModel
from mergestream.base.skeleton import open_base as open_base_model
from mergestream.base.skeleton import under_names
from mergestream.checkpoints import WEIGHT_SUFFIXES, Checkpoint, open_checkpoint
from mergestream.checkpoints.location import without_revision
from mergestream.engine import Engine, LocalEngine
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts.opening import ExpertSource
from mergestream.files import BESIDE, remove, remove_all_but
from mergestream.progress import Progress
from mergestream.store.lock import writer_lock
from mergestream.store.manifest import Expert, Manifest
from mergestream.store.records import record_directory, verify_record
from mergestream.store.snapshot import Snapshot
from mergestream.store.steps import StepReader, StepWriter, step_directory, tidy

if TYPE_CHECKING:
    from typing_extensions import Self

    from mergestream.methods.base import Method
    from mergestream.store.arrival import Arrival, Review
    from mergestream.store.inspection import Inspection


class StoreDirectory:
    """A directory that keeps the merged state of all models absorbed so far."""

    def __init__(self, path: str | Path, *, engine: Engine | None = None, progress: Progress | None = None) -> None:
        self.path = Path(path)
        self.manifest = Manifest.load(self.path)
        self.engine: Engine = engine or LocalEngine()
        self.progress = progress or Progress()

    @classmethod
    def create(
        cls,
        path: str | Path,
        base: ExpertSource,
        method: Method | None = None,
        *,
        linear: Sequence[str] = (),
        not_linear: Sequence[str] = (),
        heads: Sequence[str] = (),
        keep: int = 1,
        max_rank: int | None = None,
        config_only: bool = False,
        engine: Engine | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Make an empty store for a base model.

        ``linear``, ``not_linear`` and ``heads`` are globs over tensor names: which weights are (not)
        to be projected, and which tensors stay with each expert. ``keep`` is how many earlier steps
        are kept for ``undo``. ``max_rank`` bounds the rank of what is kept in factors (adapters only);
        without it nothing is cut off. With ``config_only`` the base's weights are neither fetched nor read
        before a full export or a full checkpoint needs them; so it is for a base that has no weights.
        """
        from mergestream.ledger.method import Ledger

        path, method = Path(path), method or Ledger()
        if isinstance(base, Mapping):
            raise UsageError("a store refers to its base by path or hub id: save the base first, or use a Merger")
        if path.exists() and not (path.is_dir() and all(entry.name.endswith(BESIDE) for entry in path.iterdir())):
            raise MergestreamError(f"{path} exists already and is not empty; choose another place for the store")
        if keep < 0:
            raise UsageError(f"keep={keep} must be at least 0")
        if max_rank is not None and max_rank < 1:
            raise UsageError(f"max_rank={max_rank} must be at least 1")
        if max_rank is not None and method.remembers_experts:
            raise UsageError(f"the size of a {method.name} is bounded by its budget: --set budget=…, not by a rank")
        with open_base_model(base, config_only=config_only) as checkpoint:
            model = BaseModel.examine(
                checkpoint,
                linear=linear,
                not_linear=not_linear,
                heads=heads,
                measure=checkpoint.has_weights and not config_only,
                engine=engine,
                progress=progress,
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MergestreamError(f"{path} cannot be made: {error.strerror}") from error
        Manifest(method.name, method.parameters, model, keep, max_rank).save(path)
        return cls(path, engine=engine, progress=progress)

    @property
    def history(self) -> tuple[Expert, ...]:
        """The absorbed models, in order."""
        return self.manifest.history

    @cached_property
    def method(self) -> Method:
        return self.manifest.make_method()

    @property
    def sources(self) -> tuple[str, ...]:
        """The store itself and the models that it was made of: no output goes there."""
        return str(self.path), self.manifest.base.source, *(entry.source for entry in self.history)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the store for writing, with the manifest as others have left it."""
        with writer_lock(self.path):
            self.manifest = Manifest.load(self.path)
            yield

    def absorb(
        self,
        expert: ExpertSource,
        name: str | None = None,
        partial: bool = False,
        ignore: Sequence[str] = (),
        allow_duplicate: bool = False,
        *,
        measure_distance: bool = False,
        review: Review | None = None,
    ) -> Expert:
        """`Store.add` without gates: ``review`` is asked when all is written and nothing counts yet, and may refuse.

        With ``measure_distance`` the distance to the base is in the entry, whatever the method.
        """
        from mergestream.store.arrival import Arrival

        started = time.monotonic()
        with self.writing(), Arrival(self, expert, partial, ignore, measure_distance) as arrival:
            name = self._free_name(name, arrival.source)
            with self._in_the_making(arrival) as writer:
                arrival.absorb(writer)
                if not allow_duplicate:
                    arrival.refuse_duplicate()
                candidate = arrival.finish(writer, name, started)
                absorbed = review(candidate) if review else candidate.expert
            arrival.note_oddities()
            self._commit(dataclasses.replace(self.manifest, base=arrival.vector.model).with_expert(absorbed))
            if self.method.remembers_experts:
                self._shorten_entries()
            return absorbed

    @contextmanager
    def _in_the_making(self, arrival: Arrival) -> Iterator[StepWriter]:
        """A step that is being written: removed where it is refused, and left to be resumed where it is cut short."""
        writer = arrival.writer()
        try:
            yield writer
        except MergestreamError:
            writer.abandon()
            remove(record_directory(self.path, arrival.number))
            raise
        except BaseException:
            writer.pause()
            raise

    def _shorten_entries(self) -> None:
        """Write those entries anew that have come to hold twice what is read of them, so that the store does not grow.

        Each is a transaction of its own, after the step, which is done whatever becomes of it: an entry that cannot be
        shortened is longer than it need be.
        """
        from mergestream.store.shortening import shorten

        cut = self.manifest.step
        try:
            for entry in self.history:
                if cut >= 2 * entry.cut:
                    shorter = shorten(self.path, self.manifest, entry, cut)
                    self._commit(self.manifest.replacing(entry, shorter))
        except (MergestreamError, OSError) as error:
            self.progress.note(f"older entries take more room than they need until the next add: {error}")

    def inspect(self, expert: ExpertSource, *, partial: bool = False, ignore: Sequence[str] = ()) -> Inspection:
        """What adding a model would do; changes nothing."""
        from mergestream.merging.merger import MemoryState
        from mergestream.store.arrival import Arrival
        from mergestream.store.collisions import arriving_collisions
        from mergestream.store.inspection import Inspection

        started = time.monotonic()
        with Arrival(self, expert, partial, ignore, measured=True) as arrival:
            if not self.manifest.is_ledger:
                arrival.absorb()
                return Inspection.of(arrival, time.monotonic() - started)
            entry = MemoryState(arrival.step)
            arrival.absorb(memory=entry)
            seconds = time.monotonic() - started
            name = self._free_name(None, arrival.source)
            return Inspection.of(arrival, seconds, arriving_collisions(arrival, name, entry))

    def undo(self) -> Expert:
        """Go back to before the last model; returns the entry that was taken back."""
        with self.writing():
            if not self.history:
                raise MergestreamError(f"{self.path} has absorbed nothing, there is nothing to undo")
            undone, before = self.history[-1], self.manifest.at(self.manifest.step - 1)
            if not self._keeps(before):
                raise MergestreamError(
                    f"{self.path} keeps {self.manifest.keep} earlier step(s), and they are used up; "
                    "a store made with a larger --keep can go back further"
                )
            self._commit(before)
            return undone

    def remove(self, name: str, expert: ExpertSource | None = None) -> Expert:
        """Take any one expert out; returns its entry.

        A ledger drops what it remembers of it. The state of a method that only adds up (average, task_arithmetic) has
        no more of it than the sum, so the ``expert`` itself must be there to be subtracted.
        """
        with self.writing():
            removed = self._known(name)
            rest = self.manifest.without(removed)
            if self._keeps(rest):
                self._commit(rest)
            else:
                self._subtract(removed, expert, rest)
            return removed

    def _known(self, name: str) -> Expert:
        try:
            return self.manifest.expert(name)
        except MergestreamError as error:
            raise UsageError(str(error)) from None

    def _subtract(self, removed: Expert, source: ExpertSource | None, rest: Manifest) -> None:
        """Make a step in which the expert's −Δ is absorbed; it takes the place of the last of those that stay."""
        from mergestream.store.arrival import Arrival

        if not (self.method.additive and self.method.commutative):
            raise UsageError(
                f"{self.method.name} cannot take an expert out of its state; undo goes back step by step, and a store "
                "made with --method ledger can remove any expert"
            )
        if source is None:
            raise UsageError(f"{self.method.name} has only a sum: pass the expert to subtract, with --expert PATH")
        partial, ignore = removed.options["partial"], removed.options["ignore"]
        with Arrival(self, source, partial, ignore, measured=False, withdrawn=True) as arrival:
            with self._in_the_making(arrival) as writer:
                arrival.absorb(writer)
                if arrival.digest != removed.digest:
                    raise MergestreamError(f"{arrival.source} is not the model that was absorbed as {removed.name}")
                last = arrival.finish_withdrawal(writer, rest.history[-1])
            self._commit(dataclasses.replace(rest, history=(*rest.history[:-1], last)))

    def verify(self) -> None:
        """Recompute every digest: the base's, the kept steps' and the heads'; raises at the first fault."""
        while True:
            manifest = self.manifest
            try:
                return self._verify()
            except (MergestreamError, OSError):
                self.manifest = Manifest.load(self.path)
                if self.manifest == manifest:  # else a writer has removed what was being verified
                    raise

    def _verify(self) -> None:
        if self.manifest.base.measured:
            with self.open_base() as base:
                self.manifest.base.check_digest(base, self.engine, self.progress)
        needed = self.manifest.readable
        for entry in self.history:
            directory = step_directory(self.path, entry.number)
            if entry.state and directory.is_dir():
                reader = StepReader(self.path, entry.number, entry.state)
                with closing(reader), self.progress.task(f"verifying {entry.name}", reader.nbytes) as advance:
                    for size in reader.verify():
                        advance(size)
            elif entry in needed:
                raise MergestreamError(f"{directory} is missing; restore the store from a backup")
            verify_record(record_directory(self.path, entry.number), entry.record)

    def relocate(self, base: str | Path) -> None:
        """Refer to the base at another place, after its digest was checked."""
        with self.writing(), open_checkpoint(base) as found:
            moved = self.manifest.base
            checkpoint = under_names(found, moved.tensors)
            if moved.measured:
                moved.check_digest(checkpoint, self.engine, self.progress)
                moved = dataclasses.replace(moved, source=checkpoint.source)
            else:
                moved = moved.with_weights(checkpoint, self.engine, self.progress)
            manifest = dataclasses.replace(self.manifest, base=moved)
            manifest.save(self.path)  # no commit: it would remove a step that was cut short and can be resumed
            self.manifest = manifest

    def open_base(self) -> Checkpoint:
        return self.manifest.open_base()

    def snapshot(self, step: int | None = None) -> Snapshot:
        """The state after a step (the last one by default) and the manifest that belongs to it.

        A writer may commit meanwhile, take steps back and write others in their place: what was opened
        counts only if the manifest is the same before and after.
        """
        self.manifest = Manifest.load(self.path)
        while True:
            manifest = self.manifest
            number = manifest.step if step is None else step
            self._check_kept(number)
            try:
                snapshot = Snapshot.open(self.path, manifest.at(number))
            except UsageError:  # a method that is not known
                raise
            except (MergestreamError, OSError) as error:
                self.manifest = Manifest.load(self.path)
                if self.manifest == manifest:
                    raise MergestreamError(f"the state of step {number} cannot be read: {error}") from error
                continue
            self.manifest = Manifest.load(self.path)
            if self.manifest == manifest:
                return snapshot
            snapshot.close()

    def _check_kept(self, number: int) -> None:
        """Refuse a step that the store has not taken, or no longer keeps."""
        if not self.history:
            raise MergestreamError(f"{self.path} has absorbed nothing yet; add an expert first")
        if number > self.manifest.step:
            raise MergestreamError(f"{self.path} has taken {self.manifest.step} steps, there is no step {number}")
        if number < self.manifest.step and not self._keeps(self.manifest.at(number)):
            raise MergestreamError(
                f"{self.path} no longer keeps step {number}; a store made with a larger --keep goes back further"
            )

    def _keeps(self, manifest: Manifest) -> bool:
        """Whether all that is remembered by such a manifest is there."""
        return all(entry.state and step_directory(self.path, entry.number).is_dir() for entry in manifest.readable)

    def _free_name(self, name: str | None, source: str) -> str:
        taken = {entry.name for entry in self.history}
        if name in taken:
            raise MergestreamError(f"an expert named {name} has been absorbed already; choose another --name")
        return expert_name(source, taken) if name is None else name

    def _commit(self, manifest: Manifest) -> None:
        """Make a manifest real, then remove what nothing refers to any more."""
        manifest.save(self.path)
        self.manifest = manifest
        kept = {e.number for e in (*manifest.history[-manifest.keep - 1 :], *manifest.readable) if e.state}
        remove_all_but(self.path / "steps", {f"{number:04d}" for number in kept})
        for number in kept:
            tidy(self.path, number)
        remove_all_but(self.path / "experts", {f"{entry.number:04d}" for entry in manifest.history})


def expert_name(source: str, taken: Collection[str]) -> str:
    """The last part of the path or hub id, numbered where another expert has that name."""
    path = Path(without_revision(source))
    stem = path.stem if path.suffix in WEIGHT_SUFFIXES else path.name
    candidates = (stem if i == 1 else f"{stem}-{i}" for i in range(1, len(taken) + 2))
    return next(candidate for candidate in candidates if candidate not in taken)
