"""Merging methods: one small class each, registered here by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mergestream.errors import UsageError
from mergestream.methods.average import Average
from mergestream.methods.base import Absorbed, Context, Method, Ranking, State, parse_parameters
from mergestream.methods.ema import EMA
from mergestream.methods.lawa import LAWA
from mergestream.methods.magmax import MagMax
from mergestream.methods.opcm import OPCM
from mergestream.methods.task_arithmetic import TaskArithmetic
from mergestream.methods.ties import TIES

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (OPCM, Average, TaskArithmetic, TIES, EMA, LAWA, MagMax)
}


def make_method(name: str, parameters: Mapping[str, Any] | None = None) -> Method:
    """The method of that name, with parameters given as values or as text."""
    if name not in METHODS:
        raise UsageError(f"there is no method {name} (there are: {', '.join(METHODS)})")
    method = METHODS[name]
    return method(**parse_parameters(method, parameters or {}))


__all__ = [
    "EMA",
    "LAWA",
    "METHODS",
    "OPCM",
    "TIES",
    "Absorbed",
    "Average",
    "Context",
    "MagMax",
    "Method",
    "Ranking",
    "State",
    "TaskArithmetic",
    "make_method",
]
