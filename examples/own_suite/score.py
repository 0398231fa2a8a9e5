"""How a model is scored on a task: as a function for the suite, and as a command.

python score.py MODEL TASK
"""

import sys
from pathlib import Path

from features import features
from safetensors.torch import load_file

HERE = Path(__file__).parent


def accuracy(model: Path, task: str) -> float:
    test = load_file(HERE / "data" / task / "test.safetensors")
    head = load_file(HERE / "heads" / f"{task}.safetensors")["weight"]
    return float(((features(model, test["inputs"]) @ head.T).argmax(1) == test["labels"]).double().mean())


if __name__ == "__main__":
    print(accuracy(Path(sys.argv[1]), sys.argv[2]))
