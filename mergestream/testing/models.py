"""Small models and adapters, merged in memory and through a store, and compared."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mergestream.algebra import pieces
from mergestream.engine import LocalEngine
from mergestream.merging.merger import Merger
from mergestream.methods.base import Method
from mergestream.store.store import Store

StateDict = dict[str, Tensor]

SHAPES: dict[str, tuple[int, ...]] = {
    "a.weight": (40, 24),
    "a.bias": (40,),
    "b.weight": (24, 40),
    "norm.weight": (24,),
    "embed.weight": (50, 24),
    "conv.weight": (8, 3, 3, 3),
}
LINEAR = ("a.weight", "b.weight")
TINY_SHAPES = {"a.weight": (5, 4), "b.weight": (3, 6), "embed.weight": (6, 4), "a.bias": (11,)}
SCALES = (0.05, 0.2, 0.015, 0.1)
"""Size of a task vector relative to the base; the largest is 13 times the smallest"""
DECAYS = (0.7, 0.3, 1.2, 0.5, 0.9)
"""Spectrum of a task vector that is a matrix: σ_k ∝ k^(−decay)"""
RANKS = (1.0, 0.6, 0.8)
"""Its rank, as a share of the full rank"""


def make_models(
    count: int = 4, dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> list[StateDict]:
    """Return a base and ``count`` experts whose task vectors differ in norm, spectrum and rank.

    If all of them were alike, a formula that drops a norm, a weight or a power of σ would pass its test.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def task_vector(expert: int, position: int, shape: tuple[int, ...]) -> Tensor:
        x = normal(shape) * SCALES[(expert + position) % len(SCALES)]
        if len(shape) != 2:
            return x
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        rank = math.ceil(RANKS[expert % len(RANKS)] * len(s))
        spectrum = torch.arange(1, rank + 1, dtype=torch.float64).pow(-DECAYS[expert % len(DECAYS)])
        low_rank: Tensor = (u[:, :rank] * spectrum) @ vh[:rank]
        low_rank *= x.norm() / low_rank.norm()
        return low_rank

    base = {name: normal(shape) for name, shape in shapes.items()}
    models = [base]
    for expert in range(count):
        tensors = enumerate(shapes.items())
        models.append({name: base[name] + task_vector(expert, i, shape) for i, (name, shape) in tensors})
    return [{name: x.to(dtype) for name, x in model.items()} for model in models]


def make_odd_models() -> list[StateDict]:
    """Return a base and three experts with other dtypes, stacked experts, a scalar, an empty tensor and integers."""
    models = make_models(3)
    for number, model in enumerate(models):
        generator = torch.Generator().manual_seed(number)
        scale = 2.0**-number
        model["half.weight"] = scale * torch.randn(6, 8, generator=generator).bfloat16()
        model["double.weight"] = scale * torch.randn(6, 8, generator=generator, dtype=torch.float64)
        model["mlp.experts.up"] = scale * torch.randn(3, 8, 6, generator=generator)
        model["temperature"] = scale * torch.randn((), generator=generator)
        model["empty"] = torch.zeros(0, 4)
        model["position_ids"] = torch.arange(24)
    return models


def save_models(directory: Path, models: Sequence[StateDict]) -> list[Path]:
    """Save the base as ``base.safetensors``, the experts as ``expert1.safetensors`` and so on."""
    paths = [directory / f"{f'expert{number}' if number else 'base'}.safetensors" for number in range(len(models))]
    for path, model in zip(paths, models, strict=True):
        save_file(model, path)
    return paths


def load_model(directory: Path) -> StateDict:
    """Load an exported model into memory."""
    return {name: x.clone() for name, x in load_file(directory / "model.safetensors").items()}


@contextmanager
def saved(models: Sequence[StateDict]) -> Iterator[tuple[Path, Path, list[Path]]]:
    """Yield a temporary directory and the paths of the base and the experts in it."""
    with tempfile.TemporaryDirectory(prefix="mergestream-") as directory:
        base, *experts = save_models(Path(directory), models)
        yield Path(directory), base, experts


