"""The scale of a merged task vector: merged = θ⁰ + scale · direction, chosen at the readout.

    adaptive:  n_t / ‖direction‖, so that the distance to the base is n_t, the mean of ‖Δ_1‖ … ‖Δ_t‖   (OPCM)
    sqrt:      1 / √t                                                                        (OPCM's alternative)
    mean:      1 / t                                                                                  (averaging)
    a number:  itself                                                                          (task arithmetic)

λ is OPCM's, and divides: λ_t = 1/scale. Where the papers of other methods write λ for what multiplies, it is the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

from mergestream.errors import UsageError, did_you_mean

NamedScale = Literal["adaptive", "sqrt", "mean"]
Scale = NamedScale | float
NAMED: tuple[NamedScale, ...] = get_args(NamedScale)


def parse_scale(given: str | float) -> Scale:
    """A rule by its name, or a number."""
    for name in NAMED:
        if given == name:
            return name
    try:
        number = float(given)
    except ValueError:
        raise UsageError(
            f"scale {given} is neither a number nor one of {', '.join(NAMED)}{did_you_mean(str(given), NAMED)}"
        ) from None
    if not math.isfinite(number):
        raise UsageError(f"scale {given} must be finite")
    return number


def scale_value(rule: Scale, t: int, mean_norm: float, direction_norm: Callable[[], float]) -> float:
    """The scale after t experts; ‖direction‖ is computed only where the rule needs it."""
    if rule == "sqrt":
        return 1 / math.sqrt(t)
    if rule == "mean":
        return 1 / t
    if rule == "adaptive":
        norm = direction_norm()
        return mean_norm / norm if norm else 1.0
    return rule


def inverse(scale: float) -> float:
    """λ = 1/scale; infinite for a scale of 0."""
    return 1 / scale if scale else math.inf


def displayed_scale(method: str, scale: float) -> tuple[str, float]:
    """The name and value to show for a scale: λ for OPCM, the scale itself for all other methods."""
    return ("λ", inverse(scale)) if method == "opcm" else ("scale", scale)
