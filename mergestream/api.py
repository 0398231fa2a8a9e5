"""The store as Python users and the command line know it: a durable directory, and all that is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial as bind
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.errors import first_line
from mergestream.experts import ExpertSource
from mergestream.progress import Progress
from mergestream.store.directory import StoreDirectory
from mergestream.store.history import History
from mergestream.store.manifest import Expert, Manifest
from mergestream.store.records import TensorRecord, tensor_records

if TYPE_CHECKING:
    from typing_extensions import Self

    from mergestream.engine import Engine
    from mergestream.experts.vocabulary import Vocab
    from mergestream.export.adapter import Energy
    from mergestream.export.model import DrawPictures
    from mergestream.report.diagnostics import Similarity, Survival
    from mergestream.report.scores import Scores
    from mergestream.store.snapshot import Snapshot


class Store(StoreDirectory):
    """A directory, or a folder in a bucket (``s3://…``), that keeps the merged state of all models absorbed so far.

    ```python
    store = Store.create("store", base="path/or/hub-id")
    store.add("expert-1")
    store.export("merged")
    ```
    """

    def __repr__(self) -> str:
        return f"<Store {str(self.place)!r}: {self.manifest.told}, base {self.manifest.base.source!r}>"

    def _repr_html_(self) -> str:
        return self.history.table(repr(self)[1:-1])

    @property
    def history(self) -> History:
        """The absorbed models, in order; ``to_frame()`` makes a data frame of them."""
        return History(self.manifest.history)

    def add(
        self,
        expert: ExpertSource,
        name: str | None = None,
        *,
        partial: bool = False,
        ignore: Sequence[str] = (),
        vocab: Vocab | None = None,
        heads: Sequence[str] = (),
        allow_duplicate: bool = False,
        allow_other_base: bool = False,
        gates: Sequence[str] = (),
        evaluate: str | None = None,
        log: str | Sequence[str] = (),
    ) -> Expert:
        """Absorb a model as one durable step; if it fails or is interrupted, the store is as before.

        ``expert`` is a path, a hub id, a torch module or a state dict.

        The same call resumes one that was interrupted. A model that was absorbed already, or that was not made from the
        base, is refused unless it is allowed. ``vocab`` says what becomes of tokens that the base has not (``base``,
        ``union`` or ``grow``: docs: vocabulary.md); ``heads`` are globs of tensors that the base has not, which are
        kept with this expert and all that follow (docs: heads.md). ``gates`` are conditions such as ``kept>=0.6``;
        ``evaluate`` is a command that is run on the merged model before it counts, with ``{model}`` for its
        directory; the last number that it prints is ``score``, or the mean of what it writes to ``{scores}``.
        ``log`` sends the numbers of the step to ``wandb``, ``mlflow``, ``tensorboard`` or ``jsonl``, perhaps with a
        target as in ``wandb:my-project``; where that fails, there is a note.
        """
        from mergestream.report.gates import Gatekeeper
        from mergestream.tracking.trackers import parse_trackers, track

        gatekeeper, trackers = Gatekeeper.of(gates, evaluate, self.manifest), parse_trackers(log, self)
        absorbed = self.absorb(
            expert,
            name,
            partial,
            ignore,
            allow_duplicate,
            allow_other_base,
            vocab=vocab,
            heads=heads,
            measure_distance=gatekeeper.asks_for("distance"),
            review=gatekeeper.review,
        )
        track(trackers, self, absorbed)
        return absorbed

    def export(
        self,
        out: str | Path,
        *,
        readout: str | None = None,
        only: Sequence[str] = (),
        without: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
        balance: bool = False,
        scale: str | float | None = None,
        dtype: str | None = None,
        task: str | None = None,
        max_shard_size: int = DEFAULT_SHARD_SIZE,
        overwrite: bool = False,
        command: str | None = None,
        pictures: bool = True,
    ) -> Path:
        """Write the merged model as a Hugging Face directory.

        ``readout`` says how experts become one model: of a ledger ``agree`` (the default), ``tempered`` (the default
        where an adapter is merged), ``tsv``, ``iso``, ``sum`` or ``expert:NAME``, of the others ``plain`` or ``iso``.
        Of a ledger the experts can be chosen (``only``, ``without``), weighted (``weights``, by name) and balanced
        (``balance``). ``scale`` is the readout's own by default, else a number, or ``adaptive``, ``sqrt`` or ``mean``
        where it adds up; ``dtype`` is the base's by default, ``task`` names the expert whose head to put in place of
        the base's, ``command`` goes into the model card, and ``pictures`` beside it.
        """
        from mergestream.export.directory import Output
        from mergestream.export.model import Target, write_model
        from mergestream.export.recipe import ReadoutChoice

        output = Output(Path(out), dtype, max_shard_size, overwrite, command)
        output.keep_off(*self.sources)
        choice = ReadoutChoice(readout, only, without, weights or {}, balance, scale, task)
        with self.snapshot() as snapshot, output.draft() as draft:
            draw = self._picture_drawer(snapshot) if pictures else None
            write_model(snapshot, Target(draft, output, self.engine, self.progress), choice, draw)
            tasks = snapshot.tasks
        if task is None and tasks:
            base = "the base's head" if snapshot.manifest.base.has_head else "no head, like the base"
            self.progress.note(f"{output} has {base}; --task adds the head of an expert: {', '.join(tasks)}")
        return output.path

    def export_adapter(
        self,
        out: str | Path,
        *,
        readout: str | None = None,
        only: Sequence[str] = (),
        without: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
        balance: bool = False,
        rank: int | None = None,
        scale: str | float | None = None,
        dtype: str | None = None,
        overwrite: bool = False,
        command: str | None = None,
    ) -> Energy:
        """Write the merged task vector as a PEFT adapter of the base, exactly or cut down to ``rank``; returns how much
        of it was left out. What it is made of is chosen as in `export`."""
        from mergestream.export.adapter import write_merged_adapter
        from mergestream.export.directory import Output
        from mergestream.export.model import Target
        from mergestream.export.recipe import ReadoutChoice

        output = Output(Path(out), dtype, overwrite=overwrite, command=command)
        output.keep_off(*self.sources)
        choice = ReadoutChoice(readout, only, without, weights or {}, balance, scale)
        with self.snapshot() as snapshot, output.draft() as draft:
            draw = self._picture_drawer(snapshot)
            target = Target(draft, output, self.engine, self.progress)
            return write_merged_adapter(snapshot, target, choice, rank, draw)

    def export_adapters(
        self,
        out: str | Path,
        *,
        rank: int | None = None,
        dtype: str | None = None,
        overwrite: bool = False,
        command: str | None = None,
    ) -> dict[str, Energy]:
        """Write every expert of a ledger as a PEFT adapter of the base, in a directory of its own below ``out``."""
        from mergestream.export.adapter import write_expert_adapters
        from mergestream.export.directory import Output
        from mergestream.export.model import Target

        output = Output(Path(out), dtype, overwrite=overwrite, command=command)
        output.keep_off(*self.sources)
        with self.snapshot() as snapshot, output.draft() as draft:
            return write_expert_adapters(snapshot, Target(draft, output, self.engine, self.progress), rank)

    def _picture_drawer(self, snapshot: Snapshot) -> DrawPictures:
        """Draws the pictures of a card; the sketches are read now, because a writer may remove them later."""
        from mergestream.report.diagnostics import similarity

        return bind(draw_pictures, self.progress, snapshot.manifest, similarity(snapshot))

    def similarity(self) -> Similarity:
        """Cosines of all task vectors, from their sketches."""
        from mergestream.report.diagnostics import similarity

        return self.retried(lambda: similarity(self))

    def survival(self) -> Survival:
        """How much of each expert entered the state, and how many directions were protected, per tensor; of a ledger,
        how much of each its entry holds now."""
        from mergestream.report.diagnostics import survival

        return self.retried(lambda: survival(self))

    def damage(self) -> dict[str, float]:
        """The predicted damage of each expert in a ledger, by name."""
        with self.snapshot() as snapshot:
            return snapshot.reading(self.engine).damage(self.engine)

    def refuse_output(self, path: str) -> None:
        """Raise if ``path`` is not on a disk, or lies in the store or in a model that it was made of."""
        from mergestream.export.places import refuse_within
        from mergestream.storage import local_path

        refuse_within(local_path(path), *self.sources)

    def push(self, address: str, *, private: bool = False) -> str:
        """Upload the store as it is now to ``hf://ORG/NAME``, in one commit; returns the address of the repository."""
        from mergestream.hub.stores import push_store

        return push_store(self, address, private=private)

    @classmethod
    def pull(
        cls,
        address: str,
        path: str | Path,
        *,
        base: str | Path | None = None,
        engine: Engine | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Download a store from ``hf://ORG/NAME[@revision]``, and verify it before it takes its place; ``base`` is
        where its base is here, if it is not where it was, or on the hub."""
        from mergestream.hub.stores import pull_store

        def check(work: Path) -> None:
            store = cls(work, engine=engine, progress=progress)
            if base is not None:
                store.relocate(base)
            store.verify(base=False)

        pull_store(address, Path(path), check)
        return cls(path, engine=engine, progress=progress)

    def verify(self, *, base: bool = True) -> None:
        """Recompute every digest: the base's, the kept steps', the records' and the scores'; raises at the first
        fault. Without the ``base`` only those of the store itself."""
        from mergestream.report.scores import attached

        super().verify(base=base)
        attached(self)

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
        with self.writing():
            attach(self, scores)
        return scores

    def tensor_records(self, number: int) -> dict[str, TensorRecord]:
        """What step ``number`` did to each tensor: ``norm``, ``kept`` (the share) and ``protected``."""
        return tensor_records(self.place, self.history[number - 1], self.manifest.base.merged)


def draw_pictures(progress: Progress, manifest: Manifest, similarity: Similarity, directory: Path) -> dict[str, str]:
    """Draw the pictures of a model card; returns their file names and captions. A failure is a note."""
    try:
        from mergestream.report.figures import write_pictures

        return write_pictures(directory, manifest, similarity)
    except ImportError:
        progress.note("the model card has no pictures: they need matplotlib; pip install 'mergestream[report]'")
    except Exception as error:
        progress.note(f"the model card has no pictures: they could not be drawn ({first_line(error)})")
    return {}
