"""What trackers are sent is read back with their own libraries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mergestream import OPCM, Average, MergestreamError, MergestreamWarning, Store
from mergestream.errors import UsageError
from mergestream.tracking import TrackedStep
from tests.conftest import Toys

WEIRD = "über 50% [x]"


@pytest.fixture
def store(tmp_path: Path, toys: Toys) -> Store:
    return Store.create(tmp_path / "store", toys.base, OPCM())


def expected(store: Store) -> list[dict[str, float]]:
    """The numbers of every step, from the store itself."""
    return [TrackedStep.of(store, entry).scalars for entry in store.history]


def test_the_numbers_of_a_step(store: Store, toys: Toys, tmp_path: Path) -> None:
    store.add(toys.experts[0], name="one")
    (tmp_path / "result.json").write_text('{"topic": 0.5, "code": 1}')
    command = f"sh -c 'cp {tmp_path}/result.json $0' {{scores}} {{model}}"
    entry = store.add(toys.experts[1], name=WEIRD, evaluate=command)
    step = TrackedStep.of(store, entry)
    assert (step.store, step.number, step.expert) == ("store", 2, WEIRD)
    assert step.config["method"] == "opcm"
    assert step.scalars == pytest.approx(
        {
            "norm": entry.norm,
            "mean_norm": entry.mean_norm,
            "relative_norm": entry.norm / store.history[0].norm,
            "kept": entry.kept,
            "seconds": entry.seconds,
            "distance": entry.distance,
            "scale": entry.scale,
            "lambda": entry.lambda_,
            "score": 0.75,
            "score/topic": 0.5,
            "score/code": 1.0,
        }
    )
    assert TrackedStep.of(store, store.history[0]).scalars.keys().isdisjoint({"relative_norm", "score"})


def test_of_a_ledger_what_is_held_and_damaged_takes_the_place_of_the_scale(tmp_path: Path, toys: Toys) -> None:
    ledger = Store.create(tmp_path / "ledger", toys.base)
    for number, expert in enumerate(toys.experts[:2]):
        entry = ledger.add(expert, name=f"e{number}", log=f"jsonl:{tmp_path / 'steps.jsonl'}")
    last = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[-1])
    assert last["held/e1"] == pytest.approx(ledger.survival().total[1])
    assert last["damage"] == max(last["damage/e0"], last["damage/e1"]) > 0
    assert entry.name == "e1" and {"scale", "lambda", "distance"}.isdisjoint(last)


def test_of_an_average_there_is_a_scale_and_no_lambda(tmp_path: Path, toys: Toys) -> None:
    average = Store.create(tmp_path / "average", toys.base, Average())
    found = TrackedStep.of(average, average.add(toys.experts[0])).scalars
    assert found["scale"] == 1.0 and "lambda" not in found


def test_jsonl_has_a_line_a_step(store: Store, toys: Toys, done: Callable[..., str], tmp_path: Path) -> None:
    done("add", store.path, *toys.experts[:2], "--log", "jsonl")
    done("undo", store.path)
    done("add", store.path, toys.experts[2], "--log", "jsonl", "--name", WEIRD)
    lines = [json.loads(line) for line in (tmp_path / "store.jsonl").read_text().splitlines()]
    assert [(line["step"], line["expert"]) for line in lines] == [(1, "expert-1"), (2, "expert-2"), (2, WEIRD)]
    store.refresh()
    for line, values in zip((lines[0], lines[2]), expected(store), strict=True):
        assert {name: value for name, value in line.items() if isinstance(value, float)} == pytest.approx(values)


def test_tensorboard(store: Store, toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    for expert in toys.experts[:2]:
        store.add(expert, log="tensorboard")
    events = EventAccumulator(str(tmp_path / "runs/store")).Reload()
    values = expected(store)
    assert set(events.Tags()["scalars"]) == values[0].keys() | values[1].keys()
    for name in values[1]:
        sent = {event.step: event.value for event in events.Scalars(name)}
        assert sent == pytest.approx({i: found[name] for i, found in enumerate(values, 1) if name in found})


@pytest.fixture
def mlflow_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import mlflow

    before, uri = mlflow.get_tracking_uri(), (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(uri)
    yield uri
    mlflow.set_tracking_uri(before)


def test_mlflow(store: Store, toys: Toys, mlflow_uri: str) -> None:
    import mlflow

    store.add(toys.experts[0], name=WEIRD, log="mlflow:merging")
    store.add(toys.experts[1], log="mlflow:merging")
    client = mlflow.MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name("merging")
    assert experiment
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["method"]) == ("store", "FINISHED", "opcm")
    assert run.data.tags["step.1"] == WEIRD
    values = expected(store)
    for name in values[0]:
        sent = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
        assert sent == pytest.approx({1: values[0][name], 2: values[1][name]})
    with mlflow.start_run() as active:
        store.add(toys.experts[2], log="mlflow")
    assert client.get_run(active.info.run_id).data.metrics["norm"] == store.history[2].norm


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Of a run's file: LevelDB's log format after seven bytes. The library has no reader in Python."""
    place, block, record = 7, 1 << 15, b""
    while place < len(data):
        if block - place % block < 7:  # no room for a header: zeros
            place += block - place % block
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb(store: Store, toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    try:
        for expert in toys.experts[:2]:
            store.add(expert, log="wandb:team/merging")
        assert wandb.run
        assert (wandb.run.project, wandb.run.entity, wandb.run.name) == ("merging", "team", "store")
        assert wandb.run.config["method"] == "opcm"
    finally:
        wandb.finish()
        wandb.teardown()
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    rows = []
    for record in map(Record.FromString, wandb_records(written.read_bytes())):
        if record.WhichOneof("record_type") == "history":
            row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            rows.append({name: json.loads(value) for name, value in row.items()})
    assert [(row["step"], row["expert"]) for row in rows] == [(1, "expert-1"), (2, "expert-2")]
    for row, values in zip(rows, expected(store), strict=True):
        assert {name: row[name] for name in values} == pytest.approx(values)


def test_a_tracker_that_fails_is_a_note_and_the_step_is_done(store: Store, toys: Toys, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(MergestreamWarning, match=r"expert-1 is added, but not logged by jsonl:.*"):
        store.add(toys.experts[0], log=[f"jsonl:{tmp_path}/file/x.jsonl", f"jsonl:{tmp_path}/good.jsonl"])
    assert Store(store.path).manifest.step == 1
    assert len((tmp_path / "good.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ("wanbd", UsageError, r"--log wanbd .*did you mean wandb\? \(there are: wandb, mlflow, tensorboard, jsonl\)"),
        ("jsonl:", UsageError, "TRACKER"),
        ("jsonl:steps.txt", UsageError, "must end in .jsonl"),
        ("jsonl:{store}/x.jsonl", MergestreamError, "lies in the store"),
        ("tensorboard:{store}/steps", MergestreamError, "lies in the store"),
        ("mlflow", MergestreamError, r"--log mlflow needs mlflow: pip install 'mergestream\[mlflow\]'"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_work(
    store: Store, toys: Toys, given: str, error: type[MergestreamError], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergestream.tracking.find_spec", lambda name: None)
    if given.startswith("tensorboard"):
        monkeypatch.undo()
    with pytest.raises(error, match=told):
        store.add(toys.experts[0], log=given.format(store=store.path))
    assert not store.history
