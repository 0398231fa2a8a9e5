"""`Store`: the experts of a base model, in a directory or a bucket. Its methods may import upwards, inside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.base.model import BaseModel
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.engine import Engine, LocalEngine
from mergestream.experts import ExpertSource
from mergestream.progress import Progress, default_progress
from mergestream.storage import Storage, local_path, open_storage
from mergestream.store import transaction
from mergestream.store.expert import Expert
from mergestream.store.manifest import Manifest
from mergestream.store.snapshot import Snapshot

if TYPE_CHECKING:
    from typing_extensions import Self

    from mergestream.experts.vocabulary import Vocab
    from mergestream.export.adapter import Energy
    from mergestream.export.adapter_config import Server
    from mergestream.export.routed import RoutedExport
    from mergestream.inputs.reading import Inputs, Source
    from mergestream.merging.interference import Interference
    from mergestream.methods.base import Method
    from mergestream.report.diagnostics import Survival
    from mergestream.report.scores import Scores
    from mergestream.store.inspect import Inspection


class Store:
    """A directory, or a folder in a bucket (``s3://…``), that keeps all experts added so far.

    ```python
    store = Store.create("store", base="path/or/hub-id")
    store.add("expert-1")
    store.export("merged")
    ```
    """

    def __init__(
        self,
        path: str | Path | Storage,
        *,
        engine: Engine | None = None,
        progress: Progress | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        """Open a store; ``manifest`` is that of one that was made just now."""
        self.storage = open_storage(path)
        if manifest is None:
            self.storage.check()
        self.manifest = manifest or Manifest.load(self.storage)
        self.moved_base: BaseModel | None = None  # where the base was found, if the store is read-only
        self.progress = progress or default_progress()
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
        config_only: bool = False,
        engine: Engine | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Make an empty store for a base model; ``method`` is one, such as `OPCM`, or its name (the ledger by default).

        ``linear``, ``not_linear`` and ``heads`` are globs over tensor names: which weights are (not) linear, and which
        tensors stay with each expert. ``keep`` is the number of earlier steps that are kept for ``undo``. With
        ``config_only`` the base's weights are not read before a full export or a full checkpoint needs them.
        """
        from mergestream.methods import as_method
        from mergestream.store.maintain import create_store

        storage, globs = open_storage(path), {"linear": linear, "not_linear": not_linear, "heads": heads}
        manifest = create_store(storage, as_method(method), base, keep, config_only, engine, progress, **globs)
        return cls(storage, engine=engine, progress=progress, manifest=manifest)

    def __repr__(self) -> str:
        return f"<Store {str(self.storage)!r}: {self.manifest.summary}, base {self.manifest.base.source!r}>"

    @property
    def history(self) -> tuple[Expert, ...]:
        """The experts in their order."""
        return self.manifest.history

    @property
    def path(self) -> Path:
        """The directory of a local store."""
        return self.storage.path() or local_path(str(self.storage))

    @cached_property
    def method(self) -> Method:
        return self.manifest.make_method()

    @property
    def sources(self) -> tuple[str, ...]:
        """The store itself, its base and its experts: no output is written there."""
        return str(self.storage), self.manifest.base.source, *(entry.source for entry in self.manifest.history)

    def refresh(self) -> None:
        """See what other processes have committed: read the manifest if it has changed."""
        if not self.storage.is_current(self.manifest.version):
            self.manifest = Manifest.load(self.storage)
        if self.moved_base:
            self.manifest = dataclasses.replace(self.manifest, base=self.moved_base)

    def snapshot(self, step: int | None = None) -> Snapshot:
        """The store after a step (the last one by default), open for reading."""
        return transaction.retried(self, partial(transaction.open_snapshot, self, step))

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
        evaluate_timeout: float | None = 3600,
        log: str | Sequence[str] = (),
        inputs: Source | Inputs | None = None,
    ) -> Expert:
        """Add an expert as one durable step; if it fails or is interrupted, the store is as before.

        ``expert`` is a path, a hub id, a torch module or a state dict. The same call resumes one that was interrupted.
        An expert that was added already, or was not made from the base, is refused unless it is allowed. ``vocab``
        (``base``, ``union`` or ``grow``) says what becomes of tokens that the base lacks. ``heads`` are globs
        of tensors that it lacks, to stay with each expert. ``gates`` are conditions such as ``kept>=0.6``. ``evaluate``
        is a command that is run on the merged model first, with ``{model}`` for its directory, for ``evaluate_timeout``
        seconds at most: the score is the last number that it prints, or the mean of what it writes to ``{scores}``.
        ``log`` sends the numbers of the step to a tracker (``wandb:my-project``). ``inputs`` are those of `calibrate`.
        """
        from mergestream.report.gates import Gatekeeper
        from mergestream.store.add import add_expert
        from mergestream.tracking import parse_trackers, track

        gatekeeper = Gatekeeper.of(gates, evaluate, self.manifest, evaluate_timeout)
        trackers = parse_trackers(log, self)
        allowed = {"allow_duplicate": allow_duplicate, "allow_other_base": allow_other_base}
        options: dict[str, Any] = {"partial": partial, "ignore": ignore, "vocab": vocab, "heads": heads, **allowed}
        options |= {"measure_distance": gatekeeper.asks_for("distance"), "inputs": inputs}
        added = add_expert(self, expert, name, review=gatekeeper.review, **options)
        track(trackers, self, added)
        return added

    def calibrate(self, name: str, inputs: Source | Inputs, expert: ExpertSource | None = None) -> Expert:
        """Run an expert of a ledger on a few unlabelled ``inputs``, and keep statistics of them, for better merges and
        for routing: a file, a directory of images, an iterable, or `Inputs`. ``expert`` is where it is now."""
        from mergestream.store.calibrate import calibrate_expert

        return calibrate_expert(self, name, inputs, expert)

    def inspect(
        self,
        expert: ExpertSource,
        *,
        partial: bool = False,
        ignore: Sequence[str] = (),
        vocab: Vocab | None = None,
        heads: Sequence[str] = (),
    ) -> Inspection:
        """What adding an expert would do; changes nothing."""
        from mergestream.store.inspect import inspect_expert

        options = {"partial": partial, "ignore": ignore, "vocab": vocab, "heads": heads}
        return transaction.retried(self, lambda: inspect_expert(self, expert, options))

    def undo(self) -> Expert:
        """Take back the last `add`, `remove` or `calibrate`; returns the entry that was taken back."""
        from mergestream.store.maintain import undo_last

        return undo_last(self)

    def remove(self, name: str) -> Expert:
        """Take any expert out of a ledger; returns its entry. Other methods can only `undo`."""
        from mergestream.store.maintain import remove_expert

        return remove_expert(self, name)

    def keep(self, steps: int) -> None:
        """Keep this number of earlier steps for `undo` from now on; older ones are deleted."""
        from mergestream.store.maintain import keep_steps

        keep_steps(self, steps)

    def gc(self) -> int:
        """Delete what killed or failed commands have left, also what could be resumed; returns the bytes."""
        from mergestream.store.maintain import collect_garbage

        return collect_garbage(self)

    def verify(self, *, base: bool = True) -> None:
        """Recompute every digest, with or without those of the base; raises at the first fault."""
        from mergestream.report.scores import attached
        from mergestream.store.maintain import verify_files

        transaction.retried(self, lambda: verify_files(self, base))
        attached(self)

    def relocate(self, base: str | Path) -> None:
        """Refer to the base at another path, once its digest is checked; if the store is read-only, only from here."""
        from mergestream.store.maintain import relocate_base

        relocate_base(self, base)

    def refuse_output(self, path: str) -> None:
        """Raise if ``path`` is not on a disk, or lies in the store or in a model that it was made of."""
        from mergestream.export.places import refuse_overlap

        refuse_overlap(local_path(path), *self.sources)

    def export(
        self,
        out: str | Path,
        *,
        readout: str | None = None,
        only: Sequence[str] = (),
        without: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
        scale: str | float | None = None,
        dtype: str | None = None,
        task: str | None = None,
        files_from: str | None = None,
        max_shard_size: int = DEFAULT_SHARD_SIZE,
        overwrite: bool = False,
        command: str | None = None,
    ) -> Path:
        """Write the merged model as a Hugging Face directory.

        ``readout`` is ``agree`` (the default for a ledger), ``tempered`` (the default where an adapter is merged),
        ``outputs``, ``regress``, ``tsv``, ``iso``, ``sum`` or ``expert:NAME``; for other methods ``plain`` or ``iso``.
        Experts of a ledger can be selected (``only``, ``without``) and weighted (``weights``).
        ``scale`` is a number, or ``adaptive``, ``sqrt`` or ``mean`` where the readout adds up. ``task`` names the
        expert whose head replaces the base's (with ``expert:NAME`` that expert, if it has one), and ``files_from`` the
        expert, or ``base``, with the chat template, special tokens and generation settings. ``command`` goes into the
        model card.
        """
        from mergestream.export.directory import Output, ReadoutChoice
        from mergestream.export.model import exporting, with_head, write_model

        output = Output(Path(out), dtype, max_shard_size, overwrite, command)
        choice = ReadoutChoice(readout, only, without, weights or {}, scale, task, files_from)
        with exporting(self, output) as (snapshot, target):
            write_model(snapshot, target, with_head(snapshot, target, choice))
        return output.path

    def export_adapter(
        self,
        out: str | Path,
        *,
        readout: str | None = None,
        only: Sequence[str] = (),
        without: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
        rank: int | None = None,
        server: Server | None = None,
        layout: str = "peft",
        scale: str | float | None = None,
        dtype: str | None = None,
        overwrite: bool = False,
        command: str | None = None,
    ) -> Energy:
        """Write the merged task vector as a PEFT adapter, exactly or in one ``rank``; returns what was cut off, or was
        left out because the ``server`` (``vllm``) refuses it. ``layout``: ``peft``, ``diffusers`` or ``kohya``."""
        from mergestream.export.adapter import AdapterForm, export_merged_adapter
        from mergestream.export.directory import Output, ReadoutChoice

        choice = ReadoutChoice(readout, only, without, weights or {}, scale)
        output = Output(Path(out), dtype, overwrite=overwrite, command=command)
        return export_merged_adapter(self, output, choice, AdapterForm(rank, server, layout))

    def export_adapters(
        self,
        out: str | Path,
        *,
        rank: int | None = None,
        server: Server | None = None,
        layout: str = "peft",
        dtype: str | None = None,
        overwrite: bool = False,
        command: str | None = None,
    ) -> dict[str, Energy]:
        """Write every expert of a ledger as a PEFT adapter of the base, in a directory of its own below ``out``."""
        from mergestream.export.adapter import AdapterForm, export_expert_adapters
        from mergestream.export.directory import Output

        output = Output(Path(out), dtype, overwrite=overwrite, command=command)
        return export_expert_adapters(self, output, AdapterForm(rank, server, layout))

    def export_routed(
        self,
        out: str | Path,
        *,
        readout: str | None = None,
        only: Sequence[str] = (),
        without: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
        rank: int | None = None,
        server: Server | None = None,
        scale: str | float | None = None,
        dtype: str | None = None,
        max_shard_size: int = DEFAULT_SHARD_SIZE,
        with_base: bool = False,
        overwrite: bool = False,
        command: str | None = None,
    ) -> RoutedExport:
        """Write all experts of a ledger as PEFT adapters, a merged adapter, and a router: what `RoutedModel` loads.

        ``with_base`` adds a copy of the base; the other options are those of `export_adapter`.
        """
        from mergestream.export.adapter import AdapterForm
        from mergestream.export.directory import Output, ReadoutChoice
        from mergestream.export.routed import export_routed

        output = Output(Path(out), dtype, max_shard_size, overwrite, command)
        choice = ReadoutChoice(readout, only, without, weights or {}, scale)
        return export_routed(self, output, choice, AdapterForm(rank, server, any_parameter=True), with_base)

    def push(self, address: str, *, private: bool = False) -> str:
        """Upload the store as it is now to ``hf://ORG/NAME``, in one commit; returns the repository's address."""
        from mergestream.hub.transfer import push_store

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
        """Download a store from ``hf://ORG/NAME[@revision]`` and verify it; ``base`` is where its base is here."""
        from mergestream.hub.transfer import pull_store

        pull_store(address, Path(path), base, lambda work: cls(work, engine=engine, progress=progress))
        return cls(path, engine=engine, progress=progress)

    def similarity(self) -> Interference:
        """The cosines of all task vectors in a ledger, from their entries; their damage and overlap."""
        from mergestream.report.diagnostics import similarity

        return transaction.retried(self, lambda: similarity(self))

    def survival(self) -> Survival:
        """The share of each expert, per tensor, that entered the state, or that its entry in a ledger holds now."""
        from mergestream.report.diagnostics import survival

        return transaction.retried(self, lambda: survival(self))

    def damage(self) -> dict[str, float]:
        """The predicted damage of each expert in a ledger, by name."""
        with self.snapshot() as snapshot:
            return snapshot.reading(self.engine).damage(self.engine)

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
        """Keep an evaluation: ``matrix[i][j]`` is the score on task j after i + 1 steps, with tasks in the order of
        their experts; ``base`` and ``experts`` are the scores of the base, and of each expert on its own task."""
        from mergestream.report.scores import Scores, attach

        scores = Scores.of(tasks, matrix, base=base, experts=experts, metric=metric)
        with transaction.writing(self):
            attach(self, scores)
        return scores
