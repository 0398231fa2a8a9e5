"""Numbers at the edge of what a type holds, in tensors of every shape: right, or refused by name, and never Inf."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.faults.cases import Case
from tests.faults.children import Outcome, command, in_process
from tests.faults.scenarios import QUIET

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OTHER_TYPES = (torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
SHAPES = ((), (1,), (5,), (0,), (1, 6), (6, 1), (6, 6), (12, 4), (0, 4), (3, 4, 4), (2, 0, 3))
METHODS = ("ledger", "opcm", "average", "task_arithmetic", "ties", "magmax")
NAME = "layers.0.q.weight"
MANY = 10_000

VALUES: dict[str, Callable[[torch.dtype], tuple[float, float]]] = {
    "zeros": lambda dtype: (0.0, 0.0),
    "unchanged": lambda dtype: (1.0, 1.0),
    "ones": lambda dtype: (0.0, 1.0),
    "denormal": lambda dtype: (0.0, torch.finfo(dtype).smallest_normal / 8),
    "smallest": lambda dtype: (0.0, torch.finfo(dtype).smallest_normal),
    "largest": lambda dtype: (0.0, torch.finfo(dtype).max),
    "largest and its negative": lambda dtype: (-torch.finfo(dtype).max, torch.finfo(dtype).max),
    "large": lambda dtype: (0.0, torch.finfo(dtype).max / 3),
    "not a number": lambda dtype: (0.0, float("nan")),
    "infinite": lambda dtype: (0.0, float("inf")),
    "infinite base": lambda dtype: (float("inf"), 1.0),
}
"""The values of the base and of the experts"""


def cases(work: Path) -> Iterator[Case]:
    for value, dtype, shape, method in itertools.product(VALUES, TYPES, SHAPES, METHODS):
        name = f"{method}: {value}, {str(dtype).removeprefix('torch.')}{list(shape)}"
        yield Case(name, partial(_floating, method, dtype, shape, value))
    for dtype, shape, method in itertools.product(OTHER_TYPES, SHAPES, METHODS):
        name = f"{method}: {str(dtype).removeprefix('torch.')}{list(shape)}"
        yield Case(name, partial(_other, method, dtype, shape))
    for method in METHODS:
        yield Case(f"{method}: {MANY} tensors", partial(_many, method))


def _floating(method: str, dtype: torch.dtype, shape: tuple[int, ...], value: str, place: Path) -> str | None:
    low, high = VALUES[value](dtype)
    generator = torch.Generator().manual_seed(0)
    base = torch.full(shape, low, dtype=torch.float64).to(dtype)
    # Not all the same: a matrix of ones has one direction, and two equal experts are one.
    experts = [(torch.full(shape, high, dtype=torch.float64) * _signs(shape, generator)).to(dtype) for _ in range(2)]
    return _session(method, base, experts, place)


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.float64) * 2 - 1


def _other(method: str, dtype: torch.dtype, shape: tuple[int, ...], place: Path) -> str | None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(0, 2, shape, generator=generator).to(dtype) for _ in range(3)]
    return _session(method, tensors[0], tensors[1:], place)


def _session(method: str, base: Tensor, experts: list[Tensor], place: Path) -> str | None:
    """A tensor beside an ordinary one goes in and comes out."""
    ordinary = torch.linspace(-1, 1, 64).reshape(8, 8)
    models = {"base": (base, 0.0)} | {f"expert-{i}": (x, 0.01 * i) for i, x in enumerate(experts, 1)}
    for name, (tensor, change) in models.items():
        save_file(
            {NAME: tensor.contiguous(), "layers.0.up.weight": ordinary * (1 + change)}, place / f"{name}.safetensors"
        )
    return _absorbed_and_exported(method, [f"{name}.safetensors" for name in models], place)


def _many(method: str, place: Path) -> str | None:
    generator = torch.Generator().manual_seed(0)
    names = ("base", "expert-1", "expert-2")
    for name in names:
        tensors = {f"layers.{i}.q.weight": torch.randn(2, 2, generator=generator) for i in range(MANY)}
        save_file(tensors, place / f"{name}.safetensors")
    return _absorbed_and_exported(method, [f"{name}.safetensors" for name in names], place)


def _absorbed_and_exported(method: str, models: list[str], place: Path) -> str | None:
    base, *experts = models
    session = [
        ("init", "store", "--base", base, "--method", method),
        *(("add", "store", expert, *QUIET) for expert in experts),
        ("verify", "store"),
        ("export", "store", "out", *QUIET),
        ("export", "store", "half", "--dtype", "float16", *QUIET),
        ("merge", "--base", base, *experts, "-o", "merged", "--method", method, *QUIET),
    ]
    for words in session:
        outcome = in_process(command(*words))
        if wrong := outcome.fault or _unnamed(outcome, words):
            return f"{words[0]}: {wrong}"
        if outcome.code and words[0] in ("init", "verify"):
            return None if words[0] == "init" else f"verify: {outcome.err.strip()}"
    return next(filter(None, (_infinite(place / out) for out in ("out", "half", "merged"))), None)


def _unnamed(outcome: Outcome, words: tuple[str, ...]) -> str | None:
    """An error about numbers says where they are."""
    about = ("NaN", "Inf", "finite", "range", "overflow")
    if outcome.code and any(word in outcome.err for word in about) and "layers.0." not in outcome.err:
        return f"the tensor is not named: {outcome.err.strip()}"
    return None


def _infinite(out: Path) -> str | None:
    """The tensor of a model that is not finite, if there is one."""
    if not (out / "model.safetensors").is_file():
        return None
    for name, tensor in load_file(out / "model.safetensors").items():
        if tensor.is_floating_point() and tensor.numel() and not tensor.float().isfinite().all():
            if tensor.dtype == torch.float64 and tensor.isfinite().all():
                continue
            return f"{name} is not finite in {out.name}"
    return None
