"""What methods and readouts are, read from the source: to import what ours compute with takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from inspect import getdoc
from pathlib import Path
from typing import Any

from mergestream.errors import UsageError
from mergestream.registry import Registry

Described = dict[str, Any]
Lineage = Sequence[ast.ClassDef]
"""A class and those that it is made of, the nearest first"""


def described_methods() -> list[Described]:
    """Name, origin, summary and parameters of every method, and whether the order of arrival matters."""
    from mergestream.methods import METHODS

    return [_described(METHODS, name, _method_as_written, _method_as_imported) for name in METHODS]


def described_readouts() -> list[Described]:
    """Name, origin and summary of every readout, and whether it is one of a ledger."""
    from mergestream.ledger.readouts import READOUTS

    return [_described(READOUTS, name, _readout_as_written, _readout_as_imported) for name in READOUTS]


def _described(
    registry: Registry[Any],
    name: str,
    as_written: Callable[[Lineage], Described],
    as_imported: Callable[[type[Any]], Described],
) -> Described:
    described = {"name": name, "origin": registry.origin(name)}
    place = registry.place(name)
    if place:
        try:
            return {**described, **as_written(_lineage(place))}
        except (LookupError, ValueError, AttributeError, OSError, StopIteration):
            pass  # the source is not there, or says it in a way that only Python itself understands
    try:
        return {**described, **as_imported(registry[name])}
    except UsageError as error:  # of another package: the others are still there
        return {**described, "summary": str(error), "commutative": None, "parameters": [], "of_ledgers": False}


def _lineage(place: str) -> Lineage:
    module, _, name = place.partition(":")
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(place)
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    classes = {node.name: f"{module}:{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)}
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    known = classes | {alias.name: f"{node.module}:{alias.name}" for node in imports for alias in node.names}
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    bases = [known[base.id] for base in found.bases if isinstance(base, ast.Name)]
    return [found, *(cls for base in bases if base.startswith("mergestream.") for cls in _lineage(base))]


def _summary_as_written(lineage: Lineage) -> str:
    return _first_line(ast.get_docstring(lineage[0]))


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]


def _readout_as_written(lineage: Lineage) -> Described:
    of_ledgers = any(cls.name == "EntriesReadout" for cls in lineage)
    return {"summary": _summary_as_written(lineage), "of_ledgers": of_ledgers}


def _readout_as_imported(readout: type[Any]) -> Described:
    from mergestream.ledger.readouts.base import EntriesReadout

    return {"summary": _first_line(getdoc(readout)), "of_ledgers": issubclass(readout, EntriesReadout)}


def _method_as_written(lineage: Lineage) -> Described:
    parameters: dict[str, Described] = {}
    for cls in reversed(lineage):
        for node in cls.body:
            match node:
                case ast.AnnAssign(ast.Name(name), value=ast.Call(ast.Name("parameter"), [default, help], limits)):
                    known = {limit.arg: limit.value for limit in limits}
                    choices = ast.literal_eval(known["choices"]) if "choices" in known else ()
                    parameters[name] = _parameter(name, ast.literal_eval(default), ast.literal_eval(help), choices)
    usual = {name: parameter["default"] for name, parameter in parameters.items()}
    return {
        "summary": _summary_as_written(lineage),
        "commutative": _value(lineage, "commutative", usual),
        "parameters": list(parameters.values()),
    }


def _value(lineage: Lineage, name: str, usual: Mapping[str, Any]) -> Any:
    """Of an attribute, or of a property that is an expression of the parameters."""
    for cls in lineage:
        for node in cls.body:
            match node:
                case ast.Assign([ast.Name(called)], result) if called == name:
                    return _evaluated(result, usual)
                case ast.FunctionDef(called, body=[*_, ast.Return(ast.expr() as result)]) if called == name:
                    return _evaluated(result, usual)
    raise LookupError(name)


def _evaluated(node: ast.expr, usual: Mapping[str, Any]) -> Any:
    """An expression of constants and parameters; nothing is executed, and what is not understood is refused."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Attribute(ast.Name("self"), parameter):
            return usual[parameter]
        case ast.BinOp(left, ast.Add(), right):
            return _evaluated(left, usual) + _evaluated(right, usual)
        case ast.Compare(left, [comparison], [right]):
            return _COMPARISONS[type(comparison)](_evaluated(left, usual), _evaluated(right, usual))
    raise LookupError(ast.dump(node))


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda left, right: left == right,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}


def _method_as_imported(method: type[Any]) -> Described:
    return {
        "summary": _first_line(getdoc(method)),
        "commutative": method().commutative,
        "parameters": [
            _parameter(item.name, item.default, item.metadata.get("help", ""), item.metadata.get("choices", ()))
            for item in fields(method)
        ],
    }


def _parameter(name: str, default: Any, help: str, choices: Sequence[str]) -> Described:
    return {"name": name, "default": default, "help": help, "choices": list(choices)}
