"""PEFT adapters out: a merged task vector in factors, as ``PeftModel.from_pretrained`` loads it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank, squared_norm
from mergestream.checkpoints import SafetensorsWriter, TensorSpec, torch_dtype
from mergestream.engine import Engine
from mergestream.experts.adapters.config import CONFIG_NAME, AdapterConfig
from mergestream.experts.adapters.reading import PREFIX
from mergestream.files import write_json
from mergestream.merging.reading import cast

Kind = Literal["linear", "conv1d", "embedding"]
"""How PEFT keeps the factors: B·A for what is stored output × input (convolutions too), else (B·A)ᵀ."""


@dataclass(frozen=True)
class AdaptedModule:
    """A module whose weight the adapter is to change, and the rank that it gets."""

    path: str
    kind: Kind
    rank: int
    shape: tuple[int, ...]
    """Of the weight"""

    @property
    def factor_shapes(self) -> dict[str, tuple[int, ...]]:
        rows, columns = self.shape[0], self.shape[1:]
        if self.kind == "linear":
            return {"A": (self.rank, *columns), "B": (rows, self.rank, *(1 for _ in columns[1:]))}
        return {"A": (self.rank, rows), "B": (columns[0], self.rank)}

    def key(self, factor: str) -> str:
        if self.kind == "embedding":
            return f"{PREFIX}{self.path}.lora_embedding_{factor}"
        return f"{PREFIX}{self.path}.lora_{factor}.weight"


@dataclass(frozen=True)
class Energy:
    """Squared norms: of all that was to be written, and of what a truncation left out."""

    total: float
    lost: float

    @property
    def lost_share(self) -> float:
        return self.lost / self.total if self.total else 0.0


def write_adapter(
    directory: Path,
    modules: Mapping[str, AdaptedModule],
    read: Callable[[str], LowRank],
    *,
    whole: Mapping[str, TensorSpec],
    read_whole: Callable[[str], Tensor],
    told: AdapterConfig,
    engine: Engine,
    memory: Mapping[str, int],
    dtype: str = "F32",
    advance: Callable[[str], None] = lambda name: None,
) -> Energy:
    """Write ``modules`` as factors (``read`` gives the task vector of each), ``whole`` parameters as they are.

    The scaling is 1 everywhere (lora_alpha = r): what the factors say is what is added to the weights. ``told`` is what
    the configuration says beside them, ``memory`` what each module, and each parameter, takes while it is read.
    """
    layout = {
        module.key(factor): TensorSpec(dtype, shape)
        for module in modules.values()
        for factor, shape in module.factor_shapes.items()
    }
    paths = {module.path for module in modules.values()}
    keys = {}
    for name in whole:
        path, _, leaf = name.rpartition(".")
        # What PEFT calls a parameter: modules with factors are wrapped.
        keys[name] = f"{PREFIX}{path}.base_layer.{leaf}" if path in paths else PREFIX + name
    layout |= {keys[name]: spec for name, spec in whole.items()}

    def write(name: str) -> Energy:
        if name in whole:
            writer.write(keys[name], read_whole(name))
            return Energy(0.0, 0.0)
        module, value = modules[name], read(name)
        left, right, lost = value.factors(module.rank)
        a, b = (right, left) if module.kind == "linear" else (left.T, right.T)
        for factor, data in (("A", a), ("B", b)):
            padded = torch.zeros(module.factor_shapes[factor], dtype=torch_dtype(dtype))
            flat = padded.flatten(1)  # a view: what the numerical rank does not fill stays zero
            flat[: data.shape[0], : data.shape[1]] = cast(data, dtype, name)
            writer.write(module.key(factor), padded)
        return Energy(squared_norm(value), lost)

    costs = {name: math.prod(module.shape) for name, module in modules.items()}
    costs |= {name: math.prod(spec.shape) for name, spec in whole.items()}
    written = []
    with SafetensorsWriter(directory, layout, prefix="adapter_model", max_shard_size=2**62) as writer:
        for name, energy in engine.run(costs, write, memory):
            written.append(energy)
            advance(name)
    write_json(directory / CONFIG_NAME, adapter_config(list(modules.values()), list(whole), told))
    return Energy(math.fsum(one.total for one in written), math.fsum(one.lost for one in written))


def modules_saved(paths: Collection[str], whole: Collection[str]) -> set[str]:
    """The modules without factors that go along whole (``modules_to_save``): those of which not only a bias does."""
    return {name.rpartition(".")[0] for name in whole if not name.endswith(".bias")} - set(paths)


def adapter_config(modules: Sequence[AdaptedModule], whole: Collection[str], told: AdapterConfig) -> dict[str, Any]:
    """The fields that PEFT needs, and what is told beside them; it fills in the rest."""
    paths = {module.path for module in modules}
    saved = modules_saved(paths, whole)
    biased = {name.rpartition(".")[0] for name in whole} - saved
    common = Counter(module.rank for module in modules).most_common(1)
    rank = common[0][0] if common else 1
    others = {f"^{re.escape(module.path)}": module.rank for module in modules if module.rank != rank}
    return {
        "peft_type": "LORA",
        **told,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "bias": "all" if biased - paths else "lora_only" if biased else "none",
        "fan_in_fan_out": any(module.kind == "conv1d" for module in modules),
        "target_modules": [module.path for module in modules],
        "modules_to_save": sorted(saved) or None,
    }
