"""Shell completion with argcomplete: commands, options, methods, and the experts of a store."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from mergestream.cli.parser import COMMANDS, make_parser
from mergestream.errors import MergestreamError


def complete() -> None:
    """Answer the shell and exit; without argcomplete there are no completions."""
    try:
        import argcomplete
    except ImportError:
        raise SystemExit(1) from None
    parser, parsers = make_parser(COMMANDS)
    for command in parsers.values():
        for action in command._actions:
            if action.dest in _COMPLETERS:
                action.completer = _COMPLETERS[action.dest]  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False)


def _methods(**_: Any) -> Iterable[str]:
    from mergestream.methods import METHODS

    return METHODS


def _settings(parsed_args: Namespace, **_: Any) -> Iterable[str]:
    """Complete ``KEY=VALUE`` for the parameters of the chosen method."""
    from mergestream.cli.methods import describe_method

    for parameter in describe_method(parsed_args.method or "ledger")["parameters"]:
        yield from (f"{parameter['name']}={value}" for value in parameter["choices"] or [""])


def _dtypes(**_: Any) -> Iterable[str]:
    return ("bf16", "fp16", "fp32", "fp64")


def _experts(parsed_args: Namespace, **_: Any) -> list[str]:
    """List the experts of the given store if it is on this machine; completion must not wait for a network."""
    from mergestream.storage import local_path
    from mergestream.store.store import Store

    with suppress(MergestreamError, OSError):
        return Store(local_path(parsed_args.store)).manifest.names
    return []


def _list_of_experts(prefix: str, parsed_args: Namespace, **_: Any) -> Iterable[str]:
    """Complete the name after the last comma of ``A,B``."""
    before = prefix[: prefix.rfind(",") + 1]
    return (before + name for name in _experts(parsed_args) if name not in before.split(","))


def _weights(parsed_args: Namespace, **_: Any) -> Iterable[str]:
    return (f"{name}=" for name in _experts(parsed_args))


def _readouts(parsed_args: Namespace, **_: Any) -> Iterable[str]:
    from mergestream.ledger.readouts import READOUTS

    yield from (name for name in READOUTS if name != "expert")
    yield from (f"expert:{name}" for name in _experts(parsed_args))


_COMPLETERS = {
    "method": _methods,
    "parameters": _settings,
    "dtype": _dtypes,
    "name": _experts,
    "task": _experts,
    "only": _list_of_experts,
    "without": _list_of_experts,
    "weight": _weights,
    "readout": _readouts,
}
"""By the name of the argument; argcomplete offers files for all others"""
