"""The store as Python users meet it: what it takes, and how it describes itself."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import mergestream
from mergestream import Merger, Store
from mergestream.errors import MergestreamError, MergestreamWarning, UsageError, in_python
from mergestream.progress import Progress

PACKAGE = Path(mergestream.__file__).parent


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))


def tuned(base: nn.Module, seed: int) -> nn.Module:
    model = small(seed)
    model.load_state_dict(
        {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in base.state_dict().items()}
    )
    return model


@pytest.fixture
def base() -> nn.Module:
    return small()


@pytest.fixture
def store(tmp_path: Path, base: nn.Module) -> Store:
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    return Store.create(tmp_path / "store", base=tmp_path / "base.safetensors", method="opcm")


def test_the_public_names_are_shown() -> None:
    assert {"Store", "Merger", "merge", "OPCM", "MergestreamError"} <= set(dir(mergestream))
    assert "import_module" not in dir(mergestream) and set(dir(mergestream)) == set(mergestream.__all__)
    for name in dir(mergestream):
        getattr(mergestream, name)


def test_a_method_is_chosen_by_its_name(store: Store, base: nn.Module) -> None:
    assert store.method == mergestream.OPCM() and Merger(base, "average").method == mergestream.Average()
    assert Merger(base, mergestream.TIES(density=0.3)).method.parameters["density"] == 0.3
    assert Merger(base).method == mergestream.Ledger()
    with pytest.raises(UsageError, match="did you mean opcm"):
        Merger(base, "opmc")
    for wrong in (3, mergestream.OPCM):
        with pytest.raises(UsageError, match=r"pass a name such as 'opcm', or a method .*OPCM\(alpha=0.4\)"):
            Merger(base, wrong)  # type: ignore[arg-type]


def test_modules_state_dicts_and_paths_are_the_same(store: Store, base: nn.Module, tmp_path: Path) -> None:
    expert = tuned(base, 1)
    save_file(expert.state_dict(), tmp_path / "expert.safetensors")
    digests = set()
    for source in (expert, expert.state_dict(), tmp_path / "expert.safetensors", str(tmp_path / "expert.safetensors")):
        digests.add(store.add(source, name="expert").digest)
        store.undo()
    assert len(digests) == 1
    mergers = [Merger(source, "average") for source in (base, base.state_dict(), tmp_path / "base.safetensors")]
    merged = []
    sources: list[nn.Module | dict[str, Any] | Path] = [expert, expert.state_dict(), tmp_path / "expert.safetensors"]
    for merger, source in zip(mergers, sources, strict=True):
        merger.add(source)
        merged.append(merger.state_dict())
    for name, tensor in merged[0].items():
        assert all(torch.equal(tensor, other[name]) for other in merged[1:])


def test_what_is_no_model_is_told_what_one_is(store: Store, base: nn.Module, tmp_path: Path) -> None:
    for wrong in (3, None, [base], object()):
        with pytest.raises(UsageError, match="a path, a hub id, a module or a state dict, not"):
            store.add(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="save the base first, or use a Merger"):
        Store.create(tmp_path / "other", base=base)
    assert not (tmp_path / "other").exists() and not store.history


def test_a_peft_model_is_told_what_to_pass(base: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tuned(base, 1), peft.LoraConfig(target_modules=["0", "1"], r=2))
    merger = Merger(base, "average")
    with pytest.raises(UsageError, match=r"save_pretrained.* or model.merge_and_unload\(\)"):
        merger.add(model)
    merger.add(model.merge_and_unload())


def test_everything_says_what_it_is_on_one_short_line(tmp_path: Path, store: Store, base: nn.Module) -> None:
    assert repr(store) == (
        f"<Store '{store.path}': 0 experts merged by opcm(alpha=0.5, projection=reference, scaling=adaptive), "
        f"base '{store.manifest.base.source}'>"
    )
    entry = store.add(tuned(base, 1), name="legal")
    assert "1 expert merged" in repr(store) and repr(entry).startswith("<Expert 'legal': ‖Δ‖ ")
    merger = Merger(base, "average")
    merger.add(tuned(base, 1))
    assert repr(merger) == "<Merger: 1 expert merged by average(), base of 4 tensors>"
    with store.snapshot() as snapshot:
        assert repr(snapshot).startswith(f"<Snapshot of '{store.path}' at step 1: 1 expert")
    for shown in (store.manifest, store.manifest.base, store.inspect(tuned(base, 2)), store.survival()):
        assert repr(shown).startswith(f"<{type(shown).__name__}") and len(repr(shown)) < 400
        assert "\n" not in repr(shown)
    ledger = Store.create(tmp_path / "ledger", store.manifest.base.source)
    ledger.add(tuned(base, 1))


def printed(error: BaseException) -> str:
    """What a traceback prints of an error: its message, which in Python 3.10 includes its note, and its notes."""
    return "".join(traceback.format_exception_only(error))


def test_a_traceback_names_python_arguments_beside_flags(tmp_path: Path, store: Store, base: nn.Module) -> None:
    error = UsageError("it lacks 2 tensors; pass --partial; --heads 'classifier.*' keeps them, --frobnicate does not")
    assert re.search(r"(\n|\()In Python: partial=True, heads=\[…\]\)?\n$", printed(error))
    assert printed(UsageError(str(error))).count("In Python") == 1
    assert "In Python" not in printed(UsageError("there is no --frobnicate"))
    store.add(tuned(base, 1), name="legal")
    calls: dict[str, Callable[[], object]] = {
        "store.export(…)": lambda: store.export_adapter(tmp_path / "adapter"),
        "rank=…": lambda: store.export_adapter(tmp_path / "adapter"),
        "Store.create(…)": lambda: Store(tmp_path / "missing"),
        "evaluate=…": lambda: store.add(tuned(base, 2), gates=["score>=1"]),
        "allow_duplicate=True": lambda: store.add(tuned(base, 1)),
        "partial=True": lambda: store.add({"0.weight": torch.zeros(8, 6)}),
        "ignore=[…]": lambda: store.add({**tuned(base, 2).state_dict(), "0.bias": torch.zeros(3)}),
        "name=…": lambda: store.add(tuned(base, 2), name="legal"),
    }
    for argument, call in calls.items():
        with pytest.raises(MergestreamError) as raised:
            call()
        assert argument in printed(raised.value).partition("In Python: ")[2]


def test_every_flag_in_a_sentence_has_a_name_in_python() -> None:
    of_the_command_line = {"--push", "--seed", "--format"}
    of_other_programs = {"--merge", "--safe", "--local-dir", "--max-lora-rank"}
    sources = [path for path in PACKAGE.rglob("*.py") if not {"cli", "evaluation"} & set(path.parts)]
    words = " ".join(text for path in sources for text in sentences(ast.parse(path.read_text("utf-8"))))
    words = words.replace("--format ", "--format=")
    flags = set(re.findall(r"--[a-z]+(?:=\w+|(?:-[a-z]+)*)", words)) - of_the_command_line - of_other_programs
    assert len(flags) > 25
    functions = (Store.create, Store.add, Store.export, Store.export_adapter, mergestream.merge, Store.push)
    arguments = {name for function in functions for name in signature(function).parameters}
    for flag in flags:
        named = in_python(flag.replace("=", " ")).removeprefix("In Python: ")
        call = re.fullmatch(r"(?:(store|Store)\.)?(\w+)\((?:(\w+)=)?…\)", named)
        if call is None:
            assert named.partition("=")[0] in arguments, flag
        elif call[1]:
            assert callable(getattr(Store, call[2]))
        else:
            assert call[3] in signature(getattr(mergestream, call[2])).parameters


def sentences(tree: ast.AST) -> Iterator[str]:
    """The texts of a module without its docstrings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield from sentences(node)


def test_a_warning_names_python_arguments() -> None:
    with pytest.warns(MergestreamWarning, match=r"choose .* \(In Python: rank=…\)$"):
        Progress().note("choose one with --rank K")
