"""Methods that others bring: registered in Python, found by entry points, broken; and the example of the docs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from mergestream import METHODS, Average, Method, Store, register_method
from mergestream.errors import UsageError
from mergestream.methods import make_method
from mergestream.methods.base import parameter
from mergestream.testing import Check, method_checks
from mergestream.testing.contract import is_found_by_name
from tests.conftest import RunCommand, Toys, files

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "iso_method"


def load_example() -> ModuleType:
    """Its module, as if the package were installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        import mergestream_iso

        return mergestream_iso


Iso = load_example().Iso


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_registered", {})
    register_method(Iso)


# --- registered in Python ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("check", method_checks(Iso()), ids=str)
def test_a_method_that_reads_matrices_out_keeps_the_contract(check: Check) -> None:
    check()


@pytest.mark.usefixtures("registered")
def test_a_store_with_a_registered_method_does_all_that_stores_do(
    done: Callable[..., str], toys: Toys, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    done("init", store, "--base", toys.base, "--method", "iso", "--set", "alpha=1.5")
    done("add", store, toys.experts[0])
    before = files(store, ".safetensors", ".json")
    told = json.loads(done("inspect", store, toys.experts[1], "--json"))
    done("add", store, toys.experts[1])
    assert Store(store).history[-1].norm == told["norm"]
    done("export", store, tmp_path / "merged", "--scale", "0.7")
    done("verify", store)
    done("undo", store)
    assert files(store, ".safetensors", ".json") == before
    assert Store(store).method == Iso(alpha=1.5)
    assert "iso: Iso-C: the sum of all task vectors" in done("methods") and "(from Python)" in done("methods")


def test_a_store_whose_method_is_not_known_names_it(mergestream: RunCommand, toys: Toys, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(METHODS, "_registered", {})
        register_method(Iso)
        Store.create(tmp_path / "store", toys.base, Iso()).add(toys.experts[0])
    for command in (("add", toys.experts[1]), ("export", tmp_path / "merged"), ("inspect", toys.experts[1])):
        result = mergestream(command[0], tmp_path / "store", command[1])
        assert result.code == 2
        assert result.err.startswith("error: there is no method iso") and result.err.count("\n") == 1


def test_a_method_of_ours_is_never_replaced() -> None:
    class Opcm(Iso):  # type: ignore[misc, valid-type]
        name = "opcm"

    with pytest.raises(UsageError, match="opcm is a method of mergestream itself"):
        register_method(Opcm)


def test_what_is_no_method_is_not_registered() -> None:
    class Unfinished(Method):
        name = "unfinished"

    with pytest.raises(UsageError, match=r"unfinished cannot be registered: .*abstract"):
        register_method(Unfinished)  # type: ignore[type-abstract]
    assert "unfinished" not in METHODS


def test_parameters_that_are_true_or_false_survive_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Choosy(Average):
        name = "choosy"
        strict: bool = parameter(True, "whether")

    monkeypatch.setattr(METHODS, "_registered", {})
    register_method(Choosy)
    for strict in (True, False):
        is_found_by_name(Choosy(strict))
    with pytest.raises(UsageError, match="choosy: strict=perhaps is not true or false"):
        make_method("choosy", {"strict": "perhaps"})


# --- entry points ------------------------------------------------------------------------------------------

MODULE = """
from dataclasses import dataclass, field
from mergestream import Average

@dataclass(frozen=True)
class Mean(Average):
    "The mean, once more."
    name = "mean_again"

@dataclass(frozen=True)
class Needy(Average):
    name = "needy"
    must: int = field(kw_only=True)

nothing = 3
"""
ENTRY_POINTS = """
[mergestream.methods]
mean_again = others_methods:Mean
average = others_methods:Mean
renamed = others_methods:Mean
needy = others_methods:Needy
nothing = others_methods:nothing
missing = others_methods:Missing
gone = no_such_module:Method
"""


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package is installed, and most of what it brings is broken."""
    (tmp_path / "others_methods.py").write_text(MODULE)
    facts = tmp_path / "others_methods-1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: others-methods\nVersion: 1.2\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    vars(METHODS).pop("_external", None)
    yield
    vars(METHODS).pop("_external", None)


@pytest.mark.usefixtures("brought")
def test_entry_points_are_found_and_broken_ones_break_nothing(done: Callable[..., str]) -> None:
    listed = {method["name"]: method for method in json.loads(done("methods", "--json"))}
    assert listed["mean_again"]["summary"] == "The mean, once more."
    assert listed["mean_again"]["origin"] == "others-methods 1.2"
    assert listed["average"]["origin"] == "mergestream", "a name of ours is never replaced"
    for name, fault in {
        "renamed": "its class has the name mean_again",
        "needy": "missing 1 required keyword-only argument",
        "nothing": "no subclass of mergestream.Method",
        "missing": "AttributeError",
        "gone": "No module named 'no_such_module'",
    }.items():
        assert listed[name]["summary"].startswith(f"the method {name} of others-methods 1.2 cannot be loaded:")
        assert fault in listed[name]["summary"]
    assert "mean_again: The mean, once more. (from others-methods 1.2)" in done("methods")


@pytest.mark.usefixtures("brought")
def test_a_store_is_made_with_a_method_of_another_package(
    done: Callable[..., str], mergestream: RunCommand, toys: Toys, tmp_path: Path
) -> None:
    done("init", tmp_path / "store", "--base", toys.base, "--method", "mean_again")
    done("add", tmp_path / "store", toys.experts[0])
    assert Store(tmp_path / "store").method.name == "mean_again"
    refused = mergestream("init", tmp_path / "other", "--base", toys.base, "--method", "gone")
    assert refused.code == 2 and "the method gone of others-methods 1.2 cannot be loaded" in refused.err


# --- the docs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["mergestream_iso.py", "test_iso.py", "pyproject.toml"])
def test_the_docs_show_the_example_as_it_is(file: str) -> None:
    page = (ROOT / "docs" / "how-to" / "extending.md").read_text(encoding="utf-8")
    shown = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)
    assert (EXAMPLE / file).read_text(encoding="utf-8") in shown
