"""Read the merged task vector out of a store as a PEFT adapter of its base."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergestream.algebra.bounds import matrix_shape
from mergestream.algebra.lowrank import LowRank
from mergestream.algebra.svd import thin_svd
from mergestream.base.config_only import ConfigOnlyBase
from mergestream.base.model import BaseModel, BaseTensor
from mergestream.checkpoints import FLOATS, Checkpoint, open_checkpoint
from mergestream.digest import combined_digest, tensor_digest
from mergestream.engine import Engine
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts.adapters.config import AdapterConfig
from mergestream.export.agreement import agreement, refusals
from mergestream.export.card import CardFacts, model_card
from mergestream.export.directory import Output
from mergestream.export.model import Illustrate, written_form
from mergestream.export.peft import AdaptedModule, Energy, Kind, adapter_config, modules_saved, write_adapter
from mergestream.export.recipe import Form, Recipe
from mergestream.ledger.selection import ONE_EXPERT, Selection
from mergestream.merging.cost import WORKSPACE
from mergestream.merging.entries import EntriesReading
from mergestream.merging.reading import Reading
from mergestream.merging.step import overflow_explained, refuse_overflow
from mergestream.progress import Progress
from mergestream.store.snapshot import Snapshot


def export_adapter(snapshot: Snapshot, output: Output, engine: Engine, progress: Progress, **choices: Any) -> Energy:
    """`write_merged` to a directory that is replaced whole, or not at all."""
    with output.draft() as draft:
        return write_merged(snapshot, draft, output, engine, progress, **choices)


def write_merged(
    snapshot: Snapshot,
    draft: Path,
    output: Output,
    engine: Engine,
    progress: Progress,
    *,
    selection: Selection | None = None,
    rank: int | None = None,
    scale: str | float | None = None,
    illustrate: Illustrate | None = None,
) -> Energy:
    """Write scale · direction as factors, exactly or cut down to ``rank``; returns what that leaves out.

    Weights whose state is dense have no small exact rank: they need ``rank``. Other dense tensors (biases,
    norms) go along whole, as ``modules_to_save`` do.
    """
    content = _Content.of(snapshot, snapshot.reading(engine, selection, progress), rank)
    factor = content.reading.scale(scale, engine)
    _tell({output.path.name: content}, progress)
    with progress.task(f"writing {output.path.name}", content.count) as advance:
        energy = content.write(draft, output, engine, factor, illustrate, lambda name: advance(1))
    form = Form("lora", rank, output.dtype, pictures=bool(illustrate))
    output.mark(draft, Recipe.of(snapshot, form, _digest(draft), selection, scale).to_json())
    return energy


def export_adapters(
    snapshot: Snapshot, output: Output, engine: Engine, progress: Progress, rank: int | None = None
) -> dict[str, Energy]:
    """`write_each` to a directory that is replaced whole, or not at all."""
    with output.draft() as draft:
        return write_each(snapshot, draft, output, engine, progress, rank)


def write_each(
    snapshot: Snapshot, draft: Path, output: Output, engine: Engine, progress: Progress, rank: int | None = None
) -> dict[str, Energy]:
    """Write every expert of a ledger as an adapter in a directory of its own name."""
    names = snapshot.manifest.names
    for name in names:
        if name in (".", "..") or Path(name).name != name:
            raise UsageError(f"{name} cannot be the name of a directory; export it alone, with --readout expert:{name}")
    contents = {
        name: _Content.of(snapshot, snapshot.reading(engine, Selection(f"{ONE_EXPERT}{name}")), rank) for name in names
    }
    _tell(contents, progress)
    total = sum(content.count for content in contents.values())
    energies = {}
    with progress.task(f"writing {output.path.name}", total) as advance:
        for name, content in contents.items():
            (draft / name).mkdir()
            energies[name] = content.write(draft / name, output, engine, 1.0, None, lambda name: advance(1))
    digest = combined_digest({name: _digest(draft / name) for name in names})
    output.mark(draft, Recipe.of(snapshot, Form("loras", rank, output.dtype), digest).to_json())
    return energies


def _digest(adapter: Path) -> str:
    """Of the tensors that were written."""
    with open_checkpoint(adapter / "adapter_model.safetensors") as written:
        return combined_digest({name: tensor_digest(written.read(name)) for name in written.tensors})


@dataclass(frozen=True)
class _Content:
    """What an adapter holds: factors by the name of their tensor, and whole parameters with the name of theirs."""

    snapshot: Snapshot
    reading: Reading
    modules: dict[str, AdaptedModule]
    whole: dict[str, str]
    told: AdapterConfig
    notes: list[str]
    """What its inputs do not agree on, and what those who serve adapters have against it"""

    @classmethod
    def of(cls, snapshot: Snapshot, reading: Reading, rank: int | None) -> _Content:
        modules, whole = _sort(reading, rank)
        experts = snapshot.manifest.history
        if isinstance(reading, EntriesReading):
            experts = tuple(snapshot.manifest.expert(expert.name) for expert in reading.experts)
        told, notes = agreement(snapshot, experts)
        notes += refusals(adapter_config(list(modules.values()), whole, told))
        if speaking := [expert.name for expert in experts if snapshot.tokens(expert)]:
            notes.append(f"an adapter has no place for the new tokens of {', '.join(speaking)}; --format full has")
        return cls(snapshot, reading, modules, whole, told, notes)

    @property
    def count(self) -> int:
        return len(self.modules) + len(self.whole)

    def write(
        self,
        directory: Path,
        output: Output,
        engine: Engine,
        scale: float,
        illustrate: Illustrate | None,
        advance: Callable[[str], None],
    ) -> Energy:
        """The adapter and its card."""
        model, reading, dtype = self.reading.model, self.reading, FLOATS[output.dtype or "float32"]
        with ExitStack() as stack:
            base: Checkpoint = ConfigOnlyBase(model.source, None, model.tensors)
            if self.whole:
                base = stack.enter_context(self.snapshot.manifest.open_base())

            def read_whole(parameter: str) -> Tensor:
                name = self.whole[parameter]
                pieces = [piece for _, piece in reading.pieces(name, base, scale, dtype)]
                return torch.cat(pieces).view(model.tensors[name].shape)

            energy = write_adapter(
                directory,
                self.modules,
                lambda name: _factors(reading, name) * scale,
                whole={parameter: written_form(model.tensors[name], dtype) for parameter, name in self.whole.items()},
                read_whole=read_whole,
                told=self.told,
                engine=engine,
                memory=self._memory(),
                dtype=dtype,
                advance=advance,
            )
        pictures = illustrate(directory) if illustrate else {}
        distance = math.sqrt(energy.total + scale**2 * math.fsum(reading.norm2.values()))
        facts = CardFacts.of(self.snapshot, reading, scale, distance, None, output.command, pictures)
        (directory / "README.md").write_text(model_card(facts, library="peft"), encoding="utf-8")
        return energy

    def _memory(self) -> dict[str, int]:
        """Of what is written: a merged matrix that has no factors is decomposed."""
        taken = self.reading.memory
        for name, module in self.modules.items():
            if self.reading.rank_bound(name) is None:
                taken[name] = max(taken[name], WORKSPACE * torch.float32.itemsize * math.prod(module.shape))
        return taken | {parameter: taken[name] for parameter, name in self.whole.items()}


def _tell(contents: Mapping[str, _Content], progress: Progress) -> None:
    """The notes on adapters, each once, by the names of those that it is about."""
    about: dict[str, list[str]] = {}
    for name, content in contents.items():
        for note in content.notes:
            about.setdefault(note, []).append(name)
    for note, names in about.items():
        progress.note(f"{', '.join(names)}: {note}")


def _sort(reading: Reading, rank: int | None) -> tuple[dict[str, AdaptedModule], dict[str, str]]:
    """The modules that get factors, by the name of their tensor, and whole parameters with the name of theirs."""
    model = reading.model
    called = {stored: name for name, stored in model.spellings.items()}
    modules: dict[str, AdaptedModule] = {}
    whole: dict[str, str] = {}
    for name in model.merged:
        tensor, parameter = model.tensors[name], called.get(name, name)
        module, _, leaf = parameter.rpartition(".")
        bound = reading.rank_bound(name)
        if bound is None and reading.is_zero(name):
            continue
        if bound is None and not _is_weight(tensor, leaf):
            if leaf not in ("weight", "bias"):
                raise MergestreamError(f"{name} has changed, and an adapter cannot hold it; export with --format full")
            whole[parameter] = name
            continue
        if bound is None and rank is None:
            raise MergestreamError(
                f"the state of {name} is dense, so it has no small exact rank; choose one with --rank K, or export "
                "with --format full"
            )
        most = min(matrix_shape(tensor.shape)) if bound is None else bound
        if most:
            chosen = most if rank is None else min(most, rank)
            modules[name] = AdaptedModule(module, _kind(model, name), chosen, tensor.shape)
    # PEFT takes another module than those with factors as a whole, unless only its bias has changed.
    saved = modules_saved({module.path for module in modules.values()}, whole)
    for name in model.tensors:
        parameter = called.get(name, name)
        if parameter.rpartition(".")[0] in saved:
            whole[parameter] = name
    return modules, whole


def _is_weight(tensor: BaseTensor, leaf: str) -> bool:
    """Whether PEFT has factors for it."""
    return (
        leaf == "weight"
        and (tensor.role in ("linear", "embedding") or (tensor.module or "").startswith("torch.nn.Conv"))
        and len(tensor.shape) != 3
    )


def _kind(model: BaseModel, name: str) -> Kind:
    if model.tensors[name].role == "embedding":
        return "embedding"
    return "conv1d" if name in model.conv1d else "linear"


def _factors(reading: Reading, name: str) -> LowRank:
    with overflow_explained(name):
        direction = reading.direction(name)
        if isinstance(direction, LowRank):
            return direction
        svd = thin_svd(direction.flatten(1))
        left = svd.u * svd.s.to(svd.u.dtype)
        refuse_overflow(left)
        return LowRank.from_factors(left, svd.v.T, direction.dtype, tuple(direction.shape))
