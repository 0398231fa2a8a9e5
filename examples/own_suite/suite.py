"""A suite of your own: a base, experts and how to score a model on a task; paths are relative to this file."""

from score import accuracy

from mergestream.evaluation.suites import CustomSuite

SUITE = CustomSuite(
    name="points",
    base_model="base",
    experts={task: f"experts/{task}" for task in ("ring", "sector", "square")},
    score=accuracy,
    model_name="small network",
)
