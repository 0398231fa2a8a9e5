"""The store: absorb models one by one, read out the merged one, go back a step."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.base.model import BaseModel
from mergestream.base.skeleton import open_base, under_names
from mergestream.checkpoints import WEIGHT_SUFFIXES, Checkpoint, open_checkpoint
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.engine import LocalEngine
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts.opening import ExpertSource
from mergestream.files import BESIDE, remove, remove_all_but
from mergestream.progress import Progress
from mergestream.store.lock import writer_lock
from mergestream.store.manifest import Expert, Manifest
from mergestream.store.records import HEADS, read_record, verify_record, write_record
from mergestream.store.steps import StepReader, step_directory, tidy

if TYPE_CHECKING:
    from mergestream.export.peft import Energy
    from mergestream.methods.base import Method
    from mergestream.report.diagnostics import Similarity, Survival
    from mergestream.report.scores import Scores
    from mergestream.store.inspection import Inspection


class Store:
    """A directory that keeps the merged state of all models absorbed so far::

    store = Store.create("store", base="path/or/hub-id", method=OPCM(alpha=0.5))
    store.add("expert-1")
    store.export("merged")
    """

    def __init__(
        self, path: str | Path, *, engine: LocalEngine | None = None, progress: Progress | None = None
    ) -> None:
        self.path = Path(path)
        self.manifest = Manifest.load(self.path)
        self.engine = engine or LocalEngine()
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
        engine: LocalEngine | None = None,
        progress: Progress | None = None,
    ) -> Store:
        """Make an empty store for a base model.

        ``linear``, ``not_linear`` and ``heads`` are globs over tensor names: which weights are (not)
        to be projected, and which tensors stay with each expert. ``keep`` is how many earlier steps
        are kept for ``undo``. ``max_rank`` bounds the rank of what is kept in factors (adapters only);
        without it nothing is cut off. With ``config_only`` the base's weights are neither fetched nor read
        before a full export or a full checkpoint needs them; so it is for a base that has no weights.
        """
        from mergestream.methods import OPCM

        path, method = Path(path), method or OPCM()
        if isinstance(base, Mapping):
            raise UsageError("a store refers to its base by path or hub id: save the base first, or use a Merger")
        if path.exists() and not (path.is_dir() and all(entry.name.endswith(BESIDE) for entry in path.iterdir())):
            raise MergestreamError(f"{path} exists already and is not empty; choose another place for the store")
        if keep < 0:
            raise UsageError(f"keep={keep} must be at least 0")
        if max_rank is not None and max_rank < 1:
            raise UsageError(f"max_rank={max_rank} must be at least 1")
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
        from mergestream.methods import make_method

        return make_method(self.manifest.method, self.manifest.parameters)

    def add(
        self,
        expert: ExpertSource,
        name: str | None = None,
        *,
        partial: bool = False,
        ignore: Sequence[str] = (),
        allow_duplicate: bool = False,
        gates: Sequence[str] = (),
        evaluate: str | None = None,
    ) -> Expert:
        """Absorb a model as one durable step; if it fails or is interrupted, the store is as before.

        An interrupted call is gone on with by the same call. ``gates`` are conditions such as ``kept>=0.6``;
        ``evaluate`` is a command that is run on the merged model before it counts, with ``{model}`` for its
        directory, and the last number that it prints is ``score``.
        """
        from mergestream.report.gates import Gatekeeper
        from mergestream.store.arrival import Arrival

        started = time.monotonic()
        gatekeeper = Gatekeeper.of(gates, evaluate)
        with writer_lock(self.path):
            self.manifest = Manifest.load(self.path)
            with Arrival(self, expert, partial=partial, ignore=ignore) as arrival:
                name = self._free_name(name, arrival.source)
                writer = arrival.writer()
                try:
                    arrival.absorb(writer)
                    if not allow_duplicate:
                        arrival.refuse_duplicate()
                    totals, sketch = arrival.totals, arrival.sketch.values()
                    passed = gatekeeper.check(self, totals, sketch, arrival.source)
                    absorbed = Expert(
                        name=name,
                        source=arrival.source,
                        digest=arrival.digest,
                        added=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                        seconds=round(time.monotonic() - started, 3),
                        norm=totals.norm,
                        kept=totals.kept,
                        scale=totals.scale,
                        mean_norm=totals.mean_norm,
                        direction_norm=totals.direction_norm,
                        distance=totals.distance,
                        lost=totals.lost,
                        rank=max((max(room.core) for room in arrival.rooms.values()), default=0),
                        state=writer.finish(arrival.outcomes),
                        record=write_record(self.record_directory(arrival.t), arrival, sketch),
                        fates=dict(sorted(Counter(arrival.vector.fates.values()).items())),
                        options=arrival.options,
                        gates=passed,
                    )
                    absorbed = gatekeeper.evaluate(self, absorbed)
                except MergestreamError:
                    writer.abandon()
                    remove(self.record_directory(arrival.t))
                    raise
                except BaseException:
                    writer.pause()
                    raise
                arrival.note_oddities()
                self._commit(dataclasses.replace(self.manifest, base=arrival.vector.model).with_expert(absorbed))
                return absorbed

    def inspect(self, expert: ExpertSource, *, partial: bool = False, ignore: Sequence[str] = ()) -> Inspection:
        """What adding a model would do; changes nothing."""
        from mergestream.store.arrival import Arrival
        from mergestream.store.inspection import Inspection

        started = time.monotonic()
        with Arrival(self, expert, partial=partial, ignore=ignore) as arrival:
            arrival.absorb()
            return Inspection.of(arrival, time.monotonic() - started)

    def export(
        self,
        out: str | Path,
        *,
        dtype: str | None = None,
        task: str | None = None,
        max_shard_size: int = DEFAULT_SHARD_SIZE,
        overwrite: bool = False,
        command: str | None = None,
        pictures: bool = True,
    ) -> Path:
        """Write the merged model as a Hugging Face directory.

        ``dtype`` is the base's by default, ``task`` names the expert whose head to put in place of
        the base's, ``command`` goes into the model card, and ``pictures`` beside it.
        """
        from mergestream.export.directory import Output
        from mergestream.export.model import export

        output = Output(Path(out), dtype, max_shard_size, overwrite)
        export(self, output, task=task, command=command, pictures=pictures)
        return output.path

    def export_adapter(
        self,
        out: str | Path,
        *,
        rank: int | None = None,
        dtype: str | None = None,
        overwrite: bool = False,
        command: str | None = None,
    ) -> Energy:
        """Write the merged task vector as a PEFT adapter of the base, exactly or cut down to ``rank``;
        returns how much of it was left out."""
        from mergestream.export.adapter import export_adapter
        from mergestream.export.directory import Output

        return export_adapter(self, Output(Path(out), dtype, overwrite=overwrite), rank=rank, command=command)

    def undo(self) -> Expert:
        """Go back to before the last model; returns the entry that was taken back."""
        with writer_lock(self.path):
            self.manifest = Manifest.load(self.path)
            if not self.history:
                raise MergestreamError(f"{self.path} has absorbed nothing, there is nothing to undo")
            step = self.manifest.step
            if step > 1 and not step_directory(self.path, step - 1).is_dir():
                raise MergestreamError(
                    f"{self.path} keeps {self.manifest.keep} earlier step(s), and they are used up; "
                    "a store made with a larger --keep can go back further"
                )
            undone = self.history[-1]
            self._commit(self.manifest.without_last())
            return undone

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
        for number, entry in enumerate(self.history, 1):
            if not step_directory(self.path, number).is_dir():
                if number == self.manifest.step:
                    raise MergestreamError(
                        f"{step_directory(self.path, number)} is missing; restore the store from a backup"
                    )
                continue
            with (
                closing(StepReader(self.path, number)) as reader,
                self.progress.task(f"verifying step {number}", reader.nbytes) as advance,
            ):
                for size in reader.verify(entry.state):
                    advance(size)
        for number, entry in enumerate(self.history, 1):
            verify_record(self.record_directory(number), entry.record)

    def relocate(self, base: str | Path) -> None:
        """Refer to the base at another place, after its digest was checked."""
        with writer_lock(self.path), open_checkpoint(base) as found:
            self.manifest = Manifest.load(self.path)
            moved = self.manifest.base
            checkpoint = under_names(found, moved.tensors)
            if moved.measured:
                moved.check_digest(checkpoint, self.engine, self.progress)
                moved = dataclasses.replace(moved, source=checkpoint.source)
            else:
                moved = moved.with_weights(checkpoint, self.engine, self.progress)
            self._commit(dataclasses.replace(self.manifest, base=moved))

    def open_base(self) -> Checkpoint:
        """The base's files, checked by their headers."""
        try:
            checkpoint = open_checkpoint(self.manifest.base.source)
        except MergestreamError as error:
            needed = "if it has moved, pass" if self.manifest.base.measured else "its weights are needed now: pass"
            raise MergestreamError(f"the base cannot be opened: {error}; {needed} --base PATH") from error
        checkpoint = under_names(checkpoint, self.manifest.base.tensors)
        self.manifest.base.check(checkpoint)
        return checkpoint

    def open_step(self) -> StepReader:
        """The state after the last model, and the manifest that belongs to it.

        A writer may commit meanwhile, take steps back and write others in their place: what was opened
        counts only if the manifest is the same before and after.
        """
        while True:
            manifest = self.manifest
            if not manifest.history:
                raise MergestreamError(f"{self.path} has absorbed nothing yet; add an expert first")
            reader, fault = None, None
            try:
                reader = StepReader(self.path, manifest.step)
            except (MergestreamError, OSError) as error:
                fault = error
            self.manifest = Manifest.load(self.path)
            if self.manifest == manifest:
                if reader is None:
                    raise MergestreamError(f"the state of step {manifest.step} cannot be read: {fault}") from fault
                return reader
            if reader is not None:
                reader.close()

    def similarity(self) -> Similarity:
        """Cosines of all task vectors, from their sketches."""
        from mergestream.report.diagnostics import similarity

        return similarity(self)

    def survival(self) -> Survival:
        """How much of each expert entered the state, and how many directions were protected, per tensor."""
        from mergestream.report.diagnostics import survival

        return survival(self)

    @property
    def scores(self) -> Scores | None:
        """The evaluation that is attached to the present history, if there is one."""
        from mergestream.report.scores import attached

        return attached(self)

    def attach_scores(
        self,
        tasks: Sequence[str],
        matrix: Sequence[Sequence[float | None]],
        *,
        base: Sequence[float | None] | None = None,
        experts: Sequence[float | None] | None = None,
        metric: str = "accuracy",
    ) -> Scores:
        """Keep an evaluation: ``matrix[i][j]`` is the score on task j of the model after i + 1 steps.

        Tasks are in the order in which their experts came; ``base`` and ``experts`` are the scores of the
        base, and of each expert on its own task.
        """
        from mergestream.report.scores import Scores, attach

        scores = Scores.of(tasks, matrix, base=base, experts=experts, metric=metric)
        with writer_lock(self.path):
            self.manifest = Manifest.load(self.path)
            attach(self, scores)
        return scores

    def tensor_records(self, number: int) -> dict[str, dict[str, Any]]:
        """What step ``number`` did to each tensor: ``norm``, ``kept`` (the share) and ``protected``."""
        records: dict[str, dict[str, Any]] = read_record(self.record_directory(number))["tensors"]
        return records

    def open_heads(self, name: str) -> Checkpoint:
        """The tensors that were kept for one expert."""
        path = self.record_directory(self._number(name)) / HEADS
        if not path.is_file():
            raise MergestreamError(f"expert {name} has no head of its own; --heads GLOB at init keeps them")
        return open_checkpoint(path)

    def head_config(self, name: str) -> dict[str, Any] | None:
        """The config of an expert with a head of its own, for the labels are in it; None where it had none."""
        config: dict[str, Any] | None = read_record(self.record_directory(self._number(name)))["config"]
        return config

    def _number(self, name: str) -> int:
        for number, entry in enumerate(self.history, 1):
            if entry.name == name:
                return number
        known = ", ".join(entry.name for entry in self.history) or "none yet"
        raise MergestreamError(f"no expert named {name} has been absorbed (there are: {known})")

    def _free_name(self, name: str | None, source: str) -> str:
        taken = {entry.name for entry in self.history}
        if name is not None:
            if name in taken:
                raise MergestreamError(f"an expert named {name} has been absorbed already; choose another --name")
            return name
        return expert_name(source, taken)

    def record_directory(self, number: int) -> Path:
        """Where the store keeps what it must know of the expert of a step, beside the state."""
        return self.path / "experts" / f"{number:04d}"

    def _commit(self, manifest: Manifest) -> None:
        """Make a manifest real, then remove what nothing refers to any more."""
        manifest.save(self.path)
        self.manifest = manifest
        kept = range(max(1, manifest.step - manifest.keep), manifest.step + 1)
        remove_all_but(self.path / "steps", {f"{number:04d}" for number in kept})
        for number in kept:
            tidy(self.path, number)
        remove_all_but(self.path / "experts", {f"{number:04d}" for number in range(1, manifest.step + 1)})


def expert_name(source: str, taken: Collection[str]) -> str:
    """The last part of the path or hub id, numbered where another expert has that name."""
    path = Path(source.split("@")[0])
    stem = path.stem if path.suffix in WEIGHT_SUFFIXES else path.name
    candidates = (stem if i == 1 else f"{stem}-{i}" for i in range(1, len(taken) + 2))
    return next(candidate for candidate in candidates if candidate not in taken)
