"""A suite of your own: a base, experts and how to score a model on a task; paths are relative to this file."""

from score import accuracy

from mergestream.evaluation.suites import CustomSuite

SUITE = CustomSuite(
    name="points",
    base_model="base",
    experts={task: f"experts/{task}" for task in ("ring", "sector", "square")},
    score=accuracy,  # or a command: evaluate="python examples/own_suite/score.py {model} {task}"
    model_name="small network",
)
