"""Open suites by name or from a file: Python that defines ``SUITE``, or YAML."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergestream.errors import MergestreamError, UsageError, did_you_mean
from mergestream.evaluation import PACKAGES
from mergestream.evaluation.cache import key_of
from mergestream.evaluation.suites.base import Choices, Suite
from mergestream.evaluation.suites.custom import CustomSuite, CustomTask, describe_error
from mergestream.registry import Registry

SUITES: Registry[Suite | Callable[[], Suite]] = Registry("suite", "mergestream.suites", {})
"""Suites of other packages"""
OUR_SUITES = ("text", "vision", "text-lora", "vision-lora", "text-base", "language", "language-tiny", "clip")
CHECKOUT = Path(__file__).resolve().parents[3] / "benchmarks" / "suites"
"""Our suites and the paper's numbers; only a checkout of the repository has them"""
SUFFIXES = (".py", ".yaml", ".yml")


def open_suite(
    name: str,
    *,
    tasks: int | None = None,
    test_limit: int | None = None,
    model: str | None = None,
    evaluate: str | None = None,
) -> Suite:
    """Open a suite by name (one of a checkout or of another package) or by file."""
    choices = Choices(tasks, test_limit, model, evaluate)
    if Path(name).suffix in SUFFIXES:
        return load_suite(Path(name), choices)
    if name not in OUR_SUITES:
        return choices.apply(_registered_suite(name))
    script = f"{name.replace('-', '_')}.py"
    file = find_in_checkout(script)
    if file is None:
        raise UsageError(
            f"the suite {name} is not in the installed package: it is benchmarks/suites/{script} in a checkout "
            "of mergestream's repository, and mergestream bench takes that path"
        )
    return load_suite(file, choices)


def find_in_checkout(name: str) -> Path | None:
    """Return the path of a file in ``benchmarks/suites``; None if the package was installed without it."""
    path = CHECKOUT / name
    return path if path.is_file() else None


def _registered_suite(name: str) -> Suite:
    if name not in SUITES:
        known = (*OUR_SUITES, *SUITES)
        raise UsageError(
            f"there is no suite {name}{did_you_mean(name, known)} "
            f"(there are: {', '.join(known)}, and files ending in {', '.join(SUFFIXES)})"
        )
    found = SUITES[name]
    suite = found if isinstance(found, Suite) else found()
    if not isinstance(suite, Suite):
        raise UsageError(f"{name} of {SUITES.origin(name)} is not a suite but {type(suite).__name__}")
    return suite


def load_suite(path: Path, choices: Choices | None = None) -> Suite:
    """Read a suite from its file; worker processes read it from there, too."""
    if not path.is_file():
        raise UsageError(f"there is no suite file {path}")
    choices = choices or Choices()
    suite = _from_python(path) if path.suffix == ".py" else _from_yaml(path)
    if isinstance(suite, CustomSuite):
        suite = replace(suite, source=path)
    chosen = choices.apply(suite)
    chosen.reopened = (load_suite, (path.resolve(), choices))
    return chosen


def _from_python(path: Path) -> Suite:
    suite = getattr(_module(path), "SUITE", None)
    if not isinstance(suite, Suite):
        raise UsageError(f"{path} defines no SUITE; write SUITE = CustomSuite(…), or an instance of another Suite")
    return suite


def _from_yaml(path: Path) -> CustomSuite:
    import yaml

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
        tasks = {str(name): CustomTask(**entry) for name, entry in content.pop("tasks").items()}
        _check_paths(
            content["base"], *(item for task in tasks.values() for item in (task.expert, task.data, task.head))
        )
        for name, task in tasks.items():
            if task.accuracy is not None:
                tasks[name] = replace(task, accuracy=_function(path, str(task.accuracy)))
        if "features" in content:
            content["features"] = _function(path, content["features"])
        base = content.pop("base")
        return CustomSuite(content.pop("name", path.stem), base, tasks, source=path, **content)
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} does not describe a suite ({error!r}); see docs/how-to/evaluation.md") from None
    except RecursionError:
        raise UsageError(f"{path} does not describe a suite: it is nested too deeply") from None
    except ValueError:
        raise UsageError(f"{path} is not valid UTF-8; save it in that encoding") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _check_paths(*paths: object) -> None:
    for path in paths:
        if not isinstance(path, str | None):
            raise TypeError(f"{path!r} is not a path")


def _function(path: Path, reference: str) -> Any:
    """Load ``file.py:function`` from the directory of the suite's file."""
    file, _, name = reference.partition(":")
    function = getattr(_module(path.resolve().parent / file), name, None)
    if not callable(function):
        raise UsageError(f"{path}: {reference} is not a function; write file.py:function")
    return function


def _module(path: Path) -> Any:
    """Import a file, which may import other files of its directory, now or later."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    name = f"{path.stem}@{key_of(str(path.resolve()))}"  # no import statement can name it
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    root = str(_import_root(path))
    if root not in sys.path:
        sys.path.insert(0, root)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the types of their fields there
    try:
        spec.loader.exec_module(module)
    except MergestreamError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
            raise
        raise UsageError(f"{path} cannot be loaded: {describe_error(error)}") from error
    return module


def _import_root(path: Path) -> Path:
    """Return the directory to put on sys.path: the file's, or the one that holds its top-level package."""
    directory = path.resolve().parent
    while (directory / "__init__.py").is_file():
        directory = directory.parent
    return directory