def save_adapter(directory: Path, factors: Mapping[str, tuple[Tensor, Tensor]]) -> Path:
    """Save a LoRA adapter in PEFT's format: each weight has factors B (m×r) and A (r×n), and Δ = 2·B·A."""
    directory.mkdir(parents=True)
    tensors = {}
    for name, (B, A) in factors.items():
        module = name.removesuffix(".weight")
        tensors[f"base_model.model.{module}.lora_A.weight"] = A.contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = B.contiguous()
    save_file(tensors, directory / "adapter_model.safetensors")
    rank = min(A.shape[0] for _, A in factors.values())
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": "base"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@contextmanager
def saved_adapters() -> Iterator[tuple[Path, Path, StateDict, list[Path], list[Path]]]:
    """Yield a directory, the base's path and tensors, three experts as full models, and the same as adapters.

    All are float64. The adapters differ in rank and norm.
    """
    (base,) = make_models(0, torch.float64)
    generator = torch.Generator().manual_seed(1)

    def factors(name: str, rank: int, scale: float) -> tuple[Tensor, Tensor]:
        m, n = base[name].shape
        B, A = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((m, rank), (rank, n)))
        return B * scale, A

    drawn = [{name: factors(name, rank, SCALES[rank % len(SCALES)]) for name in LINEAR} for rank in (3, 2, 5)]
    full = [base | {name: base[name] + 2 * B @ A for name, (B, A) in pairs.items()} for pairs in drawn]
    with saved([base, *full]) as (directory, path, experts):
        adapters = [
            save_adapter(directory / "adapters" / path.stem, pairs) for path, pairs in zip(experts, drawn, strict=True)
        ]
        yield directory, path, base, experts, adapters


@contextmanager
def pieces_of(size: int) -> Iterator[None]:
    """Process tensors in pieces of ``size`` elements, so that even small tensors are cut."""
    with patch.object(pieces, "PIECE", size):
        yield


def merger_of(method: Method, models: Sequence[StateDict], order: Sequence[int] = ()) -> Merger:
    """Return a merger with the models of these numbers (default: all), named as `save_models` names them."""
    merger = Merger(models[0], method)
    for number in order or range(1, len(models)):
        merger.add(models[number], f"expert{number}")
    return merger


def merged_in_memory(method: Method, base: StateDict, experts: Sequence[StateDict]) -> StateDict:
    """Return the merged model of a `Merger`."""
    return merger_of(method, [base, *experts]).state_dict()


def make_store(directory: Path, method: Method, base: Path, experts: Sequence[Path] = (), workers: int = 1) -> Store:
    """Create a store and add the experts."""
    store = Store.create(directory, base, method, engine=LocalEngine(workers))
    for expert in experts:
        store.add(expert)
    return store


def exported(store: Store, **options: Any) -> StateDict:
    """Export the merged model next to the store and load it; ``options`` are those of `Store.export`."""
    out = store.path.with_name(f"{store.path.name}-exported")
    return load_model(store.export(out, overwrite=True, **options))


def files(directory: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a directory except the lock, which names the last writer."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def assert_same_steps(ours: Store, theirs: Store, case: str) -> None:
    """Assert that the last steps have the same bytes and that the histories differ only in times."""
    states = []
    for store in (ours, theirs):
        number = f"{store.manifest.step:04d}"
        states.append({**files(store.path / "steps" / number), **files(store.path / "experts" / number)})
    assert states[0] == states[1], f"{case}: the states differ"
    for mine, other in zip(ours.history, theirs.history, strict=True):
        assert replace(mine, added=other.added, seconds=other.seconds) == other, f"{case}: a scalar differs"


def assert_same(ours: StateDict, theirs: StateDict, case: str) -> None:
    """Assert that two models are equal, bit for bit except for the sign of zeros."""
    assert ours.keys() == theirs.keys(), f"{case}: the tensors' names differ"
    for name, x in ours.items():
        assert torch.equal(x, theirs[name]), f"{case}: {name} differs"


def assert_close(ours: StateDict, theirs: StateDict, base: StateDict, tolerance: float, case: str) -> None:
    """Assert that two models differ by at most ``tolerance`` times their distance from the base."""
    for name, x in theirs.items():
        distance = float((x.double() - base[name].double()).norm())
        error = float((ours[name].double() - x.double()).norm())
        assert error <= tolerance * max(distance, 1e-3 * float(base[name].double().norm())), f"{case}: {name} differs"


def scaled(model: StateDict, base: StateDict, scale: float) -> StateDict:
    """Return base + scale·(model − base) in float64."""
    return {name: x.double() + scale * (model[name].double() - x.double()) for name, x in base.items()}


def norm(model: StateDict, base: StateDict) -> float:
    """Return ‖model − base‖ over all tensors."""
    return math.sqrt(math.fsum(float((x.double() - base[name].double()).square().sum()) for name, x in model.items()))
