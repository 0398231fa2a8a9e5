"""Merging methods: one file, one formula each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mergestream.errors import UsageError
from mergestream.registry import Registry

if TYPE_CHECKING:
    from mergestream.methods.base import Method


def _check_method(name: str, method: object) -> None:
    from mergestream.methods.base import Method

    if not (isinstance(method, type) and issubclass(method, Method)):
        raise TypeError("it is no subclass of mergestream.Method")
    if method.name != name:
        raise ValueError(f"its class has the name {method.name}, by which stores would look for it")
    method()  # all that is abstract must be there, and every parameter have a default


METHODS: Registry[type[Method]] = Registry(
    "method",
    "mergestream.methods",
    {
        "ledger": "mergestream.ledger.method:Ledger",
        "opcm": "mergestream.methods.opcm:OPCM",
        "average": "mergestream.methods.average:Average",
        "task_arithmetic": "mergestream.methods.task_arithmetic:TaskArithmetic",
        "ties": "mergestream.methods.ties:TIES",
        "ema": "mergestream.methods.ema:EMA",
        "lawa": "mergestream.methods.lawa:LAWA",
        "magmax": "mergestream.methods.magmax:MagMax",
        "dare": "mergestream.methods.dare:DARE",
        "weighted": "mergestream.methods.weighted:Weighted",
        "model_stock": "mergestream.methods.model_stock:ModelStock",
        "slerp": "mergestream.methods.slerp:SLERP",
    },
    _check_method,
)


def make_method(name: str, parameters: Mapping[str, Any] | None = None) -> Method:
    """The method of that name, with parameters given as values or as text."""
    from mergestream.methods.base import parse_parameters

    method = METHODS.choose(name)
    return method(**parse_parameters(method, parameters or {}))


def as_method(given: Method | str | None) -> Method:
    """The method that a Python user passes: an instance, or a name; by default the ledger."""
    from mergestream.methods.base import Method

    if isinstance(given, Method):
        return given
    if given is None or isinstance(given, str):
        return make_method(given or "ledger")
    raise UsageError(
        f"method={given!r} is none: pass a name such as 'opcm', or a method with its parameters such as "
        "mergestream.OPCM(alpha=0.4)"
    )


def method_text(name: str, parameters: Mapping[str, Any]) -> str:
    """``opcm(alpha=0.5)``"""
    return f"{name}({', '.join(f'{key}={value}' for key, value in parameters.items())})"


def register_method(method: type[Method]) -> type[Method]:
    """Register your own method by its name, so that stores can be made with it in this process."""
    return METHODS.register(method.name, method)
