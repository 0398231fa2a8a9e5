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
from mergestream.base.model import BaseTensor
from mergestream.checkpoints import FLOATS, SafetensorsWriter, TensorSpec, open_checkpoint, torch_dtype
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
    """Squared norms: of the task vector, and of what an adapter of it lacks, because it was cut off or left out."""

    total: float
    lost: float
    held: float = 1.0
    """The share of ‖Δ‖² that the ledger holds of the expert of which it holds least"""

    @property
    def lost_share(self) -> float:
        return self.lost / self.total if self.total else 0.0


@dataclass(frozen=True)
class AdapterForm:
    """How adapters are written."""

    rank: int | None = None
    """The rank of all modules, cut or padded with zeros; None keeps each module's own"""
    server: Server | None = None
    """The server whose ranks are used, and for which the parameters that it refuses are left out"""
    layout: str = "peft"
    """``peft``, ``diffusers`` or ``kohya``"""
    any_parameter: bool = False
    """Whether parameters may be written that PEFT ignores, and that only `RoutedModel` applies"""


def export_merged_adapter(store: Store, output: Output, choice: ReadoutChoice, form: AdapterForm) -> Energy:
    """Write scale · direction as factors, exactly or truncated; returns what is cut off or left out.

    Dense linear weights have no small exact rank, so they need one. Other dense tensors (biases, norms) are written
    whole, or left out if the server refuses them.
    """
    with exporting(store, output) as (snapshot, target):
        reading = snapshot.reading(target.engine, choice)
        plan = AdapterPlan.of(snapshot, reading, form, reading.scale(choice.scale, target.engine))
        recipe = {"format": "lora", "rank": form.rank, "layout": form.layout}
        return write_adapters({"": plan}, target, recipe, choice)[""]


def export_expert_adapters(store: Store, output: Output, form: AdapterForm) -> dict[str, Energy]:
    """Write every expert of a ledger as an adapter, each to a directory of its name."""
    with exporting(store, output) as (snapshot, target):
        plans = plan_experts(snapshot, target.engine, snapshot.manifest.names, form)
        return write_adapters(plans, target, {"format": "loras", "rank": form.rank, "layout": form.layout})


def plan_experts(snapshot: Snapshot, engine: Engine, names: Sequence[str], form: AdapterForm) -> dict[str, AdapterPlan]:
    """Plan an adapter of each of these experts of a ledger."""
    plans = {}
    for name in names:
        if name in (".", "..") or Path(name).name != name:
            raise UsageError(f"{name} cannot be the name of a directory; export it alone, with --readout expert:{name}")
        plans[name] = AdapterPlan.of(snapshot, snapshot.reading(engine, Selection(f"{ONE_EXPERT}{name}")), form)
    return plans


