"""Suites in files: Python that defines ``SUITE``, or YAML that names a base, experts and how to score a task."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergestream.errors import MergestreamError, UsageError
from mergestream.evaluation.cache import key_of
from mergestream.evaluation.requirements import PACKAGES
from mergestream.evaluation.suites.base import Choices, Suite
from mergestream.evaluation.suites.custom import CustomSuite, CustomTask, reason

SUFFIXES = (".py", ".yaml", ".yml")


def load_suite(path: Path, choices: Choices | None = None) -> Suite:
    """Read a suite from its file; other processes will read it from there, too."""
    if not path.is_file():
        raise UsageError(f"there is no suite file {path}")
    choices = choices or Choices()
    suite = _from_python(path) if path.suffix == ".py" else _from_yaml(path)
    if isinstance(suite, CustomSuite):
        suite = replace(suite, source=path)
    chosen = choices.of(suite)
    chosen.reopened = (load_suite, (path.resolve(), choices))
    return chosen


def _from_python(path: Path) -> Suite:
    suite = getattr(_module(path), "SUITE", None)
    if not isinstance(suite, Suite):
        raise UsageError(f"{path} defines no SUITE = CustomSuite(…), or another Suite")
    return suite


def _from_yaml(path: Path) -> CustomSuite:
    import yaml

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
        tasks = {str(name): CustomTask(**entry) for name, entry in content.pop("tasks").items()}
        _check_places(
            content["base"], *(place for task in tasks.values() for place in (task.expert, task.data, task.head))
        )
        for name, task in tasks.items():
            if task.accuracy is not None:
                tasks[name] = replace(task, accuracy=_function(path, str(task.accuracy)))
        if "features" in content:
            content["features"] = _function(path, content["features"])
        base = content.pop("base")
        return CustomSuite(content.pop("name", path.stem), base, tasks, source=path, **content)
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} is no description of a suite ({error!r}); see docs/how-to/evaluation.md") from None
    except RecursionError:
        raise UsageError(f"{path} is no description of a suite: it is nested too deeply") from None
    except ValueError:
        raise UsageError(f"{path} is not valid UTF-8; save it as such") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _check_places(*places: object) -> None:
    for place in places:
        if not isinstance(place, str | None):
            raise TypeError(f"{place!r} is no path")


def _function(path: Path, reference: str) -> Any:
    """``file.py:function``, beside the suite's file."""
    file, _, name = reference.partition(":")
    function = getattr(_module(path.resolve().parent / file), name, None)
    if not callable(function):
        raise UsageError(f"{path}: {reference} is not a function; write file.py:function")
    return function


def _module(path: Path) -> Any:
    """The module of a file, which may import its neighbours, at once or later."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    name = f"{path.stem}@{key_of(str(path.resolve()))}"  # that no import can mean
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    root = str(_import_root(path))
    if root not in sys.path:
        sys.path.insert(0, root)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for the types of their fields
    try:
        spec.loader.exec_module(module)
    except MergestreamError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
            raise
        raise UsageError(f"{path} cannot be loaded: {reason(error)}") from error
    return module


def _import_root(path: Path) -> Path:
    """Where Python would look for the file's neighbours: its directory, or that of the whole package it is in."""
    directory = path.resolve().parent
    while (directory / "__init__.py").is_file():
        directory = directory.parent
    return directory
