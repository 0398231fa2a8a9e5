"""The durable directory: absorb models one by one, go back a step, verify; each step is a transaction."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.base.config_only import match_names, open_base
from mergestream.base.model import BaseModel
from mergestream.checkpoints import WEIGHT_SUFFIXES, Checkpoint, open_checkpoint
from mergestream.checkpoints.location import without_revision
from mergestream.engine import Engine, LocalEngine
from mergestream.errors import EngineError, MergestreamError, StoreBusyError, UsageError
from mergestream.experts import ExpertSource
from mergestream.methods import as_method
from mergestream.progress import Progress
from mergestream.sizes import counted
from mergestream.storage import Storage, local_path, open_storage, total_bytes
from mergestream.store.commits import Commits
from mergestream.store.manifest import MANIFEST, Expert, Manifest
from mergestream.store.records import drop_record, verify_record
from mergestream.store.steps import StepReader, StepWriter
from mergestream.store.watched import recall, remember_departed

if TYPE_CHECKING:
    from typing_extensions import Self

    from mergestream.experts.vocabulary import Vocab
    from mergestream.methods.base import Method
    from mergestream.store.arrival import Arrival, Review
    from mergestream.store.inspection import Inspection


class StoreDirectory(Commits):
    """A directory that keeps the merged state of all models absorbed so far."""

    def __init__(
        self,
        path: str | Path | Storage,
        *,
        engine: Engine | None = None,
        progress: Progress | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        """``manifest`` is for who is about to write it: once it is written, nothing may fail."""
        super().__init__(path, progress, manifest)
        self.engine: Engine = engine or LocalEngine()

    @classmethod
    def create(
        cls,
        path: str | Path,
        base: ExpertSource,
        method: Method | str | None = None,
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
        """Make an empty store for a base model; ``method`` is one, such as `OPCM`, or its name (the ledger by default).

        ``linear``, ``not_linear`` and ``heads`` are globs over tensor names: which weights are (not)
        to be projected, and which tensors stay with each expert. ``keep`` is how many earlier steps
        are kept for ``undo``. ``max_rank`` bounds the rank of what is kept in factors (adapters only);
        without it nothing is cut off. With ``config_only`` the base's weights are neither fetched nor read
        before a full export or a full checkpoint needs them; so it is for a base that has no weights.
        """
        place, method = open_storage(path), as_method(method)
        if not isinstance(base, str | Path):
            raise UsageError("a store refers to its base by path or hub id: save the base first, or use a Merger")
        _check_free(place)
        _check_keep(keep)
        if max_rank is not None and max_rank < 1:
            raise UsageError(f"max_rank={max_rank} must be at least 1")
        if max_rank is not None and method.remembers_experts:
            raise UsageError(f"the size of a {method.name} is bounded by its budget: --set budget=…, not by a rank")
        with open_base(base, config_only=config_only) as checkpoint:
            model = BaseModel.examine(
                checkpoint,
                linear=linear,
                not_linear=not_linear,
                heads=heads,
                measure=checkpoint.has_weights and not config_only,
                engine=engine,
                progress=progress,
            )
            if checkpoint.note:
                (progress or Progress()).note(checkpoint.note)
        model = dataclasses.replace(model, given=str(base))
        manifest = Manifest(method.name, method.parameters, model, keep, max_rank, commit=place.new_mark())
        try:
            with place.creating(), place.writing(MANIFEST):
                _check_free(place)  # once more: it may have taken long to examine the base
                store = cls(place, engine=engine, progress=progress, manifest=manifest)
                store.manifest = manifest.save(place)
                store._settle()
        except OSError as error:
            raise MergestreamError(f"{place} cannot be made: {error.strerror}") from error
        return store

    @property
    def path(self) -> Path:
        """Of a store on a disk."""
        return self.place.path() or local_path(str(self.place))

    @cached_property
    def method(self) -> Method:
        return self.manifest.make_method()

    @property
    def sources(self) -> tuple[str, ...]:
        """The store itself and the models that it was made of: no output goes there."""
        return str(self.place), self.manifest.base.source, *(entry.source for entry in self.history)

    def open_base(self) -> Checkpoint:
        return self.manifest.open_base()

    def absorb(
        self,
        expert: ExpertSource,
        name: str | None = None,
        partial: bool = False,
        ignore: Sequence[str] = (),
        allow_duplicate: bool = False,
        allow_other_base: bool = False,
        *,
        vocab: Vocab | None = None,
        heads: Sequence[str] = (),
        measure_distance: bool = False,
        review: Review | None = None,
    ) -> Expert:
        """`Store.add` without gates: ``review`` is asked when all is written and nothing counts yet, and may refuse.

        With ``measure_distance`` the distance to the base is in the entry, whatever the method.
        """
        from mergestream.store.arrival import Arrival

        started = time.monotonic()
        options: dict[str, Any] = {"vocab": vocab, "heads": heads}
        with self.writing(), Arrival(self, expert, partial, ignore, measure_distance, name, **options) as arrival:
            with self._in_the_making(arrival) as writer:
                arrival.absorb(writer)
                if not allow_duplicate:
                    arrival.refuse_duplicate()
                if not allow_other_base:
                    arrival.refuse_other_base()
                arrival.note_oddities()
                candidate = arrival.finish(writer, started)
                absorbed = review(candidate) if review else candidate.expert
                self._commit(dataclasses.replace(self.manifest, base=arrival.vector.model).with_expert(absorbed))
            self._settle()
            if self.method.remembers_experts:
                self._shorten_entries()
            return absorbed

    @contextmanager
    def _in_the_making(self, arrival: Arrival) -> Iterator[StepWriter]:
        """A step that is being written, its commit included: removed where it is refused or fails, for it would take
        room on a disk that is full, and left to be resumed where it is cut short."""
        writer = arrival.writer()
        try:
            yield writer
        except (EngineError, StoreBusyError):
            writer.pause()
            raise
        except (MergestreamError, OSError):
            writer.abandon()
            drop_record(self.place, arrival.folder)
            raise
        except BaseException:
            writer.pause()
            raise

    def _shorten_entries(self) -> None:
        """Write those entries anew that have come to hold twice what is read of them, so that the store does not grow.

        That is a transaction of its own, after the step, which is done whatever becomes of it: an entry that cannot be
        shortened is longer than it need be.
        """
        from mergestream.store.shortening import shorten

        before = shortened = self.manifest
        try:
            try:
                for entry in before.history:
                    if before.step >= 2 * entry.cut:
                        shorter = shorten(self.place, shortened, entry, before.step)
                        shortened = shortened.replacing(entry, shorter)
            finally:  # where there is no room for all of them, some make it
                if shortened is not before:
                    self._commit(shortened)
        except Exception as error:
            self.progress.note(f"older entries take more room than they need until the next add: {error}")
        if shortened is not before:
            self._settle()

    def inspect(
        self,
        expert: ExpertSource,
        *,
        partial: bool = False,
        ignore: Sequence[str] = (),
        vocab: Vocab | None = None,
        heads: Sequence[str] = (),
    ) -> Inspection:
        """What adding a model would do; changes nothing."""
        options = {"partial": partial, "ignore": ignore, "vocab": vocab, "heads": heads}
        return self.retried(lambda: self._inspect(expert, options))

    def _inspect(self, expert: ExpertSource, options: Mapping[str, Any]) -> Inspection:
        from mergestream.merging.merger import MemoryState
        from mergestream.store.arrival import Arrival
        from mergestream.store.inspection import Inspection
        from mergestream.store.scratch import scratch

        with Arrival(self, expert, measured=True, **options) as arrival, ExitStack() as stack:
            started, entry, files = time.monotonic(), None, None
            if self.manifest.is_ledger:
                # Memory of this process is seen by its threads only.
                here = isinstance(self.engine, LocalEngine)
                files = None if here else stack.enter_context(scratch(self.place, arrival.layout))
                entry = files or MemoryState(arrival.step)
            arrival.absorb(memory=entry)
            if files:
                files.close()
            seconds = time.monotonic() - started
            arrival.note_oddities()
            return Inspection.of(arrival, seconds, arrival.interference(entry) if entry is not None else None)

    def undo(self) -> Expert:
        """Go back to before the last model; returns the entry that was taken back."""
        with self.writing():
            if not self.history:
                raise MergestreamError(f"{self.place} has absorbed nothing, there is nothing to undo")
            undone, before = self.history[-1], self.manifest.at(self.manifest.step - 1)
            if not self._keeps(before):
                kept = counted(self.manifest.keep, "earlier step")
                raise MergestreamError(f"what {self.place} keeps, {kept}, is used up; {self._keep_more()}")
            self._go_to(before, undone)
            return undone

    def keep(self, steps: int) -> None:
        """Keep so many earlier steps for `undo` from now on; the oldest are dropped where that is fewer than before."""
        _check_keep(steps)
        with self.writing():
            self._commit(dataclasses.replace(self.manifest, keep=steps))
            self._settle(resumable=True)

    def remove(self, name: str, expert: ExpertSource | None = None) -> Expert:
        """Take any one expert out; returns its entry.

        A ledger drops what it remembers of it. The state of a method that only adds up (average, task_arithmetic) has
        no more of it than the sum, so the ``expert`` itself must be there to be subtracted.
        """
        with self.writing():
            removed = self._known(name)
            rest = self.manifest.without(removed)
            if self._keeps(rest):
                self._go_to(rest, removed)
            else:
                self._subtract(removed, expert, rest)
            return removed

    def gc(self) -> int:
        """Remove what commands have left that were killed or have lost, also what could be resumed; returns how many
        bytes that were."""
        before = total_bytes(self.place.files())
        with self.writing():
            self._commit(self.manifest)  # a concurrent writer cannot win any more
            self._replaced = ""
            self.place.clean_scratch()
            self._tidy()
        return before - total_bytes(self.place.files())

    def _have_left_alone(self, departing: Expert) -> None:
        """Remember, before it leaves, that `watch` is not to bring it back."""
        try:
            remember_departed(self.place, departing.source)
        except MergestreamError as error:
            self.progress.note(f"watch may add {departing.name} again: {error}")

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
        options = removed.options
        partial, ignore, vocab = options.get("partial", False), options.get("ignore", ()), options.get("vocab")
        with Arrival(self, source, partial, ignore, measured=False, withdrawn=removed.name, vocab=vocab) as arrival:
            with self._in_the_making(arrival) as writer:
                arrival.absorb(writer)
                if arrival.digest != removed.digest:
                    raise MergestreamError(f"{arrival.source} is not the model that was absorbed as {removed.name}")
                last = arrival.finish_withdrawal(writer, rest.history[-1])
                self._have_left_alone(removed)
                self._commit(dataclasses.replace(rest, history=(*rest.history[:-1], last)))
            self._settle()

    def verify(self, *, base: bool = True) -> None:
        """Recompute every digest: the base's, the kept steps' and the heads'; raises at the first fault. Without the
        ``base`` only those of the store itself."""
        self.retried(lambda: self._verify(base))

    def _verify(self, with_base: bool) -> None:
        if with_base and self.manifest.base.measured:
            with self.open_base() as base:
                self.manifest.base.check_digest(base, self.engine, self.progress)
        recall(self.place)
        needed, folders = self.manifest.readable, self.place.folders("steps")
        for entry in self.history:
            if entry.state and entry.folder in folders:
                reader = StepReader(self.place, entry)
                with closing(reader), self.progress.task(f"verifying {entry.name}", reader.nbytes) as advance:
                    for size in reader.verify(self.engine):
                        advance(size)
            elif entry in needed:
                raise MergestreamError(f"{self.place}/steps/{entry.folder} is missing; restore the store from a backup")
            verify_record(self.place, entry, self.engine)

    def relocate(self, base: str | Path) -> None:
        """Refer to the base at another place, after its digest was checked; only from here, where the store may not be
        written to."""
        if not self.place.is_writable:
            self._moved = self._found(base)
            self.manifest = self._load()
            return
        with self.writing():
            self._commit(dataclasses.replace(self.manifest, base=self._found(base)))
            self._settle(resumable=True)

    def _found(self, base: str | Path) -> BaseModel:
        """The store's base at another place."""
        model = self.manifest.base
        with open_checkpoint(base) as found:
            checkpoint = match_names(found, model.tensors)
            if not model.measured:
                model = model.with_weights(checkpoint, self.engine, self.progress)
            else:
                model.check_digest(checkpoint, self.engine, self.progress)
            return dataclasses.replace(model, source=checkpoint.source, given=str(base))

    def free_name(self, name: str | None, source: str) -> str:
        """What an expert from there is to be called: as the user says, or by its source."""
        taken = {entry.name for entry in self.history}
        if name is not None and not (name.strip() and name.isprintable()):
            raise UsageError(f"{name!r} cannot be the name of an expert; choose a --name that can be seen and printed")
        if name in taken:
            raise MergestreamError(f"an expert named {name} has been absorbed already; choose another --name")
        return expert_name(source, taken) if name is None else name

    def _go_to(self, manifest: Manifest, departing: Expert) -> None:
        """Have another manifest of what is there already, without one of the experts."""
        with suppress(OSError):
            self._tidy()  # on a full disk, a step that never became real takes the room that the manifest needs
        self._have_left_alone(departing)
        self._commit(manifest)
        self._settle()


def _check_free(storage: Storage) -> None:
    """Refuse a place for a new store that is not empty."""
    if not storage.is_free:
        raise MergestreamError(f"{storage} exists already and is not empty; choose another place for the store")
    storage.check()


def _check_keep(steps: int) -> None:
    if steps < 0:
        raise UsageError(f"keep={steps} must be at least 0")


def expert_name(source: str, taken: Collection[str]) -> str:
    """The last part of the path or hub id, numbered where another expert has that name."""
    path = Path(without_revision(source))
    stem = path.stem if path.suffix in WEIGHT_SUFFIXES else path.name
    candidates = (stem if i == 1 else f"{stem}-{i}" for i in range(1, len(taken) + 2))
    return next(candidate for candidate in candidates if candidate not in taken)
