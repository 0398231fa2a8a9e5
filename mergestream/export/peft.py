"""Write task vectors as the factors of a PEFT adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank, squared_norm
from mergestream.checkpoints import SafetensorsWriter, TensorSpec, torch_dtype
from mergestream.engine import Engine
from mergestream.experts.adapters.adapter import PREFIX
from mergestream.experts.adapters.config import CONFIG_NAME
from mergestream.files import write_json
from mergestream.merging.reading import cast

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
    """Squared norms: of the task vector, and of what a truncation has cut off."""

    total: float
    lost: float

    @property
    def lost_share(self) -> float:
        return self.lost / self.total if self.total else 0.0


def write_adapter(
    directory: Path,
    config: Mapping[str, Any],
    modules: Mapping[str, AdaptedModule],
    read: Callable[[str], LowRank],
    *,
    whole: Mapping[str, TensorSpec],
    read_whole: Callable[[str], Tensor],
    engine: Engine,
    memory: Mapping[str, int],
    dtype: str = "F32",
    advance: Callable[[int], None] = lambda done: None,
) -> Energy:
    """Write ``modules`` as factors of their task vectors, and ``whole`` parameters as they are.

    The scaling is 1 everywhere (lora_alpha = r), so that B·A is what is added to a weight. ``memory`` has the peak
    bytes of reading each module and parameter; ``advance`` is called after each of them.
    """
    paths = {module.path for module in modules.values()}
    keys = {name: _whole_key(name, paths) for name in whole}
    layout = {
        module.key(factor): TensorSpec(dtype, shape)
        for module in modules.values()
        for factor, shape in module.factor_shapes.items()
    }
    layout |= {keys[name]: spec for name, spec in whole.items()}

    def write(name: str) -> Energy:
        if name in whole:
            writer.write(keys[name], read_whole(name))
            return Energy(0.0, 0.0)
        module, value = modules[name], read(name)
        left, right, lost = value.factors(module.rank)
        factors = {"A": right, "B": left} if module.kind == "linear" else {"A": left.T, "B": right.T}
        for factor, data in factors.items():
            padded = torch.zeros(module.factor_shapes[factor], dtype=torch_dtype(dtype))
            matrix = padded.flatten(1)  # a view; beyond the numerical rank it stays zero
            matrix[: data.shape[0], : data.shape[1]] = cast(data, dtype, name)
            writer.write(module.key(factor), padded)
        return Energy(squared_norm(value), lost)

    costs = {name: math.prod(module.shape) for name, module in modules.items()}
    costs |= {name: math.prod(spec.shape) for name, spec in whole.items()}
    written = []
    with SafetensorsWriter(directory, layout, prefix="adapter_model", max_shard_size=2**62) as writer:
        for _, energy in engine.run(costs, write, memory):
            written.append(energy)
            advance(1)
    write_json(directory / CONFIG_NAME, config)
    return Energy(math.fsum(one.total for one in written), math.fsum(one.lost for one in written))


def _whole_key(name: str, paths: set[str]) -> str:
    """PEFT's name of a parameter: modules with factors are wrapped."""
    path, _, leaf = name.rpartition(".")
    return f"{PREFIX}{path}.base_layer.{leaf}" if path in paths else PREFIX + name
