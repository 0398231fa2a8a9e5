"""A suite of tiny tasks: two-layer networks that sort points, in files as a user would have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

SUITE_FILE = """
from pathlib import Path

import torch
from safetensors.torch import load_file

from mergestream.evaluation.suites import CustomSuite

HERE = Path(__file__).parent


def features(model, inputs):
    weights = load_file(Path(model) / "model.safetensors")
    return torch.tanh(inputs @ weights["layer1.weight"].T + weights["layer1.bias"]) @ weights["layer2.weight"].T


def accuracy(model, task):
    test = load_file(HERE / "data" / task / "test.safetensors")
    logits = features(model, test["inputs"]) @ load_file(HERE / "heads" / f"{task}.safetensors")["weight"].T
    return float((logits.argmax(1) == test["labels"]).double().mean())


EXPERTS = {name: f"experts/{name}" for name in ("red", "green", "blue")}
SUITE = CustomSuite("tiny", "base", EXPERTS, accuracy)
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("MERGESTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_suite(tmp_path: Path) -> Path:
    """The path of a suite file with a base, three experts, their test data and their heads."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    base = {"layer1.weight": random(12, 6), "layer1.bias": random(12), "layer2.weight": random(8, 12)}

    def write(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
        directory.mkdir(parents=True)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text('{"model_type": "tiny"}\n')

    def features(tensors: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs @ tensors["layer1.weight"].T + tensors["layer1.bias"]) @ tensors["layer2.weight"].T

    write(tmp_path / "suite" / "base", base)
    for name in ("red", "green", "blue"):
        expert = {key: tensor + 0.5 * random(*tensor.shape) for key, tensor in base.items()}
        write(tmp_path / "suite" / "experts" / name, expert)
        head, inputs = random(4, 8), random(100, 6)
        labels = (features(expert, inputs) @ head.T).argmax(1)  # the expert is always right, by construction
        (tmp_path / "suite" / "data" / name).mkdir(parents=True)
        (tmp_path / "suite" / "heads").mkdir(exist_ok=True)
        save_file({"inputs": inputs, "labels": labels}, tmp_path / "suite" / "data" / name / "test.safetensors")
        save_file({"weight": head}, tmp_path / "suite" / "heads" / f"{name}.safetensors")
    path = tmp_path / "suite" / "suite.py"
    path.write_text(SUITE_FILE)
    return path
