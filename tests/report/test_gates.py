from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from mergestream import Average, Ledger, Store
from mergestream.commands import CommandError
from mergestream.errors import MergestreamError, UsageError
from mergestream.report.diff import compare
from mergestream.report.gates import Gate, GateError, Gatekeeper, evaluate
from tests.conftest import RunCommand, Toys, files
from tests.report.conftest import known, make_ledger

SCORE = shlex.join([sys.executable, "-c", "import os, sys; print(len(os.listdir(sys.argv[1])), 'files'); print('{}')"])


def command(printed: str) -> str:
    return SCORE.replace("{}", printed) + " {model}"


def contents(store: Store) -> dict[str, bytes]:
    return files(store.path, "")


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("kept>=0.6", 0.6, True),
        ("kept >= 0.6", 0.5999, False),
        ("max_cosine<=0.5", 0.51, False),
        ("relative_norm<3", 3.0, False),
        ("lambda>1e-3", 0.01, True),
        ("score>-1", -0.5, True),
        ("max_cosine<=0.5", None, True),
        ("max_cosine<=0.5", float("nan"), False),
    ],
)
def test_gates_hold_or_fail(text: str, value: float | None, holds: bool) -> None:
    assert Gate.parse(text).holds(value) is holds


@pytest.mark.parametrize("text", ["kept", "kept=0.6", "kept>=much", "speed>=3", "kept>=0.6 or else", "", "kept<=1e999"])
def test_what_is_no_gate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a condition"):
        Gate.parse(text)


def test_gates_that_hold_are_recorded_with_their_values(store: Store, models: Path) -> None:
    gates = ["kept>=0.1", "relative_norm<=3"]
    entry = store.add(models / "pets", gates=gates)
    assert [gate["gate"] for gate in entry.gates] == gates
    again = Store(store.path).history[-1]
    assert again.gates[0]["value"] == entry.kept
    assert again.gates[1]["value"] == pytest.approx(entry.norm / store.history[1].mean_norm)


def test_a_ledger_can_refuse_an_expert_that_is_too_similar(tmp_path: Path, models: Path) -> None:
    store = make_ledger(tmp_path / "store", models, ("cars", "digits"))
    with pytest.raises(GateError, match="the largest cosine to an expert in the ledger is"):
        store.add(models / "pets", gates=["max_cosine<=0.01"])
    entry = store.add(models / "pets", gates=["max_cosine<=0.9", "damage<=9"])
    assert entry.gates[0]["value"] == pytest.approx(max(known(store.similarity().cosines[2][:2])))
    assert entry.gates[1]["value"] == pytest.approx(max(store.damage().values()))


def test_an_accumulator_has_no_gate_on_cosines(store: Store, models: Path) -> None:
    with pytest.raises(UsageError, match="only a ledger has max_cosine, and this store uses opcm"):
        store.add(models / "pets", gates=["max_cosine<=0.9"])


def test_every_failed_gate_has_its_sentence_and_the_store_is_unchanged(
    store: Store, models: Path, mergestream: RunCommand
) -> None:
    before = contents(store)
    gates = ("--gate", "kept>=0.999", "--gate", "norm<=0.01", "--gate", "norm>=0", "--gate", "distance<=0")
    result = mergestream("add", store.path, models / "pets", *gates)
    assert result.code == 4
    lines = result.err.strip().splitlines()
    assert len(lines) == 3
    for line, gate in zip(lines, ("kept>=0.999", "norm<=0.01", "distance<=0"), strict=True):
        assert line.startswith("error: ") and gate in line
    assert contents(store) == before


def test_the_first_expert_has_nothing_to_be_compared_with(tmp_path: Path, models: Path) -> None:
    store = Store.create(tmp_path / "store", models / "base", Ledger())
    entry = store.add(models / "cars", gates=["max_cosine<=0", "relative_norm<=0", "kept>=0"])
    assert [gate["value"] for gate in entry.gates] == [None, None, entry.kept]


def test_the_candidate_is_evaluated_before_it_counts(store: Store, models: Path, tmp_path: Path) -> None:
    entry = store.add(models / "pets", evaluate=command("epoch 3 accuracy: 0.75"), gates=["score>=0.7"])
    assert entry.evaluation == {"command": command("epoch 3 accuracy: 0.75"), "score": 0.75}
    assert entry.gates == [{"gate": "score>=0.7", "value": 0.75}]
    assert json.loads(json.dumps(Store(store.path).history[-1].evaluation))["score"] == 0.75
    assert not (store.path / "candidate").exists()
    store.verify()


