"""Read the merged task vector out of a store as a PEFT adapter of its base."""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch
from torch import Tensor

from mergestream.algebra.bounds import matrix_shape
from mergestream.algebra.lowrank import LowRank
from mergestream.algebra.svd import thin_svd
from mergestream.base.model import BaseModel, BaseTensor
from mergestream.base.skeleton import Skeleton
from mergestream.checkpoints import FLOATS, Checkpoint
from mergestream.checkpoints.location import without_revision
from mergestream.engine import Engine
from mergestream.errors import MergestreamError
from mergestream.export.card import CardFacts, model_card
from mergestream.export.directory import Output
from mergestream.export.model import Illustrate, written_form
from mergestream.export.peft import AdaptedModule, Energy, Kind, modules_saved, write_adapter
from mergestream.files import write_text
from mergestream.progress import Progress
from mergestream.store.snapshot import Snapshot


def export_adapter(
    snapshot: Snapshot,
    output: Output,
    engine: Engine,
    progress: Progress,
    *,
    rank: int | None = None,
    scale: str | float | None = None,
    command: str | None = None,
    illustrate: Illustrate | None = None,
) -> Energy:
    """Write scale · direction as factors, exactly or cut down to ``rank``; returns what that leaves out.

    Weights whose state is dense have no small exact rank: they need ``rank``. Other dense tensors (biases,
    norms) go along whole, as ``modules_to_save`` do.
    """
    manifest, last, readout = snapshot.manifest, snapshot.last, snapshot.readout(engine)
    model = manifest.base
    with ExitStack() as stack:
        modules, whole = _sort(snapshot, rank)
        base: Checkpoint = Skeleton(model.source, None, model.tensors)
        if whole:
            base = stack.enter_context(manifest.open_base())
        factor = readout.scale(scale, last.mean_norm, last.direction_norm, engine)

        def read(name: str) -> LowRank:
            return _factors(readout.direction(name)) * factor

        def read_whole(parameter: str) -> Tensor:
            pieces = [piece for _, piece in readout.pieces(whole[parameter], base, factor, dtype)]
            return torch.cat(pieces).view(model.tensors[whole[parameter]].shape)

        dtype = FLOATS[output.dtype or "float32"]
        draft = stack.enter_context(output.draft())
        with progress.task(f"writing {output.path.name}", len(modules) + len(whole)) as advance:
            energy = write_adapter(
                draft,
                modules,
                read,
                whole={parameter: written_form(model.tensors[name], dtype) for parameter, name in whole.items()},
                read_whole=read_whole,
                base=without_revision(model.source),
                dtype=dtype,
                advance=lambda name: advance(1),
            )
        pictures = illustrate(draft) if illustrate else {}
        distance = math.sqrt(energy.total + factor**2 * math.fsum(readout.norm2.values()))
        about = model.source, manifest.method, manifest.parameters, manifest.history
        facts = CardFacts(*about, factor, distance, command=command, pictures=pictures)
        write_text(draft / "README.md", model_card(facts, library="peft"))
    return energy


def _sort(snapshot: Snapshot, rank: int | None) -> tuple[dict[str, AdaptedModule], dict[str, str]]:
    """The modules that get factors, by the name of their tensor, and whole parameters with the name of theirs."""
    model = snapshot.manifest.base
    called = {stored: name for name, stored in model.spellings.items()}
    modules: dict[str, AdaptedModule] = {}
    whole: dict[str, str] = {}
    for name in model.merged:
        tensor, parameter = model.tensors[name], called.get(name, name)
        module, _, leaf = parameter.rpartition(".")
        bound = snapshot.rank_bound(name)
        if bound is None and snapshot.is_zero(name):
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


def _factors(direction: Tensor | LowRank) -> LowRank:
    if isinstance(direction, LowRank):
        return direction
    svd = thin_svd(direction.flatten(1))
    return LowRank.from_factors(svd.u * svd.s.to(svd.u.dtype), svd.v.T, direction.dtype, tuple(direction.shape))
