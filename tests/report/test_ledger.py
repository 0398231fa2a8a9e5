"""What a ledger tells of its experts: every number against a plain formula in float64, made from the experts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mergestream import Ledger, Store
from mergestream.engine import LocalEngine
from mergestream.engine.local import single_threaded
from mergestream.merging.interference import Interference
from mergestream.progress import Progress
from mergestream.report.diagnostics import HIGH_DAMAGE
from mergestream.report.facts import Facts
from mergestream.report.render import render_html
from mergestream.report.sections import make_sections
from tests.conftest import RunCommand, files, save_model
from tests.report.conftest import EXPERTS, expert, known, make_store, model

LINEAR = ("pooler.weight", *(f"encoder.layer.{n}.{part}.weight" for n in (1, 2, 10) for part in ("up", "down")))
LAYERS = ("encoder.layer.1", "encoder.layer.2", "encoder.layer.10", "pooler")
RANK = 16
Triplets = tuple[Tensor, Tensor, Tensor]


def make_ledger(path: Path, models: Path, experts: tuple[str, ...] = EXPERTS) -> Store:
    with single_threaded():
        store = Store.create(path, models / "base", Ledger(entries="float32"))
        for name in experts:
            store.add(models / name)
    return store


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Store:
    """Three experts; shared by the tests of this file: never write to it."""
    return make_ledger(tmp_path_factory.mktemp("stores") / "ledger", models)


@pytest.fixture
def pair(tmp_path: Path, models: Path) -> Store:
    """Two experts, in a place of its own."""
    return make_ledger(tmp_path / "pair", models, EXPERTS[:2])


def interference(store: Store) -> Interference:
    found = Facts.of(store).interference
    assert found
    return found


# --- the plain formulas ------------------------------------------------------------------------------------


def deltas(models: Path, name: str) -> dict[str, Tensor]:
    base, tuned = load_file(models / "base/model.safetensors"), load_file(models / name / "model.safetensors")
    return {tensor: tuned[tensor].double() - base[tensor].double() for tensor in base}


def plain_held(delta: dict[str, Tensor], sharing: int = 8) -> float:
    """The leading directions of every matrix, and all of what has one dimension, against all there is."""
    held: list[float] = []
    for tensor in delta.values():
        energies = torch.linalg.svdvals(tensor).square() if tensor.ndim == 2 else tensor.square()
        held += energies[: RANK // sharing if tensor.ndim == 2 else None].tolist()
    return math.fsum(held) / float(sum(tensor.square().sum() for tensor in delta.values()))


def leading(delta: Tensor, sharing: int = 8) -> Triplets:
    u, s, vt = torch.linalg.svd(delta, full_matrices=False)
    kept = RANK // sharing
    return u[:, :kept], s[:kept], vt[:kept].T


def plain_agree(parts: list[Triplets], norms2: list[float]) -> Tensor:
    """M = S (I − P Pᵀ) + D P Λ⁻¹ Pᵀ, all of it dense."""
    zero = torch.zeros((), dtype=torch.float64)
    C = sum((v @ torch.diag(s**2) @ v.T / n for (_, s, v), n in zip(parts, norms2, strict=True)), zero)
    D = sum((u @ torch.diag(s**3) @ v.T / n for (u, s, v), n in zip(parts, norms2, strict=True)), zero)
    S = sum((u @ torch.diag(s) @ v.T for u, s, v in parts), zero)
    values, vectors = torch.linalg.eigh(C)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    K = math.ceil(float(values.sqrt().sum() ** 2 / values.sum()))
    P = vectors[:, :K]
    M: Tensor = S @ (torch.eye(len(C), dtype=torch.float64) - P @ P.T) + D @ P @ torch.diag(1 / values[:K]) @ P.T
    return M


def plain_damage(matrices: list[Tensor]) -> list[float]:
    parts = [leading(delta) for delta in matrices]
    M = plain_agree(parts, [float(delta.square().sum()) for delta in matrices])
    found = []
    for u, s, v in parts:
        delta, magnitude = u @ torch.diag(s) @ v.T, v @ torch.diag(s) @ v.T
        found.append(float(((M - delta) @ magnitude).square().sum() / (magnitude @ magnitude).square().sum()))
    return found


def plain_overlap(one: Tensor, other: Tensor) -> float:
    a, b = (v @ torch.diag(s**2) @ v.T for _, s, v in (leading(one), leading(other)))
    return float((a * b).sum() / (a.norm() * b.norm()))


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


# --- the numbers -------------------------------------------------------------------------------------------


def test_held_is_the_share_of_the_leading_directions(ledger: Store, models: Path) -> None:
    found = Facts.of(ledger)
    assert found.survival.experts == EXPERTS and found.manifest.sharing == 8
    for name, held, entry in zip(EXPERTS, found.survival.total, ledger.history, strict=True):
        assert held == pytest.approx(plain_held(deltas(models, name)), rel=1e-5)
        assert held == pytest.approx(entry.kept, rel=1e-5)


def test_damage_is_what_the_formula_of_the_readout_says(ledger: Store, models: Path) -> None:
    experts = [deltas(models, name) for name in EXPERTS]
    plain = {tensor: plain_damage([delta[tensor] for delta in experts]) for tensor in LINEAR}
    found = interference(ledger)
    assert found.layers == LAYERS
    for i in range(len(EXPERTS)):
        assert found.damage[i] == pytest.approx(mean([plain[tensor][i] for tensor in LINEAR]), abs=1e-5)
        for layer, value in zip(LAYERS, found.layer_damage[i], strict=True):
            of_layer = [plain[tensor][i] for tensor in LINEAR if tensor.startswith(f"{layer}.")]
            assert value == pytest.approx(mean(of_layer), abs=1e-5)
    assert max(known(found.damage)) > 0.005, "there is something to tell"
    with ledger.snapshot() as snapshot:
        alone = snapshot.reading(ledger.engine).damage(ledger.engine)
    assert [alone[name] for name in EXPERTS] == pytest.approx(found.damage)


def test_overlap_is_the_cosine_of_what_experts_answer_to(ledger: Store, models: Path) -> None:
    experts, found = [deltas(models, name) for name in EXPERTS], interference(ledger)
    plain = {
        (i, j): {tensor: plain_overlap(experts[i][tensor], experts[j][tensor]) for tensor in LINEAR}
        for i in range(3)
        for j in range(3)
    }
    for (i, j), of_tensors in plain.items():
        assert found.overlap[i][j] == pytest.approx(mean(list(of_tensors.values())), abs=1e-5)
    for i in range(3):
        for n, layer in enumerate(LAYERS):
            for j in range(3):
                of_layer = [value for tensor, value in plain[i, j].items() if tensor.startswith(f"{layer}.")]
                assert found.layer_overlap[n][i, j] == pytest.approx(mean(of_layer), abs=1e-5)
    pair = found.of_pair(0, 2)
    assert list(pair.values()) == sorted(pair.values(), reverse=True) and set(pair) == set(LAYERS)


def test_entries_are_cut_as_more_experts_come(tmp_path: Path, models: Path) -> None:
    store = make_ledger(tmp_path / "store", models)
    for seed in range(9 - len(EXPERTS)):
        store.add(save_model(tmp_path / f"more-{seed}", expert(model(), 50 + seed)))
    found = store.survival()
    assert found.total[0] == pytest.approx(plain_held(deltas(models, "cars"), sharing=9), rel=1e-5)
    assert found.total[0] < store.history[0].kept
    assert store.manifest.sharing == 9


def test_the_numbers_do_not_depend_on_the_number_of_workers(ledger: Store) -> None:
    with ledger.snapshot() as snapshot:
        alone, many = (snapshot.reading(engine).interference(engine, Progress()) for engine in map(LocalEngine, (1, 8)))
    assert alone == many


def test_what_experts_have_not_moved_is_not_compared(tmp_path: Path, models: Path) -> None:
    base = load_file(models / "base/model.safetensors")
    for name, moved in (("up", "encoder.layer.1.up.weight"), ("bias", "pooler.bias")):
        changed = base[moved] + 0.1 * torch.randn(base[moved].shape, generator=torch.Generator().manual_seed(1))
        save_model(tmp_path / name, base | {moved: changed})
    store = Store.create(tmp_path / "store", models / "base", Ledger())
    store.add(tmp_path / "up"), store.add(tmp_path / "bias")
    found, facts = interference(store), Facts.of(store)
    assert found.damage[1] is None and found.overlap[0][1] is None and facts.survival.total[1] == 1
    assert found.of_pair(0, 1) == {}
    assert "Predicted damage" in render_html(facts)
    json.dumps(facts.to_json(), allow_nan=False)


# --- inspect -----------------------------------------------------------------------------------------------


def test_inspect_predicts_what_the_report_tells_afterwards(pair: Store, models: Path) -> None:
    before = files(pair.path)
    told = pair.inspect(models / "pets")
    assert files(pair.path) == before
    assert told.lambda_ is None and told.distance is None
    pair.add(models / "pets")
    assert told.interference == interference(pair)
    assert told.kept == pair.history[-1].kept


def test_inspect_as_json_and_as_text(pair: Store, ledger: Store, models: Path, done: Callable[..., str]) -> None:
    data = json.loads(done("inspect", pair.path, models / "pets", "--json"))
    to_cars, to_digits = ledger.similarity().overlap[-1][:2]
    assert data["overlap"]["cars"]["mean"] == to_cars and data["overlap"]["digits"]["mean"] == to_digits
    assert data["lambda"] is None and data["distance"] is None and data["held"] == data["kept"] < 1
    assert list(data["damage"]) == ["cars", "digits", "pets"] and all(value >= 0 for value in data["damage"].values())
    assert list(data["overlap"]) == ["cars", "digits"] and set(data["overlap"]["cars"]["layers"]) == set(LAYERS)
    text = done("inspect", pair.path, models / "pets")
    assert f"held {data['held']:.1%}" in text and "λ" not in text and "distance" not in text and "protected" not in text
    assert f"{data['damage']['cars']:.3f}" in text and f"{data['overlap']['cars']['mean']:.3f}" in text
    worst, value = next(iter(data["overlap"]["cars"]["layers"].items()))
    assert f"{worst} {value:.2f}" in text


def test_inspect_the_first_expert_and_one_that_is_the_base(tmp_path: Path, models: Path) -> None:
    store = Store.create(tmp_path / "store", models / "base", Ledger())
    first = store.inspect(models / "cars").interference
    assert first and first.experts == ("cars",) and first.damage[0] == pytest.approx(0, abs=1e-4)
    of_base = store.inspect(models / "base").interference
    assert of_base and of_base.damage == (None,)


# --- gates -------------------------------------------------------------------------------------------------


def test_gates_on_damage_and_held_are_recorded_with_their_values(pair: Store, models: Path) -> None:
    entry = pair.add(models / "pets", gates=["damage<=0.3", "held>=0.1"])
    found = Facts.of(Store(pair.path))
    assert found.interference
    assert [gate["gate"] for gate in entry.gates] == ["damage<=0.3", "held>=0.1"]
    assert entry.gates[0]["value"] == pytest.approx(max(known(found.interference.damage)))
    assert entry.gates[1]["value"] == found.survival.total[-1]


def test_an_expert_that_would_do_too_much_damage_is_not_added(
    pair: Store, models: Path, mergestream: RunCommand
) -> None:
    before = files(pair.path)
    result = mergestream("add", pair.path, models / "pets", "--gate", "damage<=0.0001", "--gate", "held>=0.99")
    assert result.code == 4
    damage, held = result.err.splitlines()
    assert "the largest predicted damage" in damage and "damage<=0.0001" in damage and "held>=0.99" in held
    assert files(pair.path) == before


@pytest.mark.parametrize("quantity", ["lambda", "distance"])
def test_a_ledger_has_no_scale_to_gate_on(pair: Store, mergestream: RunCommand, quantity: str) -> None:
    result = mergestream("add", pair.path, "no-such-expert", "--gate", f"{quantity}>=0")
    assert result.code == 2 and len(result.err.splitlines()) == 1
    assert f"a ledger has no {quantity} before it is exported" in result.err


@pytest.mark.parametrize("quantity", ["damage", "held"])
def test_only_a_ledger_predicts_damage(store: Store, mergestream: RunCommand, quantity: str) -> None:
    result = mergestream("add", store.path, "no-such-expert", "--gate", f"{quantity}>=0")
    assert result.code == 2 and len(result.err.splitlines()) == 1
    assert f"only a ledger has {quantity}, and this store uses opcm" in result.err


# --- report ------------------------------------------------------------------------------------------------


def test_the_page_has_the_sections_of_a_ledger_and_none_of_a_state(ledger: Store) -> None:
    text = render_html(Facts.of(ledger))
    body = text[text.index("<body>") : text.index("<script>")]
    for heading in (
        "Share held, by layer",
        "Predicted damage, by layer",
    ):
        assert f"<h2>{heading}</h2>" in body
    for label in ("held", "damage", "most similar"):
        assert label in body
    for absent in ("λ", "√", "‖merged − base‖", ">kept<", ">q<", "Share kept"):
        assert absent not in body
    assert render_html(Facts.of(Store(ledger.path))) == text


def test_json_and_markdown_have_the_same_facts(ledger: Store, done: Callable[..., str]) -> None:
    found, facts = interference(ledger), Facts.of(ledger)
    data = json.loads(done("report", ledger.path, "--format", "json"))
    assert data["ledger"]["held"] == list(facts.survival.total) and data["ledger"]["damage"] == list(found.damage)
    assert data["ledger"]["overlap"] == [list(row) for row in found.overlap]
    assert data["experts"][1]["held"] == facts.survival.total[1] and data["experts"][1]["damage"] == found.damage[1]
    assert not {"lambda", "distance"} & data["experts"][0].keys()
    assert data["survival"]["kept"] == [list(row) for row in facts.survival.kept]
    text = done("report", ledger.path, "--format", "md")
    for heading in ("## Share held", "## Predicted damage", "## Similarity of the experts"):
        assert heading in text
    assert f"| {facts.survival.total[1]:.1%} | {found.damage[1]:.3f} |" in text and "λ" not in text


def test_other_stores_have_no_facts_of_a_ledger(scored: Store) -> None:
    facts = Facts.of(scored)
    assert facts.interference is None and facts.to_json()["ledger"] is None


def test_an_empty_ledger_has_a_report(tmp_path: Path, models: Path) -> None:
    facts = Facts.of(Store.create(tmp_path / "store", models / "base", Ledger()))
    assert "Add the first expert." in render_html(facts) and facts.to_json()["experts"] == []


def test_tables_have_the_numbers(ledger: Store) -> None:
    found = interference(ledger)
    tables = {section.key: section.table for section in make_sections(Facts.of(ledger)) if section.table}
    damage = tables["damage"].rows
    assert tuple(cell.sort for cell in damage[0][1:]) == found.damage
    assert damage[1][1].sort == found.layer_damage[0][0]
    cosines = tables["similarity"].rows
    assert cosines[0][2].sort == found.cosines[0][1] and cosines[0][1].shade is None
    assert tables["shares"].rows[0][2].sort == Facts.of(ledger).survival.total[1]


def test_findings_name_who_is_served_badly(tmp_path: Path, models: Path) -> None:
    base, cars = (load_file(models / name / "model.safetensors") for name in ("base", "cars"))
    save_model(tmp_path / "opposite", {name: 2 * base[name] - cars[name] for name in base})
    store = make_ledger(tmp_path / "store", models, ("cars", "digits"))
    assert not any("badly" in sentence for sentence in Facts.of(store).findings())
    store.add(tmp_path / "opposite")
    found, facts = interference(store), Facts.of(store)
    (damage,) = known(found.damage[:1])
    assert damage > HIGH_DAMAGE
    sentences = facts.findings()
    (badly,) = (sentence for sentence in sentences if sentence.startswith("Served badly by the merged model "))
    assert f"cars ({damage:.2f})" in badly
    (held,) = (sentence for sentence in sentences if sentence.startswith("Less than half is held: "))
    assert f"digits ({facts.survival.total[1]:.0%})" in held


def test_the_model_card_of_a_ledger_shows_no_scale(ledger: Store, tmp_path: Path) -> None:
    exported = ledger.export(tmp_path / "merged")
    card = (exported / "README.md").read_text(encoding="utf-8")
    assert not list(exported.glob("*.png")) and "λ" not in card


# --- damage on disk ----------------------------------------------------------------------------------------


def flip(path: Path, tensor: str) -> None:
    """Change one bit of a tensor in a file."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    data[8 + length + json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0]] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("tensor", ["left:pooler.weight", "sigma:pooler.weight"])
def test_a_damaged_entry_is_named(
    pair: Store, models: Path, mergestream: RunCommand, tmp_path: Path, tensor: str
) -> None:
    damaged = pair.path / "steps/0002/model.safetensors"
    flip(damaged, tensor)
    before = files(pair.path)
    commands = [
        ("report", pair.path, "-o", tmp_path / "report.html"),
        ("report", pair.path, "--format", "md"),
        ("inspect", pair.path, models / "pets"),
        ("add", pair.path, models / "pets", "--gate", "damage<=1"),
    ]
    commands += [("log", pair.path)] if tensor.startswith("sigma") else []
    for command in commands:
        result = mergestream(*command)
        assert result.code == 1 and len(result.err.splitlines()) == 1, result
        assert f"{damaged} is damaged: the digest of {tensor} does not match" in result.err
    assert files(pair.path) == before and not (tmp_path / "report.html").exists()


def test_a_store_of_another_method_tells_survival_as_before(tmp_path: Path, models: Path) -> None:
    store = make_store(tmp_path / "store", models, ("cars",))
    assert set(store.survival().total) == {1.0}
