"""Inputs in a store: added, calibrated, shortened, taken back, verified, and refused."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch

from mergestream import Inputs, Ledger, MergestreamError, Store
from mergestream.cli import main
from mergestream.errors import UsageError
from mergestream.inputs.reading import read_inputs
from mergestream.inputs.statistics import InputStatistics
from mergestream.progress import NoProgress
from mergestream.store.inputs import InputsReader
from tests import speaking
from tests.conftest import files, save_model
from tests.inputs import conftest as families
from tests.inputs.conftest import TEXTS, assert_moments, expert_of, measure, save_with_companions
from tests.workshop import Workshop


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_with_companions(families.bert(), tmp_path / "base")


@pytest.fixture
def store(tmp_path: Path, base: Path) -> Store:
    """A ledger with two experts, of which one came with inputs."""
    store = Store.create(tmp_path / "store", base, Ledger(budget=8.0), progress=NoProgress())
    store.add(expert_of(base, tmp_path / "one", 2), inputs=TEXTS)
    store.add(expert_of(base, tmp_path / "two", 3))
    return store


def read(store: Store, name: str) -> InputStatistics | None:
    with store.snapshot() as snapshot:
        found = snapshot.inputs.get(store.manifest.expert(name).number)
        return found.statistics() if found else None


def folders(store: Store) -> set[str]:
    return set(store.storage.folders("inputs"))


def test_what_is_stored_is_what_was_measured(store: Store, base: Path, tmp_path: Path) -> None:
    found, whole = (
        read(store, "one"),
        measure(base, tmp_path / "one", read_inputs(TEXTS, progress=NoProgress())),
    )
    assert found is not None
    assert found.layers.shared == whole.layers.shared
    assert found.count == len(TEXTS)
    for name, moment in whole.layers.moments.items():
        kept = found.layers.moments[name]
        few = moment.cut(2 if name == "classifier.weight" else 16)
        assert kept.vectors.dtype == torch.bfloat16
        assert torch.equal(kept.values, few.values)
        assert torch.equal(kept.vectors, few.vectors.bfloat16())
    assert found.features is not None
    assert whole.features is not None
    assert torch.equal(found.features.mean, whole.features.mean)
    assert read(store, "two") is None
    entry = store.history[0].inputs
    assert entry is not None
    with closing(InputsReader(store.storage, entry, store.manifest.base)) as reader:
        value = reader.moment("bert.encoder.layer.0.attention.self.value.weight")
        assert value is not None
        assert value.trace == pytest.approx(
            whole.layers.moments["bert.encoder.layer.0.attention.self.query.weight"].trace
        )
        assert reader.moment("bert.embeddings.word_embeddings.weight") is None
    size = sum(path.stat().st_size for path in (store.path / "inputs").rglob("*.safetensors"))
    assert size < sum(p.numel() * 8 for p in speaking.auto(base).parameters())


def test_moments_have_as_many_directions_as_the_entries(tmp_path: Path, base: Path) -> None:
    """r/8 of them, and fewer once the store has grown; both are the leading ones."""
    store = Store.create(tmp_path / "store", base, progress=NoProgress())
    store.add(expert_of(base, tmp_path / "first"), inputs=TEXTS)
    long = read(store, "first")
    assert long is not None
    for seed in range(16):
        store.add(expert_of(base, tmp_path / f"expert-{seed}", seed + 5))
    short = read(store, "first")
    assert short is not None
    entry = store.history[0]
    assert (entry.cut, len(folders(store))) == (16, 1)
    name = "bert.encoder.layer.0.output.dense.weight"
    assert len(long.layers.moments[name].values) == 2
    assert len(short.layers.moments[name].values) == 1
    assert torch.equal(short.layers.moments[name].vectors, long.layers.moments[name].vectors[:1])
    assert short.layers.moments[name].trace == pytest.approx(long.layers.moments[name].trace)
    store.verify()


def test_calibrate_gives_what_add_gives(store: Store, tmp_path: Path) -> None:
    before = files(store.path, ".safetensors")
    calibrated = store.calibrate("two", TEXTS)
    assert {name: data for name, data in files(store.path, ".safetensors").items() if name in before} == before
    found = read(store, "two")
    again = Store.create(tmp_path / "again", tmp_path / "base", Ledger(budget=8.0), progress=NoProgress())
    again.add(tmp_path / "two", inputs=Inputs(TEXTS))
    assert found is not None
    assert_moments(
        found,
        {
            name: found.layers.moments[first].apply(torch.eye(len(found.layers.moments[first].vectors[0])))
            for name, first in found.layers.shared.items()
        },
    )
    other = read(again, "two")
    assert other is not None
    for name, moment in other.layers.moments.items():
        assert torch.equal(moment.values, found.layers.moments[name].values)
    assert calibrated == store.history[1]
    assert [entry.digest for entry in Store(store.path).history] == [entry.digest for entry in store.history]
    store.verify()


def test_undo_takes_calibrate_back_first(store: Store) -> None:
    start = store.manifest.history
    store.calibrate("two", TEXTS)
    store.calibrate("one", TEXTS[:3])
    store.calibrate("one", TEXTS[:4])
    assert [entry.inputs and entry.inputs.count for entry in store.history] == [4, 6]
    assert len(folders(store)) == 3
    assert store.undo().name == "one"
    assert [entry.inputs and entry.inputs.count for entry in store.history] == [3, 6]
    store.undo()
    assert [entry.inputs and entry.inputs.count for entry in store.history] == [None, 6]
    store.undo()
    assert store.undo().name == "two"
    assert store.manifest.names == ["one"]
    assert start[0].digest == store.history[0].digest
    store.calibrate("one", TEXTS[:3])
    store.calibrate("one", TEXTS[:4])
    store.keep(0)
    assert len(folders(store)) == 1
    assert [entry.inputs and entry.inputs.before for entry in store.history] == [None]


def test_undo_and_remove_drop_inputs_with_their_expert(store: Store) -> None:
    assert len(folders(store)) == 1
    store.calibrate("two", TEXTS)
    assert len(folders(store)) == 2
    store.remove("one")
    store.undo()
    assert read(store, "one") is not None
    store.remove("one")
    store.keep(0)
    assert len(folders(store)) == 1
    assert store.undo().name == "two"
    assert folders(store) == set()
    store.calibrate("two", TEXTS)
    store.undo()
    store.undo()
    assert folders(store) == set()
    assert store.manifest.names == []


def test_nothing_is_committed_where_inputs_are_bad(store: Store, tmp_path: Path) -> None:
    before = files(store.path)
    bad = [{"input_ids": torch.tensor([[2, 3]])}, {"input_ids": torch.tensor([[99]])}]
    with pytest.raises(MergestreamError, match="input 2 cannot be run by the model"):
        store.calibrate("two", bad)
    with pytest.raises(MergestreamError, match="input 2 cannot be run by the model"):
        store.add(expert_of(tmp_path / "base", tmp_path / "three", 4), inputs=bad)
    with pytest.raises(MergestreamError, match="one is not the expert that was added as two"):
        store.calibrate("two", TEXTS, tmp_path / "one")
    with pytest.raises(UsageError, match="no expert named three"):
        store.calibrate("three", TEXTS)
    assert files(store.path) == before
    opcm = Store.create(tmp_path / "opcm", tmp_path / "base", "opcm", progress=NoProgress())
    with pytest.raises(UsageError, match="only a ledger takes inputs of an expert, and this store uses opcm"):
        opcm.add(tmp_path / "one", inputs=TEXTS)


def test_damage_is_found(store: Store) -> None:
    path = next((store.path / "inputs").rglob("moments.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(MergestreamError, match=r"moments\.safetensors is damaged: the digest of .* does not match"):
        store.verify()
    index = path.with_name("inputs.json")
    index.write_text(index.read_text().replace('"count": 6', '"count": 7'))
    with pytest.raises(MergestreamError, match=r"inputs\.json is damaged: its digest does not match the manifest"):
        read(store, "one")


def test_an_adapter_keeps_moments_of_the_weights_it_changes(tmp_path: Path, workshop: Workshop) -> None:
    base = save_with_companions(families.llama(), tmp_path / "base")
    adapter = workshop.adapter(base, r=2, target_modules=["q_proj", "down_proj"])
    store = Store.create(tmp_path / "store", base, progress=NoProgress())
    store.add(adapter, inputs=Inputs(TEXTS, tokens=2))
    found = read(store, "adapter")
    assert found is not None
    assert {name.split(".")[-2] for name in found.layers.shared} == {"q_proj", "down_proj"}


def test_the_command_line(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = tmp_path / "inputs.jsonl"
    inputs.write_text("".join(json.dumps({"text": text, "label": 1}) + "\n" for text in TEXTS))
    assert main(["calibrate", str(store.path), "two", "--inputs", str(inputs), "--inputs-count", "3"]) == 0
    output = capsys.readouterr()
    assert f"two was run on 3 inputs; {store.path} is at step 2" in output.out
    assert f"note: {inputs}: 3 inputs are few" in output.err
    assert main(["status", str(store.path)]) == 0
    assert " inputs " in capsys.readouterr().out
    assert main(["undo", str(store.path)]) == 0
    assert "the inputs of two taken back" in capsys.readouterr().out
    expert = expert_of(tmp_path / "base", tmp_path / "three", 7)
    assert main(["add", str(store.path), str(expert), "--inputs", str(inputs), "--quiet"]) == 0
    assert main(["status", str(store.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["ledger"]["inputs_bytes"] > 0
    assert main(["calibrate", str(store.path), "two"]) == 2
    assert main(["add", str(store.path), "a", "b", "--inputs", str(inputs)]) == 2
    assert main(["add", str(store.path), str(expert), "--inputs", str(tmp_path / "missing"), "--allow-duplicate"]) == 1
    assert "cannot be opened" in capsys.readouterr().err


def test_an_expert_in_memory_is_run_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    expert = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    store = Store.create(tmp_path / "store", save_model(tmp_path / "base", base.state_dict()))
    samples = [torch.randn(3, 16) for _ in range(8)]
    inputs = Inputs(samples, call=lambda model, sample: model(sample))
    added = store.add(expert, "mine", inputs=inputs, allow_other_base=True)
    assert added.inputs is not None and added.inputs.count == 8
