"""The same suite in Python."""

from score import accuracy

from mergestream.evaluation.suites import CustomSuite

SUITE = CustomSuite(
    name="points",
    base_model="base",
    experts={task: f"experts/{task}" for task in ("ring", "sector", "square")},
    score=accuracy,
    model_name="small network",
)