def test_the_candidate_is_the_model_that_export_writes_afterwards(store: Store, models: Path, tmp_path: Path) -> None:
    copy = f"{shlex.join([sys.executable, '-c', COPY, str(tmp_path / 'copy')])} {{model}}"
    store.add(models / "pets", evaluate=copy)
    exported = store.export(tmp_path / "exported")
    assert files(tmp_path / "copy", ".safetensors") == files(exported, ".safetensors")


COPY = "import shutil, sys; shutil.copytree(sys.argv[2], sys.argv[1]); print(1)"


def test_a_score_that_is_too_low_leaves_the_store_unchanged(
    store: Store, models: Path, mergestream: RunCommand
) -> None:
    before = contents(store)
    options = ("--evaluate", command("0.4 0.75"), "--gate", "score>=0.8")
    result = mergestream("add", store.path, models / "pets", *options)
    assert (result.code, len(result.err.splitlines())) == (4, 1)
    assert "0.75" in result.err and "score>=0.8" in result.err
    assert contents(store) == before


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("print('no figures here, v2')", "printed no number"),
        ("pass", "printed no number"),
        ("print(0.5, '1e999')", "printed inf as its last number"),
        ("print('accuracy at step 3:', float('nan'))", "printed nan as its last number"),
        ("print('[' * 9999)", "printed no number"),
    ],
)
def test_an_evaluation_that_fails_leaves_the_store_unchanged(
    store: Store, models: Path, code: str, message: str
) -> None:
    before = contents(store)
    with pytest.raises(MergestreamError, match=message):
        store.add(models / "pets", evaluate=shlex.join([sys.executable, "-c", code, "{model}"]))
    assert contents(store) == before


@pytest.mark.parametrize(
    ("gates", "command", "message"),
    [
        (["score>=1"], None, "needs a command"),
        ([], "python score.py", "does not contain {model}"),
        ([], "python 'score.py {model}", "is not a command line"),
    ],
)
def test_mistakes_show_before_any_work(scored: Store, gates: list[str], command: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Gatekeeper.of(gates, command, scored.manifest)


def test_the_command_sees_no_shell(tmp_path: Path) -> None:
    awkward = tmp_path / "a b; echo 7 $HOME"
    awkward.mkdir()
    show = shlex.join([sys.executable, "-c", "import os, sys; print(int(os.path.isdir(sys.argv[1])), '-2.5e-1')"])
    assert evaluate(f"{show} {{model}}", awkward, tmp_path)["score"] == -0.25


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(MergestreamError, match="no-such-program cannot be run"):
        evaluate("no-such-program {model}", tmp_path, tmp_path)


def test_gate_errors_have_an_exit_code_of_their_own() -> None:
    assert (GateError.exit_code, GateError.kind) == (4, "gate")


def test_a_misspelt_quantity_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean damage\? \(the quantities: kept"):
        Gate.parse("damge<=0.3")


def test_a_hanging_evaluation_is_stopped(store: Store, models: Path) -> None:
    before = contents(store)
    hanging = shlex.join([sys.executable, "-c", "import time; time.sleep(60)", "{model}"])
    with pytest.raises(CommandError, match=r"after 0\.2 s; .*--evaluate-timeout SECONDS; nothing was added"):
        store.add(models / "pets", evaluate=hanging, evaluate_timeout=0.2)
    assert contents(store) == before


def test_a_gate_on_the_distance_has_it_measured_where_the_method_does_not_need_it(tmp_path: Path, toys: Toys) -> None:
    store = Store.create(tmp_path / "store", toys.base, Average())
    assert store.add(toys.experts[0]).distance is None
    with pytest.raises(MergestreamError, match="the distance of the merged model to the base is"):
        store.add(toys.experts[1], gates=["distance<=0"])
    passed = store.add(toys.experts[1], gates=["distance>0"])
    assert passed.distance == passed.gates[0]["value"]
    out = store.export(tmp_path / "out")
    assert passed.distance == pytest.approx(compare(store, "0", str(out)).total.distance, rel=1e-2)
