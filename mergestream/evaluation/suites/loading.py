"""Open suites by name or from a file: Python that defines ``SUITE``, or YAML."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mergestream.errors import MergestreamError, UsageError, did_you_mean
from mergestream.evaluation import PACKAGES
from mergestream.evaluation.cache import key_of
from mergestream.evaluation.suites.base import Suite
from mergestream.evaluation.suites.custom import CustomSuite, CustomTask, describe_error
from mergestream.registry import Registry

SUITES: Registry[Suite | Callable[[], Suite]] = Registry("suite", "mergestream.suites", {})
"""Suites of other packages"""
OUR_SUITES = ("text", "vision", "text-lora", "vision-lora", "text-base", "language", "language-tiny", "clip")
CHECKOUT = Path(__file__).resolve().parents[3] / "benchmarks" / "suites"
"""Our suites; only a checkout of the repository has them"""
SUFFIXES = (".py", ".yaml", ".yml")


def open_suite(
    name: str | Path,
    *,
    tasks: int | None = None,
    test_limit: int | None = None,
    model: str | None = None,
    evaluate: str | None = None,
) -> Suite:
    """Open a suite by name (one of a checkout or of another package) or by file; None keeps a suite's default."""
    path = Path(name) if Path(name).suffix in SUFFIXES else _in_checkout(str(name))
    suite = _registered_suite(str(name)) if path is None else _load(path)
    if model is not None:
        suite = suite.of_model(model)
    if evaluate is not None:
        suite = suite.scored_by(evaluate)
    suite = suite.limited(tasks, test_limit)
    if path is not None:
        choices: dict[str, Any] = {"tasks": tasks, "test_limit": test_limit, "model": model, "evaluate": evaluate}
        suite.reopened = (partial(open_suite, path.resolve(), **choices), ())
    return suite


def _in_checkout(name: str) -> Path | None:
    """Return the file of one of our suites; None for another name."""
    if name not in OUR_SUITES:
        return None
    path = CHECKOUT / f"{name.replace('-', '_')}.py"
    if not path.is_file():
        raise UsageError(
            f"the suite {name} is not in the installed package: it is benchmarks/suites/{path.name} in a checkout "
            "of mergestream's repository, and mergestream bench takes that path"
        )
    return path


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


def _load(path: Path) -> Suite:
    if not path.is_file():
        raise UsageError(f"there is no suite file {path}")
    suite = _from_yaml(path) if path.suffix != ".py" else getattr(_module(path), "SUITE", None)
    if not isinstance(suite, Suite):
        raise UsageError(f"{path} defines no SUITE; write SUITE = CustomSuite(…), or an instance of another Suite")
    return replace(suite, source=path) if isinstance(suite, CustomSuite) else suite


def _from_yaml(path: Path) -> CustomSuite:
    import yaml

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
        tasks = {str(name): CustomTask(**entry) for name, entry in content.pop("tasks").items()}
        base = content.pop("base")
        for item in (base, *(item for task in tasks.values() for item in (task.expert, task.data, task.head))):
            if not isinstance(item, str | None):
                raise TypeError(f"{item!r} is not a path")
        for name, task in tasks.items():
            if task.accuracy is not None:
                tasks[name] = replace(task, accuracy=_function(path, str(task.accuracy)))
        if "features" in content:
            content["features"] = _function(path, content["features"])
        return CustomSuite(content.pop("name", path.stem), base, tasks, source=path, **content)
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} does not describe a suite ({error!r}); see docs/how-to/evaluation.md") from None
    except RecursionError:
        raise UsageError(f"{path} does not describe a suite: it is nested too deeply") from None
    except ValueError:
        raise UsageError(f"{path} is not valid UTF-8; save it in that encoding") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _function(path: Path, reference: str) -> Any:
    """Load ``file.py:function`` from the directory of the suite's file."""
    file, _, name = reference.partition(":")
    function = getattr(_module(path.resolve().parent / file), name, None)
    if not callable(function):
        raise UsageError(f"{path}: {reference} is not a function; write file.py:function")
    return function


def _module(path: Path) -> Any:
    """Import a file, which may import other files of its directory or package, now or later."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    name = f"{path.stem}@{key_of(str(path.resolve()))}"  # no import statement can name it
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    root = path.resolve().parent
    while (root / "__init__.py").is_file():
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
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
