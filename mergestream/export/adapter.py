"""Export a merged task vector, or every expert of a ledger, as PEFT adapters of the base."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mergestream.algebra.lowrank import LowRank, squared_norm
from mergestream.algebra.pieces import matrix_shape
from mergestream.algebra.svd import thin_svd
from mergestream.base.model import BaseTensor, ConfigOnlyBase
from mergestream.checkpoints import FLOATS, Checkpoint, SafetensorsWriter, TensorSpec, open_checkpoint, torch_dtype
from mergestream.checkpoints.layout import CARD
from mergestream.digest import combined_digest, tensor_digest
from mergestream.engine import Engine
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts.adapters.adapter import PREFIX
from mergestream.experts.adapters.config import CONFIG_NAME
from mergestream.export.adapter_config import (
    STEMS,
    Server,
    adapter_config,
    common_fields,
    is_for_vllm,
    layout_names,
    saved_modules,
    serving_notes,
    vllm_rank,
)
from mergestream.export.card import model_card
from mergestream.export.directory import DEFAULT_CHOICE, Output, ReadoutChoice
from mergestream.export.model import Target, cast_spec, exporting
from mergestream.files import write_json
from mergestream.ledger.selection import ONE_EXPERT, Selection
from mergestream.merging.plan import WORKSPACE
from mergestream.merging.reading import Reading, cast
from mergestream.merging.step import overflow_explained, refuse_overflow
from mergestream.sizes import shorten_list
from mergestream.store.snapshot import Snapshot

if TYPE_CHECKING:
    from mergestream.store.store import Store

Kind = Literal["linear", "conv1d", "embedding"]
"""PEFT stores B·A for weights that are output × input (convolutions too), and (B·A)ᵀ for the others"""


@dataclass(frozen=True)
class AdaptedModule:
    """A module with factors: its path, the rank of the factors, and the shape of its weight."""

    path: str
    kind: Kind
    rank: int
    shape: tuple[int, ...]

    @property
    def factor_shapes(self) -> dict[str, tuple[int, ...]]:
        rows, columns = self.shape[0], self.shape[1:]
        if self.kind == "linear":
            return {"A": (self.rank, *columns), "B": (rows, self.rank, *(1 for _ in columns[1:]))}
        return {"A": (self.rank, rows), "B": (columns[0], self.rank)}

    def key(self, factor: str) -> str:
        """The name of a factor in the file."""
        if self.kind == "embedding":
            return f"{PREFIX}{self.path}.lora_embedding_{factor}"
        return f"{PREFIX}{self.path}.lora_{factor}.weight"


@dataclass(frozen=True)
class Energy:
    """Squared norms: of the task vector, and of what a truncation has cut off or a server refuses."""

    total: float
    lost: float
    left_out: float = 0.0
    """What the server refuses; a part of what is lost"""
    held: float = 1.0
    """The share of ‖Δ‖² that the entries of a ledger hold of the expert of which they hold least"""

    @property
    def lost_share(self) -> float:
        return self.lost / self.total if self.total else 0.0


def export_merged_adapter(
    store: Store,
    output: Output,
    choice: ReadoutChoice,
    rank: int | None = None,
    server: Server | None = None,
    layout: str = "peft",
) -> Energy:
    """Write scale · direction as factors, exactly or truncated to ``rank``; returns what is cut off or left out.

    Dense linear weights have no small exact rank, so they need ``rank``. Other dense tensors (biases, norms) are
    written whole, or left out if the ``server`` refuses them.
    """
    with exporting(store, output) as (snapshot, target):
        reading = snapshot.reading(target.engine, choice, target.progress)
        scale = reading.scale(choice.scale, target.engine)
        plan = AdapterPlan.of(snapshot, reading, rank, server, layout, scale=scale)
        return write_adapters({"": plan}, target, {"format": "lora", "rank": rank, "layout": layout}, choice)[""]


def export_expert_adapters(
    store: Store, output: Output, rank: int | None = None, server: Server | None = None, layout: str = "peft"
) -> dict[str, Energy]:
    """Write every expert of a ledger as an adapter, each to a directory of its name."""
    with exporting(store, output) as (snapshot, target):
        names, how = snapshot.manifest.names, {"rank": rank, "server": server, "layout": layout}
        plans = plan_experts(snapshot, target.engine, names, **how)
        return write_adapters(plans, target, {"format": "loras", "rank": rank, "layout": layout})


def plan_experts(snapshot: Snapshot, engine: Engine, names: Sequence[str], **how: Any) -> dict[str, AdapterPlan]:
    """Plan an adapter of each of these experts of a ledger; ``how`` as in `AdapterPlan.of`."""
    plans = {}
    for name in names:
        if name in (".", "..") or Path(name).name != name:
            raise UsageError(f"{name} cannot be the name of a directory; export it alone, with --readout expert:{name}")
        plans[name] = AdapterPlan.of(snapshot, snapshot.reading(engine, Selection(f"{ONE_EXPERT}{name}")), **how)
    return plans


def write_adapters(
    plans: Mapping[str, AdapterPlan],
    target: Target,
    form: Mapping[str, Any],
    choice: ReadoutChoice = DEFAULT_CHOICE,
) -> dict[str, Energy]:
    """Write adapters to folders of the draft, by name (``""`` is the draft itself), and their common recipe."""
    draft, output, _, progress = target
    names_by_note: dict[str, list[str]] = {}
    for name, plan in plans.items():
        for note in plan.notes:
            names_by_note.setdefault(note, []).append(name or output.path.name)
    for note, names in names_by_note.items():  # each note once, with the adapters that it is about
        progress.note(f"{', '.join(names)}: {note}")
    energies, digests = {}, {}
    with progress.task(f"writing {output.path.name}", sum(plan.size for plan in plans.values())) as advance:
        for name, plan in plans.items():
            (draft / name).mkdir(parents=True, exist_ok=True)
            energies[name] = plan.write(draft / name, target, advance)
            plan.write_card(draft / name, target, energies[name])
            if plan.left_out:
                share = energies[name].left_out / energies[name].total if energies[name].total else 0.0
                progress.note(
                    f"{name or output.path.name}: left out, because vLLM may refuse them: "
                    f"{shorten_list(plan.left_out)}, with {share:.3%} of the energy; --format full has everything"
                )
            with open_checkpoint(draft / name / f"{STEMS[plan.layout]}.safetensors") as written:
                digests[name] = combined_digest({key: tensor_digest(written.read(key)) for key in written.tensors})
    digest = digests[""] if "" in digests else combined_digest(digests)
    manifest = next(iter(plans.values())).snapshot.manifest
    output.mark(draft, manifest, form, digest, choice)
    return energies


@dataclass(frozen=True)
class AdapterPlan:
    """What an adapter will contain."""

    snapshot: Snapshot
    reading: Reading
    modules: dict[str, AdaptedModule]
    """The modules with factors, by the name of their tensor"""
    whole: dict[str, str]
    """Parameters that are written whole, with the name of their tensor"""
    config: dict[str, Any]
    notes: list[str]
    scale: float
    cut: int | None
    """The largest rank that is kept; factors of less are padded with zeros to the rank of the module"""
    left_out: dict[str, str]
    """Parameters that are not written because the server refuses them, with the name of their tensor"""
    layout: str
    """``peft``, ``diffusers`` or ``kohya``"""

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        reading: Reading,
        rank: int | None,
        server: Server | None = None,
        layout: str = "peft",
        *,
        scale: float = 1.0,
        any_parameter: bool = False,
    ) -> AdapterPlan:
        """Plan the adapter of scale · direction: all factors of ``rank``, or of a rank and kind that a server takes.

        With ``any_parameter`` it may hold parameters that PEFT ignores, and only `RoutedModel` applies. The notes are
        about servers of PEFT's layout.
        """
        weights, history = reading.weights, snapshot.manifest.history
        experts = [entry for entry in history if weights is None or entry.name in weights]
        modules, whole = _classify(reading, rank, server, any_parameter)
        others = {name: one.path for name, one in modules.items() if not is_for_vllm(one, reading.model)}
        left_out: dict[str, str] = {}
        if server:
            merged = set(reading.model.merged)
            left_out = {parameter: name for parameter, name in whole.items() if name in merged}
            left_out |= {f"{path}.weight": name for name, path in others.items()}
            modules = {name: module for name, module in modules.items() if name not in others}
            if not modules:
                names = shorten_list([entry.name for entry in experts])
                raise MergestreamError(f"vLLM takes no part of the adapter of {names}; export with --format full")
            whole, others = {}, {}
        uniform = vllm_rank(max(module.rank for module in modules.values())) if server else rank
        if uniform is not None:
            modules = {name: replace(module, rank=uniform) for name, module in modules.items()}
        fields, notes = common_fields(snapshot, experts)
        config = adapter_config(list(modules.values()), whole, fields)
        notes += serving_notes(config, list(others.values()))
        if shortfall := snapshot.shortfall(reading):
            notes.append(shortfall)
        if ignored := [name for name in whole if not name.endswith((".weight", ".bias"))]:
            notes.append(f"PEFT ignores {shorten_list(ignored)}, which RoutedModel applies")
        if with_tokens := [expert.name for expert in experts if snapshot.records[expert.name].tokens]:
            names = ", ".join(with_tokens)
            notes.append(f"an adapter cannot hold the new tokens of {names}; export with --format full for them")
        notes = notes if layout == "peft" else []
        return cls(snapshot, reading, modules, whole, config, notes, scale, rank, left_out, layout)

    @property
    def size(self) -> int:
        return len(self.modules) + len(self.whole) + len(self.left_out)

    def write(self, directory: Path, target: Target, advance: Callable[[int], None]) -> Energy:
        """Write the tensors and the config.

        The scaling is 1 everywhere (lora_alpha = r), so that B·A is what is added to a weight.
        """
        reading, tensors, dtype = self.reading, self.reading.model.tensors, FLOATS[target.output.dtype or "float32"]
        paths = {module.path for module in self.modules.values()}
        keys = {parameter: _whole_key(parameter, paths) for parameter in self.whole}
        specs = {
            module.key(factor): TensorSpec(dtype, shape)
            for module in self.modules.values()
            for factor, shape in module.factor_shapes.items()
        }
        specs |= {keys[parameter]: cast_spec(tensors[name], dtype) for parameter, name in self.whole.items()}
        names = layout_names(self.layout, reading.model, specs)
        layout = {names[key]: spec for key, spec in specs.items()}

        def write(name: str) -> Energy:
            if name in self.whole:
                for start, piece in reading.pieces(self.whole[name], base, self.scale, dtype):
                    writer.write_piece(names[keys[name]], start, piece)
                return Energy(0.0, 0.0)
            if name in self.left_out:
                lost = self.scale**2 * reading.direction_norm2(self.left_out[name])
                return Energy(lost, lost, lost)
            module, value = self.modules[name], _factors(reading, name) * self.scale
            left, right, lost = value.factors(self.cut)
            factors = {"A": right, "B": left} if module.kind == "linear" else {"A": left.T, "B": right.T}
            for factor, data in factors.items():
                padded = torch.zeros(module.factor_shapes[factor], dtype=torch_dtype(dtype))
                matrix = padded.flatten(1)  # a view; beyond the numerical rank it stays zero
                matrix[: data.shape[0], : data.shape[1]] = cast(data, dtype, name)
                writer.write(names[module.key(factor)], padded)
            return Energy(squared_norm(value), lost)

        costs = {name: tensors[name].numel for name in self.modules}
        costs |= {parameter: tensors[name].numel for parameter, name in (self.whole | self.left_out).items()}
        energies = []
        with ExitStack() as stack:
            base: Checkpoint = ConfigOnlyBase(reading.model.source, None, tensors)
            if self.whole:
                base = stack.enter_context(self.snapshot.manifest.open_base())
            writer = SafetensorsWriter(directory, layout, prefix=STEMS[self.layout], max_shard_size=2**62)
            stack.enter_context(writer)
            for _, energy in target.engine.run(costs, write, self._memory()):
                energies.append(energy)
                advance(1)
        if self.layout == "peft":
            write_json(directory / CONFIG_NAME, self.config)
        total, lost, left_out = (
            math.fsum(getattr(energy, part) for energy in energies) for part in ("total", "lost", "left_out")
        )
        return Energy(total, lost, left_out, reading.least_held)

    def write_card(self, directory: Path, target: Target, energy: Energy) -> None:
        """Write the card of the adapter."""
        manifest = self.snapshot.manifest
        distance = math.sqrt(energy.total + self.scale**2 * math.fsum(self.reading.norm2.values()))
        library = "peft" if self.layout == "peft" else "diffusers"
        command, reading = target.output.command, self.reading
        card = model_card(manifest, self.scale, distance, command=command, reading=reading, library=library)
        (directory / CARD).write_text(card, encoding="utf-8")

    def _memory(self) -> dict[str, int]:
        """Peak bytes of each module and parameter; a merged matrix without factors is decomposed."""
        memory = self.reading.memory
        for name, module in self.modules.items():
            if self.reading.rank_bound(name) is None:
                memory[name] = max(memory[name], WORKSPACE * torch.float32.itemsize * math.prod(module.shape))
        return memory | {parameter: memory[name] for parameter, name in (self.whole | self.left_out).items()}


def _classify(
    reading: Reading, rank: int | None, server: Server | None, any_parameter: bool
) -> tuple[dict[str, AdaptedModule], dict[str, str]]:
    """The modules that get factors, and the parameters that are written whole, as in `AdapterPlan`."""
    model = reading.model
    spelling = {stored: name for name, stored in model.spellings.items()}
    modules: dict[str, AdaptedModule] = {}
    whole: dict[str, str] = {}
    for name in model.merged:
        tensor, parameter = model.tensors[name], spelling.get(name, name)
        path, _, leaf = parameter.rpartition(".")
        has_factors = _can_have_factors(tensor, leaf)
        bound = reading.rank_bound(name) if has_factors else None
        if bound is None and reading.is_zero(name):
            continue
        if not has_factors:
            if leaf not in ("weight", "bias") and (tensor.role == "linear" or not any_parameter):
                raise MergestreamError(f"{name} has changed, and an adapter cannot hold it; export with --format full")
            whole[parameter] = name
            continue
        largest = min(matrix_shape(tensor.shape)) if bound is None else bound
        chosen = largest if rank is None else min(largest, rank)
        kind: Kind = "embedding" if tensor.role == "embedding" else "conv1d" if name in model.conv1d else "linear"
        module = AdaptedModule(path, kind, chosen, tensor.shape)
        if bound is None and rank is None and (server is None or is_for_vllm(module, model)):
            raise MergestreamError(
                f"the state of {name} is dense, so it has no small exact rank; choose one with --rank K, or export "
                "with --format full"
            )
        if largest:
            modules[name] = module
    saved = saved_modules({module.path for module in modules.values()}, whole)
    for name in model.tensors:  # PEFT needs every parameter of a module that it saves whole
        parameter = spelling.get(name, name)
        if parameter.rpartition(".")[0] in saved:
            whole[parameter] = name
    return modules, whole


def _whole_key(name: str, paths: set[str]) -> str:
    """PEFT's name of a parameter: modules with factors are wrapped."""
    path, _, leaf = name.rpartition(".")
    return f"{PREFIX}{path}.base_layer.{leaf}" if path in paths else PREFIX + name


def _can_have_factors(tensor: BaseTensor, leaf: str) -> bool:
    """Whether PEFT has factors for a tensor."""
    is_convolution = tensor.module.startswith("torch.nn.Conv") if tensor.module else len(tensor.shape) > 3
    is_weight = tensor.role in ("linear", "embedding") or is_convolution
    return leaf == "weight" and is_weight and len(tensor.shape) != 3


def _factors(reading: Reading, name: str) -> LowRank:
    """The direction of a tensor in factors; a dense one is decomposed."""
    with overflow_explained(name):
        direction = reading.direction(name)
        if isinstance(direction, LowRank):
            return direction
        svd = thin_svd(direction.flatten(1))
        left = svd.u * svd.s.to(svd.u.dtype)
        refuse_overflow(left)
        return LowRank.from_factors(left, svd.v.T, direction.dtype, tuple(direction.shape))
