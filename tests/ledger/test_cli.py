"""The command line of a ledger: what is asked for, and what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import RunCommand, Toys, files


@pytest.fixture
def ledger(done: Callable[..., str], toys: Toys, tmp_path: Path) -> Path:
    store = tmp_path / "store"
    done("init", store, "--base", toys.base, "--method", "ledger", "--set", "budget=8", "--set", "entries=float32")
    done("add", store, *toys.experts)
    return store


@pytest.fixture
def sums(done: Callable[..., str], toys: Toys, tmp_path: Path) -> Path:
    store = tmp_path / "sums"
    done("init", store, "--base", toys.base, "--method", "average")
    done("add", store, *toys.experts)
    return store


def model(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_every_readout_is_written_and_named_in_the_card(done: Callable[..., str], ledger: Path, tmp_path: Path) -> None:
    found = {}
    for readout in ("agree", "regress", "outputs", "tsv", "tempered", "iso", "sum", "expert:expert-2"):
        out = tmp_path / readout.replace(":", "-")
        name, _, expert = readout.partition(":")
        said = f"{expert} as stored in the ledger" if expert else f"4 experts merged by ledger, readout {name}"
        assert done("export", ledger, out, "--readout", readout) == f"{out}: {said}\n"
        found[readout] = model(out)["layers.0.up.weight"]
        assert f"Readout: `{readout.partition(':')[0]}`" in (out / "README.md").read_text()
    assert len({tensor.numpy().tobytes() for tensor in found.values()}) == len(found)
    done("export", ledger, tmp_path / "default")
    assert torch.equal(model(tmp_path / "default")["layers.0.up.weight"], found["agree"])


def test_an_expert_comes_back(done: Callable[..., str], ledger: Path, toys: Toys, tmp_path: Path) -> None:
    done("export", ledger, tmp_path / "back", "--readout", "expert:expert-3")
    expert = model(toys.experts[2])
    for name, tensor in model(tmp_path / "back").items():
        torch.testing.assert_close(tensor, expert[name], rtol=1e-2, atol=1e-4)


def test_experts_are_chosen_and_weighted(done: Callable[..., str], ledger: Path, tmp_path: Path) -> None:
    done("export", ledger, tmp_path / "only", "--only", "expert-1,expert-3")
    done("export", ledger, tmp_path / "without", "--without", "expert-2,expert-4")
    done("export", ledger, tmp_path / "weights", "--weight", "expert-2=0", "--weight", "expert-4=0.0")
    one, *others = (model(tmp_path / name) for name in ("only", "without", "weights"))
    for other in others:
        assert all(torch.equal(one[name], other[name]) for name in one)
    card = (tmp_path / "only" / "README.md").read_text()
    assert "# 2 models merged with ledger" in card
    absent = [line for line in card.splitlines() if "left out of this model" in line]
    assert [line.split(" | ")[1] for line in absent] == ["expert-2", "expert-4"]
    done("export", ledger, tmp_path / "scaled", "--scale", "0.5")


def test_an_expert_is_removed(done: Callable[..., str], ledger: Path, mergestream: RunCommand) -> None:
    assert "expert-2 removed" in done("remove", ledger, "expert-2")
    assert json.loads(done("remove", ledger, "expert-3", "--json"))["name"] == "expert-3"
    listed = [(entry["name"], "removed" in entry) for entry in json.loads(done("log", ledger, "--json"))]
    assert listed == [("expert-1", False), ("expert-4", False), ("expert-2", True), ("expert-3", True)]
    assert "removed: expert-2 (" in done("log", ledger)
    assert "expert-3 is in the store again" in done("undo", ledger)
    done("verify", ledger)


def test_only_a_ledger_can_remove_an_expert(done: Callable[..., str], sums: Path, mergestream: RunCommand) -> None:
    before = files(sums)
    for name in ("expert-2", "expert-4"):
        result = mergestream("remove", sums, name)
        assert result.code == 2 and "other stores only undo the last one" in result.err and result.err.count("\n") == 1
    assert files(sums) == before
    done("verify", sums)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--only", "expert-9"], "there is no such expert; did you mean expert-4? (there are: expert-1"),
        (["--without", "nobody"], "(there are: expert-1, expert-2, expert-3, expert-4)"),
        (["--weight", "nobody=1"], "(there are: expert-1, expert-2, expert-3, expert-4)"),
        (["--readout", "expert:nobody"], "(there are: expert-1, expert-2, expert-3, expert-4)"),
        (["--readout", "expert"], "say which expert is meant"),
        (["--readout", "agre"], "there is no readout agre; did you mean agree?"),
        (["--readout", "plain"], "a ledger cannot be read out by plain"),
        (["--readout", "tsv:a"], "expert:NAME is the one that takes a name"),
        (["--weight", "expert-1=-1"], "the weight -1 of expert-1 is not a number from 0 on"),
        (["--weight", "expert-1=nan"], "the weight nan of expert-1 is not a number from 0 on"),
        (["--weight", "expert-1=much"], "is not of the form NAME=NUMBER"),
        (["--weight", "0.5"], "is not of the form NAME=NUMBER"),
        ([f"--weight=expert-{n}=0" for n in (1, 2, 3, 4)], "no expert is left"),
        (["--without", "expert-1,expert-2,expert-3,expert-4"], "no expert is left"),
        (["--only", "expert-1", "--without", "expert-2"], "exclude each other"),
        (["--readout", "expert:expert-1", "--weight=expert-1=2"], "is one expert"),
        (["--scale", "adaptive"], "agree does not add up"),
        (["--format", "loras", "--readout", "sum"], "--format loras writes every expert"),
        (["--task", "expert-1", "--format", "loras"], "--task is for full models"),
    ],
)
def test_what_cannot_be_asked_of_a_ledger(
    mergestream: RunCommand, ledger: Path, tmp_path: Path, options: Any, sentence: str
) -> None:
    before = files(ledger)
    result = mergestream("export", ledger, tmp_path / "out", *options)
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1 and sentence in result.err
    assert not (tmp_path / "out").exists() and files(ledger) == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--readout", "agree"], "average cannot be read out by agree; it can by plain or iso"),
        (["--readout", "expert:expert-1"], "average keeps one state for all experts"),
        (["--only", "expert-1"], "average keeps one state for all experts"),
        (["--format", "loras"], "average keeps one state for all experts"),
    ],
)
def test_what_cannot_be_asked_of_a_sum(
    mergestream: RunCommand, sums: Path, tmp_path: Path, options: Any, sentence: str
) -> None:
    result = mergestream("export", sums, tmp_path / "out", *options)
    assert result.code == 2 and sentence in result.err and result.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_does_not_add_up_is_read_out_plainly_only(
    done: Callable[..., str], mergestream: RunCommand, toys: Toys, tmp_path: Path
) -> None:
    done("init", tmp_path / "ties", "--base", toys.base, "--method", "ties")
    done("add", tmp_path / "ties", *toys.experts[:2])
    result = mergestream("export", tmp_path / "ties", tmp_path / "out", "--readout", "iso")
    assert result.code == 2 and "ties cannot be read out by iso; it can by plain only" in result.err
    done("export", tmp_path / "ties", tmp_path / "out", "--readout", "plain")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["--set", "budget=0"], "budget=0.0 must be above 0"),
        (["--set", "budget=-1"], "budget=-1.0 must be above 0"),
        (["--set", "budget=nan"], "budget=nan must be finite"),
        (["--set", "budget=9"], "at most 8"),
        (["--set", "entries=float16"], "is not one of bfloat16, float32"),
        (["--set", "svd=quick"], "is not one of auto, exact, randomised"),
    ],
)
def test_wrong_parameters(mergestream: RunCommand, toys: Toys, tmp_path: Path, settings: Any, sentence: str) -> None:
    result = mergestream("init", tmp_path / "store", "--base", toys.base, "--method", "ledger", *settings)
    assert result.code == 2 and sentence in result.err and result.err.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_an_unknown_name_cannot_be_removed(mergestream: RunCommand, ledger: Path) -> None:
    result = mergestream("remove", ledger, "expert-7")
    assert result.code == 2
    assert "no expert named expert-7 has been absorbed; did you mean expert-4? (there are:" in result.err


def test_taking_out_the_only_expert_leaves_an_empty_store(
    done: Callable[..., str], mergestream: RunCommand, toys: Toys, tmp_path: Path
) -> None:
    for method, command, told in (
        ("ledger", ("remove", "expert-1"), "has 0 experts"),
        ("opcm", ("undo",), "is at step 0"),
    ):
        store = tmp_path / method
        done("init", store, "--base", toys.base, "--method", method)
        done("add", store, toys.experts[0])
        assert told in done(command[0], store, *command[1:])
        assert "has absorbed nothing yet" in mergestream("export", store, tmp_path / "out").err
        done("add", store, toys.experts[1])


def test_one_shot_merge_by_a_ledger_needs_no_store(
    done: Callable[..., str], toys: Toys, tmp_path: Path, ledger: Path
) -> None:
    done("merge", "--base", toys.base, "--method", "ledger", "--set", "budget=8", "--set", "entries=float32",
         *toys.experts, "-o", tmp_path / "merged")  # fmt: skip
    done("export", ledger, tmp_path / "exported")
    ours, theirs = model(tmp_path / "merged"), model(tmp_path / "exported")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_export_keeps_to_its_memory(
    done: Callable[..., str], mergestream: RunCommand, ledger: Path, tmp_path: Path
) -> None:
    result = mergestream("export", ledger, tmp_path / "out", "--max-memory", "100B")
    assert result.code == 1 and "raise --max-memory" in result.err and not (tmp_path / "out").exists()
    done("export", ledger, tmp_path / "out", "--max-memory", "1GB", "--device", "cpu", "--engine", "local")
