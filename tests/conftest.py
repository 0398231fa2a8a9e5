"""Shared by all tests: a toy base with experts on disk, and the command line in this process."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import save_file
from torch import Tensor

StateDict = dict[str, Tensor]
EXPERTS = 4

# The same examples on every machine, however busy it is: a failure is one that everybody sees.
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# A shell ignores Ctrl-C in what it runs in the background, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def toy_base() -> StateDict:
    """Every role and many forms: linear, stacked experts, embedding, norms, scalars, integers, other dtypes."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    return {
        "embed_tokens.weight": normal(24, 8),
        "layers.0.q.weight": normal(8, 8),
        "layers.0.up.weight": normal(16, 8),
        "layers.0.down.weight": normal(8, 16),
        "layers.0.down.bias": normal(8),
        "layers.0.experts.up": normal(3, 8, 6),
        "layers.0.norm.weight": 1 + normal(8),
        "half.weight": normal(6, 8).bfloat16(),
        "double.weight": normal(6, 8).double(),
        "temperature": normal(),
        "empty": normal(0, 4),
        "position_ids": torch.arange(24),
        "mask": torch.ones(4, dtype=torch.bool),
    }


def toy_expert(number: int, base: StateDict | None = None) -> StateDict:
    """A perturbed copy of the base: experts differ in scale (by factors up to 10) and in the rank of their changes."""
    generator = torch.Generator().manual_seed(number)
    scale = (0.01, 0.03, 0.004, 0.04)[number % 4]

    def change(tensor: Tensor) -> Tensor:
        x = torch.randn(tensor.shape, generator=generator) * scale
        if tensor.ndim == 2 and number % 3 == 2:
            x *= torch.arange(tensor.shape[1]) < tensor.shape[1] // 2  # half the rank
        return x.to(tensor.dtype)

    return {
        name: tensor + change(tensor) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in (base or toy_base()).items()
    }


def load_script(path: Path) -> ModuleType:
    """A script of the examples, as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_model(directory: Path, tensors: StateDict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Toys(NamedTuple):
    """Where the toy base and its experts are; they are shared by all tests: never write to them."""

    base: Path
    experts: list[Path]


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    place = tmp_path_factory.mktemp("toys")
    base = save_model(place / "base", toy_base())
    return Toys(base, [save_model(place / f"expert-{n}", toy_expert(n)) for n in range(1, EXPERTS + 1)])


class Result(NamedTuple):
    code: int
    out: str
    err: str


RunCommand = Callable[..., Result]


@pytest.fixture
def mergestream(capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Runs a command in this process: ``mergestream("status", store)``."""
    from mergestream.cli import main

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:  # argparse
            code = int(exit.code or 0)
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def done(mergestream: RunCommand) -> Callable[..., str]:
    """Like ``mergestream``, for commands that must succeed; gives what they print."""

    def run(*arguments: object) -> str:
        result = mergestream(*arguments)
        assert result.code == 0, result.err
        return result.out

    return run


def files(directory: Path, *suffixes: str) -> dict[str, bytes]:
    """The bytes of all files below a directory, or of those that end in one of the suffixes."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and (not suffixes or path.name.endswith(suffixes))
    }