def write_adapters(
    plans: Mapping[str, AdapterPlan],
    target: Target,
    recipe: Mapping[str, Any],
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
    with progress.task(f"writing {output.path.name}", sum(len(plan.jobs) for plan in plans.values())) as advance:
        for name, plan in plans.items():
            energies[name] = plan.write(name, target, advance)
            with open_checkpoint(draft / name / f"{STEMS[plan.form.layout]}.safetensors") as written:
                digests[name] = combined_digest({key: tensor_digest(written.read(key)) for key in written.tensors})
    digest = digests[""] if "" in digests else combined_digest(digests)
    output.mark(draft, next(iter(plans.values())).snapshot.manifest, recipe, digest, choice)
    return energies


@dataclass(frozen=True)
class AdapterPlan:
    """What an adapter will contain: scale · direction."""

    snapshot: Snapshot
    reading: Reading
    form: AdapterForm
    scale: float
    modules: dict[str, AdaptedModule]
    """The modules with factors, by the name of their tensor"""
    whole: dict[str, str]
    """By name of a tensor: the parameter that is written whole"""
    left_out: dict[str, str]
    """By name of a tensor: the parameter that is not written, because the server refuses it"""
    config: dict[str, Any]
    notes: list[str]
    """Sentences for the user"""

    @classmethod
    def of(cls, snapshot: Snapshot, reading: Reading, form: AdapterForm, scale: float = 1.0) -> AdapterPlan:
        """Plan the adapter of what is read; refuses what an adapter, or the server, cannot hold."""
        weights = reading.weights
        experts = [entry for entry in snapshot.manifest.history if weights is None or entry.name in weights]
        modules, whole = _classify(reading, form)
        others = {name: module.path for name, module in modules.items() if not is_for_vllm(module, reading.model)}
        left_out: dict[str, str] = {}
        if form.server:
            merged = set(reading.model.merged)
            left_out = {name: parameter for name, parameter in whole.items() if name in merged}
            left_out |= {name: f"{path}.weight" for name, path in others.items()}
            modules = {name: module for name, module in modules.items() if name not in others}
            if not modules:
                names = shorten_list([entry.name for entry in experts])
                raise MergestreamError(f"vLLM takes no part of the adapter of {names}; export with --format full")
            whole, others = {}, {}
        uniform = vllm_rank(max(module.rank for module in modules.values())) if form.server else form.rank
        if uniform is not None:
            modules = {name: replace(module, rank=uniform) for name, module in modules.items()}
        fields, notes = common_fields(snapshot, experts)
        config = adapter_config(list(modules.values()), whole.values(), fields)
        notes = [*notes, *serving_notes(config, list(others.values()))] if form.layout == "peft" else []
        if shortfall := snapshot.shortfall(reading):
            notes.append(shortfall)
        if ignored := [name for name in whole.values() if not name.endswith((".weight", ".bias"))]:
            notes.append(f"PEFT ignores {shorten_list(ignored)}, which RoutedModel applies")
        if with_tokens := [expert.name for expert in experts if snapshot.records[expert.name].tokens]:
            names = ", ".join(with_tokens)
            notes.append(f"an adapter cannot hold the new tokens of {names}; export with --format full for them")
        return cls(snapshot, reading, form, scale, modules, whole, left_out, config, notes)

    @property
    def jobs(self) -> list[str]:
        """The names of the tensors that are read."""
        return [*self.modules, *self.whole, *self.left_out]

    def write(self, folder: str, target: Target, advance: Callable[[int], None]) -> Energy:
        """Write the tensors, the config and the card to a folder of the draft.

        The scaling is 1 everywhere (lora_alpha = r), so that B·A is what is added to a weight.
        """
        reading, tensors, dtype = self.reading, self.reading.model.tensors, FLOATS[target.output.dtype or "float32"]
        paths = {module.path for module in self.modules.values()}
        keys = {name: _whole_key(parameter, paths) for name, parameter in self.whole.items()}
        specs = {keys[name]: cast_spec(tensors[name], dtype) for name in self.whole}
        for module in self.modules.values():
            specs |= {module.key(factor): TensorSpec(dtype, shape) for factor, shape in module.factor_shapes.items()}
        names = layout_names(self.form.layout, reading.model, specs)

        def write(name: str) -> tuple[float, float]:
            """Write a tensor; returns its squared norm, and that of what is lost of it."""
            if name in self.whole:
                assert base is not None
                for start, piece in reading.pieces(name, base, self.scale, dtype):
                    writer.write_piece(names[keys[name]], start, piece)
                return 0.0, 0.0
            if name in self.left_out:
                lost = self.scale**2 * reading.direction_norm2(name)
                return lost, lost
            module, value = self.modules[name], _factors(reading, name) * self.scale
            left, right, lost = value.factors(self.form.rank)
            factors = {"A": right, "B": left} if module.kind == "linear" else {"A": left.T, "B": right.T}
            for factor, data in factors.items():
                padded = torch.zeros(module.factor_shapes[factor], dtype=torch_dtype(dtype))
                matrix = padded.flatten(1)  # a view; beyond the numerical rank it stays zero
                matrix[: data.shape[0], : data.shape[1]] = cast(data, dtype, name)
                writer.write(names[module.key(factor)], padded)
            return squared_norm(value), lost

        directory, energies = target.draft / folder, {}
        directory.mkdir(parents=True, exist_ok=True)
        layout = {names[key]: spec for key, spec in specs.items()}
        with ExitStack() as stack:
            base = stack.enter_context(self.snapshot.manifest.open_base()) if self.whole else None
            writer = SafetensorsWriter(directory, layout, prefix=STEMS[self.form.layout], max_shard_size=2**62)
            stack.enter_context(writer)
            costs = {name: tensors[name].numel for name in self.jobs}
            memory = {name: self._memory(name) for name in self.jobs}
            for name, energy in target.engine.run(costs, write, memory):
                energies[name] = energy
                advance(1)
        if self.form.layout == "peft":
            write_json(directory / CONFIG_NAME, self.config)
        total, lost = (math.fsum(energy[part] for energy in energies.values()) for part in (0, 1))
        if self.left_out:
            share = math.fsum(energies[name][1] for name in self.left_out) / (total or 1.0)
            target.progress.note(
                f"{folder or target.output.path.name}: left out, because vLLM may refuse them: "
                f"{shorten_list(self.left_out.values())}, with {share:.3%} of the energy; --format full has everything"
            )
        card = model_card(
            self.snapshot.manifest,
            self.scale,
            distance=math.sqrt(total + self.scale**2 * math.fsum(reading.norm2.values())),
            command=target.output.command,
            reading=reading,
            library="peft" if self.form.layout == "peft" else "diffusers",
        )
        (directory / CARD).write_text(card, encoding="utf-8")
        return Energy(total, lost, reading.least_held)

    def _memory(self, name: str) -> int:
        """Peak bytes of a tensor; a merged matrix without factors is decomposed."""
        memory = self.reading.memory[name]
        if name in self.modules and self.reading.rank_bound(name) is None:
            return max(memory, WORKSPACE * torch.float32.itemsize * self.reading.model.tensors[name].numel)
        return memory


def _classify(reading: Reading, form: AdapterForm) -> tuple[dict[str, AdaptedModule], dict[str, str]]:
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
            if leaf not in ("weight", "bias") and (tensor.role == "linear" or not form.any_parameter):
                raise MergestreamError(f"{name} has changed, and an adapter cannot hold it; export with --format full")
            whole[name] = parameter
            continue
        largest = min(matrix_shape(tensor.shape)) if bound is None else bound
        kind: Kind = "embedding" if tensor.role == "embedding" else "conv1d" if name in model.conv1d else "linear"
        module = AdaptedModule(path, kind, min(largest, form.rank or largest), tensor.shape)
        if bound is None and form.rank is None and (form.server is None or is_for_vllm(module, model)):
            raise MergestreamError(
                f"the state of {name} is dense, so it has no small exact rank; choose one with --rank K, or export "
                "with --format full"
            )
        if largest:
            modules[name] = module
    saved = saved_modules({module.path for module in modules.values()}, whole.values())
    for name in model.tensors:  # PEFT needs every parameter of a module that it saves whole
        parameter = spelling.get(name, name)
        if parameter.rpartition(".")[0] in saved:
            whole[name] = parameter
    return modules, whole


def _whole_key(parameter: str, paths: set[str]) -> str:
    """PEFT's name of a parameter: modules with factors are wrapped."""
    path, _, leaf = parameter.rpartition(".")
    return f"{PREFIX}{path}.base_layer.{leaf}" if path in paths else PREFIX + parameter


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
