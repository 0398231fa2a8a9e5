"""Continual task arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.methods.average import Average
from mergestream.methods.base import parameter
from mergestream.methods.scale import Scale


@dataclass(frozen=True)
class TaskArithmetic(Average):
    """The sum of all task vectors, scaled.

        S_t = S_{t-1} + Δ_t,   merged_t = θ⁰ + scale·S_t

    Paper, equation of continual task arithmetic; a scale of 0.3 was best there for 8 tasks, 0.1 for 14 and 20.
    """

    name = "task_arithmetic"

    scale: float = parameter(0.3, "what the sum of the task vectors is multiplied by")

    @property
    def scale_rule(self) -> Scale:
        return self.scale
