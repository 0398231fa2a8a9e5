"""The store as Python users meet it: what it takes, and how it describes itself."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import mergestream
from mergestream import Merger, Store
from mergestream.errors import UsageError


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
        with pytest.raises(UsageError, match="a path, a hub id org/name, a torch module or a state dict, not"):
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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
def test_a_traceback_names_python_arguments_beside_flags() -> None:
    error = UsageError("it lacks 2 tensors; pass --partial; --heads 'classifier.*' keeps them, --frobnicate does not")
    assert "".join(traceback.format_exception_only(error)).endswith("\nIn Python: partial=True, heads=[…]\n")
    assert not hasattr(UsageError("there is no --frobnicate"), "__notes__")
