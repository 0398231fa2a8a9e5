"""The same suite in Python: any function of a model's directory can score a task."""

from pathlib import Path

from features import features
from safetensors.torch import load_file

from mergestream.evaluation.suites.custom import CustomSuite, CustomTask

HERE = Path(__file__).parent


def accuracy_on(task: str):
    def accuracy(model: Path) -> float:
        test = load_file(HERE / "data" / task / "test.safetensors")
        head = load_file(HERE / "heads" / f"{task}.safetensors")["weight"]
        return float(((features(model, test["inputs"]) @ head.T).argmax(1) == test["labels"]).double().mean())

    return accuracy


SUITE = CustomSuite(
    name="points",
    base_model="base",
    custom_tasks={
        task: CustomTask(expert=f"experts/{task}", accuracy=accuracy_on(task)) for task in ("ring", "sector", "square")
    },
    model_name="small network",
)
