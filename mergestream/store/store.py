"""The store: absorb models one by one, read out the merged one, go back a step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.adapters import Adapter, same_model
from mergestream.base_model import BaseModel
from mergestream.checkpoints import Checkpoint, SafetensorsWriter, TensorSpec, open_checkpoint
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.digest import combined_digest, tensor_digest, text_digest
from mergestream.engine import LocalEngine
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts import ExpertSource, open_expert, task_vector
from mergestream.progress import Progress
from mergestream.room import Room
from mergestream.skeleton import Skeleton, open_base
from mergestream.store.factors import block_layout, core_layout
from mergestream.store.files import BESIDE, read_json, remove, remove_all_but, sync_directory, write_json
from mergestream.store.lock import writer_lock
from mergestream.store.manifest import Expert, Manifest
from mergestream.store.steps import StepReader, StepWriter, slot_name, step_directory, tidy

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.adapters.writing import Energy
    from mergestream.deltas import TaskVector
    from mergestream.lowrank import LowRank
    from mergestream.methods.base import Method
    from mergestream.report.diagnostics import Similarity, Survival
    from mergestream.report.scores import Scores
    from mergestream.sketch import Sketch
    from mergestream.step import Outcome, Totals
    from mergestream.store.inspection import Inspection

OTHER_BASE = 0.7
"""Two unrelated models are about 1.4 apart, relative to their norm; fine-tuning moves 0.1 at most."""


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
        with (
            open_checkpoint(base)
            if isinstance(base, Mapping)
            else open_base(base, config_only=config_only) as checkpoint
        ):
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

        started = time.monotonic()
        gatekeeper = Gatekeeper.of(gates, evaluate)
        with writer_lock(self.path), ExitStack() as stack:
            self.manifest = Manifest.load(self.path)
            vector = self._task_vector(stack, expert, partial, ignore)
            name = self._free_name(name, vector.expert.source)
            before = self._open_state(stack)
            rooms = self._rooms(vector, before)
            writer = self._begin(vector, before, rooms, {"partial": partial, "ignore": list(ignore)})
            try:
                sketch = self._sketch()
                outcomes, digests = self._absorb(vector, before, rooms, sketch, writer)
                totals = self._total(vector, outcomes)
                digest = combined_digest(digests)
                if not allow_duplicate:
                    self._refuse_duplicate(vector, digest, totals)
                values = sketch.values()
                passed = gatekeeper.check(self, totals, values, vector.expert.source)
                absorbed = Expert(
                    name=name,
                    source=vector.expert.source,
                    digest=digest,
                    added=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    seconds=round(time.monotonic() - started, 3),
                    norm=totals.norm,
                    kept=totals.kept,
                    scale=totals.scale,
                    mean_norm=totals.mean_norm,
                    direction_norm=totals.direction_norm,
                    distance=totals.distance,
                    lost=totals.lost,
                    rank=max((max(room.core) for room in rooms.values()), default=0),
                    state=writer.finish(outcomes),
                    record=self._write_record(totals.t, vector, outcomes, values),
                    fates=dict(sorted(Counter(vector.fates.values()).items())),
                    options={"partial": partial, "ignore": list(ignore)},
                    gates=passed,
                )
                absorbed = gatekeeper.evaluate(self, absorbed)
            except MergestreamError:
                writer.abandon()
                remove(self.record_directory(self.manifest.step + 1))
                raise
            except BaseException:
                writer.pause()
                raise
            self._warn_of_other_base(vector, outcomes)
            self._warn_of_size(vector, totals)
            self._commit(dataclasses.replace(self.manifest, base=vector.model).with_expert(absorbed))
            return absorbed

    def inspect(self, expert: ExpertSource, *, partial: bool = False, ignore: Sequence[str] = ()) -> Inspection:
        """What adding a model would do; changes nothing."""
        from mergestream.store.inspection import Inspection

        started = time.monotonic()
        with ExitStack() as stack:
            vector = self._task_vector(stack, expert, partial, ignore)
            before = self._open_state(stack)
            rooms = self._rooms(vector, before)
            sketch = self._sketch()
            outcomes, digests = self._absorb(vector, before, rooms, sketch, None)
            totals, values = self._total(vector, outcomes), sketch.values()
            seconds = time.monotonic() - started
            return Inspection.of(self, vector, rooms, outcomes, totals, values, digests, seconds)

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
        from mergestream.export import export
        from mergestream.output import Output

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
        from mergestream.adapters.export import export_adapter
        from mergestream.output import Output

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
            self._verify_record(number, entry)

    def relocate(self, base: str | Path) -> None:
        """Refer to the base at another place, after its digest was checked."""
        with writer_lock(self.path), open_checkpoint(base) as checkpoint:
            self.manifest = Manifest.load(self.path)
            moved = self.manifest.base
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
            raise MergestreamError(f"the base cannot be opened: {error}; if it has moved, pass --base PATH") from error
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
        records: dict[str, dict[str, Any]] = read_json(self.record_directory(number) / "tensors.json")["tensors"]
        return records

    def open_heads(self, name: str) -> Checkpoint:
        """The tensors that were kept for one expert."""
        path = self.record_directory(self._number(name)) / "heads.safetensors"
        if not path.is_file():
            raise MergestreamError(f"expert {name} has no head of its own; --heads GLOB at init keeps them")
        return open_checkpoint(path)

    def head_config(self, name: str) -> dict[str, Any] | None:
        """The config of an expert with a head of its own, for the labels are in it; None where it had none."""
        config: dict[str, Any] | None = read_json(self.record_directory(self._number(name)) / "tensors.json")["config"]
        return config

    def _number(self, name: str) -> int:
        for number, entry in enumerate(self.history, 1):
            if entry.name == name:
                return number
        known = ", ".join(entry.name for entry in self.history) or "none yet"
        raise MergestreamError(f"no expert named {name} has been absorbed (there are: {known})")

    def layout(self, t: int, rooms: Mapping[str, Room]) -> dict[str, TensorSpec]:
        """The tensors of the state after t models: dense slots, and the cores of those in factors."""
        layout: dict[str, TensorSpec] = {}
        for name, tensor in self.manifest.base.tensors.items():
            for slot in self.method.slots(t) if tensor.merges else ():
                spec, key = TensorSpec(tensor.state_dtype, tensor.shape), slot_name(slot, name)
                layout |= core_layout(rooms[name], key) if name in rooms else {key: spec}
        return layout

    def blocks(self, rooms: Mapping[str, Room]) -> dict[str, TensorSpec]:
        """What a step may add to the bases of the slots in factors."""
        layout: dict[str, TensorSpec] = {}
        for name, room in rooms.items():
            tensor = self.manifest.base.tensors[name]
            layout |= block_layout(room, TensorSpec(tensor.state_dtype, tensor.shape), name)
        return layout

    def _sketch(self) -> Sketch:
        from mergestream.sketch import Sketch

        return Sketch({name: tensor for name, tensor in self.manifest.base.tensors.items() if tensor.merges})

    def _task_vector(self, stack: ExitStack, expert: ExpertSource, partial: bool, ignore: Sequence[str]) -> TaskVector:
        opened = open_expert(expert)
        stack.callback(opened.close)
        base: Checkpoint
        model = self.manifest.base
        if not model.measured and isinstance(opened, Adapter) and not opened.whole:
            base = Skeleton(model.source, None, model.tensors)
        else:
            base = stack.enter_context(self.open_base())
            if not model.measured:  # from now on it must stay what it is
                model = model.with_weights(base, self.engine, self.progress)
        if isinstance(opened, Adapter):
            self._note_on_adapter(opened)
        return task_vector(model, base, opened, partial=partial, ignore=ignore)

    def _note_on_adapter(self, adapter: Adapter) -> None:
        named = adapter.config.base
        if named is not None and not same_model(named, self.manifest.base.source):
            self.progress.note(
                f"{adapter.source} says that it was made for {named}, and the base of this store is "
                f"{self.manifest.base.source}; take it back with undo if they are not the same model"
            )
        if not self.method.factored:
            self.progress.note(f"{self.method.name} needs dense tensors: the adapter is multiplied out, one by one")

    def _open_state(self, stack: ExitStack) -> StepReader | None:
        return stack.enter_context(closing(self.open_step())) if self.manifest.step else None

    def _rooms(self, vector: TaskVector, before: StepReader | None) -> dict[str, Room]:
        """The tensors whose state is in factors and stays so, with the space that they may take.

        A tensor leaves them for good when a dense task vector comes, when the method needs it dense,
        or when its factors would take as much as the dense tensor.
        """
        rooms: dict[str, Room] = {}
        if not self.method.factored:
            return rooms
        slots = self.method.slots(self.manifest.step)
        for name in vector.names:
            rank = vector.rank(name)
            keys = [slot_name(slot, name) for slot in slots] if before else []
            if rank is None or (before and not all(key in before.factors.index for key in keys)):
                continue
            ranks = [before.factors.ranks(key) for key in keys] if before else []
            room = Room.after(vector.model.tensors[name].shape, ranks, rank, self.manifest.max_rank)
            if room is not None:
                rooms[name] = room
        return rooms

    def _begin(
        self, vector: TaskVector, before: StepReader | None, rooms: Mapping[str, Room], options: Mapping[str, Any]
    ) -> StepWriter:
        step = self.manifest.step + 1
        plan = {
            "source": vector.expert.source,
            "fingerprint": vector.expert.fingerprint,
            "after": [entry.digest for entry in self.history],
            **options,
        }
        return StepWriter(self.path, step, self.layout(step, rooms), self.blocks(rooms), before, plan)

    def _absorb(
        self,
        vector: TaskVector,
        before: StepReader | None,
        rooms: Mapping[str, Room],
        sketch: Sketch,
        writer: StepWriter | None,
    ) -> tuple[dict[str, Outcome], dict[str, str]]:
        """Absorb every tensor; returns what became of each, and the digests of the expert's tensors."""
        from mergestream.step import Discard, Step, memory_of

        def read_state(slot: str, name: str) -> Tensor | LowRank:
            assert before is not None
            return before.read(slot, name)

        step = Step(
            self.method,
            self.manifest.step + 1,
            vector,
            read_state,
            self.engine.device,
            rooms,
            self.manifest.max_rank,
            sketch,
        )
        done = writer.done if writer else {}
        outcomes = {name: outcome for name, (outcome, _) in done.items()}
        digests = {name: digest for name, (_, digest) in done.items() if digest is not None}
        costs = {name: vector.numel(name) for name in vector.names if name not in done}
        thresholds = step.thresholds(self.engine) if costs else None
        target = writer or Discard()
        label = "absorbing" if writer else "inspecting"
        with self.progress.task(f"{label} {Path(vector.expert.source).name}", sum(costs.values()) * 4) as advance:
            for name, outcome in self.engine.run(
                costs,
                lambda name: step.absorb(name, thresholds(name) if thresholds else {}, target),
                memory_of(self.method, vector, rooms),
            ):
                outcomes[name] = outcome
                if writer:
                    writer.record(name, outcome, vector.digests.get(name))
                advance(costs[name] * 4)
        sizes = {name: vector.numel(name) for name in done}
        for _ in self.engine.run(sizes, lambda name: sketch.add_elements(name, vector.elements(name))):
            pass
        for name in vector.heads:
            vector.head(name)
        return outcomes, {**digests, **vector.digests}

    def _total(self, vector: TaskVector, outcomes: Mapping[str, Outcome]) -> Totals:
        from mergestream.step import total

        previous = self.history[-1].mean_norm if self.history else 0.0
        return total(self.method, self.manifest.step + 1, previous, outcomes)

    def _refuse_duplicate(self, vector: TaskVector, digest: str, totals: Totals) -> None:
        for entry in self.history:
            if entry.digest == digest:
                raise MergestreamError(
                    f"{vector.expert.source} has been absorbed already, as {entry.name}; "
                    "pass --allow-duplicate to add it once more"
                )
        if totals.norm == 0:
            raise MergestreamError(
                f"{vector.expert.source} is identical to the base; pass --allow-duplicate to add it all the same"
            )

    def _warn_of_other_base(self, vector: TaskVector, outcomes: Mapping[str, Outcome]) -> None:
        tensors = self.manifest.base.tensors
        matrices = [name for name in outcomes if len(tensors[name].shape) >= 2 and tensors[name].norm]
        distances = [math.sqrt(outcomes[name].norm2) / tensors[name].norm for name in matrices]
        if distances and min(distances) > OTHER_BASE:
            norm = math.sqrt(math.fsum(tensor.norm**2 for tensor in tensors.values()))
            moved = math.sqrt(math.fsum(outcome.norm2 for outcome in outcomes.values()))
            self.progress.note(
                f"{vector.expert.source} was probably not fine-tuned from this base: not one matrix is close, "
                f"the relative distance is {moved / norm:.2f}; take it back with undo"
            )

    def _warn_of_size(self, vector: TaskVector, totals: Totals) -> None:
        from mergestream.report.diagnostics import LARGE

        mean = self.history[-1].mean_norm if self.history else 0.0
        if mean and totals.norm >= LARGE * mean:
            self.progress.note(
                f"{vector.expert.source} has moved {totals.norm / mean:.1f} times as far as the experts before it "
                "in the mean and outweighs them; take it back with undo if that is not meant"
            )

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

    def _write_record(self, number: int, vector: TaskVector, outcomes: Mapping[str, Outcome], sketch: Tensor) -> str:
        """Keep what happened to each tensor, the sketch and the expert's heads; returns the record's digest."""
        from mergestream.sketch import write_sketch

        directory = self.record_directory(number)
        remove(directory)
        directory.mkdir(parents=True)
        tensors = {
            name: {
                "norm": math.sqrt(outcomes[name].norm2),
                "kept": outcomes[name].kept2 / outcomes[name].norm2 if outcomes[name].norm2 else 1.0,
                "protected": outcomes[name].protected,
            }
            for name in vector.names
        }
        config = None
        if vector.heads:
            source = vector.expert.directory / "config.json" if vector.expert.directory else None
            config = read_json(source) if source and source.is_file() else None
            layout = {name: vector.expert.tensors[name] for name in vector.heads}
            with SafetensorsWriter(directory, layout, prefix="heads") as writer:
                for name in vector.heads:
                    writer.write(name, vector.expert.read(name))
        record = {
            "sketch": write_sketch(directory, sketch),
            "heads": {name: vector.digests[name] for name in vector.heads},
            "config": config,
            "tensors": tensors,
        }
        write_json(directory / "tensors.json", record)
        sync_directory(directory.parent)
        return text_digest((directory / "tensors.json").read_text(encoding="utf-8"))

    def _verify_record(self, number: int, entry: Expert) -> None:
        path = self.record_directory(number) / "tensors.json"
        record = read_json(path)
        if text_digest(path.read_text(encoding="utf-8")) != entry.record:
            raise MergestreamError(f"{path} is damaged: its digest does not match the manifest")
        with open_checkpoint(path.with_name("sketch.safetensors")) as sketch:
            if "sketch" not in sketch.tensors or tensor_digest(sketch.read("sketch")) != record["sketch"]:
                raise MergestreamError(f"{path.parent} is damaged: the digest of the sketch does not match")
        if not record["heads"]:
            return
        with self.open_heads(entry.name) as heads:
            for name, digest in record["heads"].items():
                if name not in heads.tensors or tensor_digest(heads.read(name)) != digest:
                    raise MergestreamError(f"{path.parent} is damaged: the digest of head {name} does not match")

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
    stem = path.stem if path.suffix in (".safetensors", ".bin", ".pt", ".pth") else path.name
    candidates = (stem if i == 1 else f"{stem}-{i}" for i in range(1, len(taken) + 2))
    return next(candidate for candidate in candidates if candidate not in taken)
