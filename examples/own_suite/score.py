"""How a model is scored on a task."""

from pathlib import Path

from features import features
from safetensors.torch import load_file

HERE = Path(__file__).parent


def accuracy(model: Path, task: str) -> float:
    test = load_file(HERE / "data" / task / "test.safetensors")
    head = load_file(HERE / "heads" / f"{task}.safetensors")["weight"]
    return float(((features(model, test["inputs"]) @ head.T).argmax(1) == test["labels"]).double().mean())
