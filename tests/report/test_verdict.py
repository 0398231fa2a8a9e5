"""The first sentence of a report, the scores against the experts, and the conflicts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mergestream import Ledger, Store
from mergestream.engine.local import single_threaded
from mergestream.report import figures
from mergestream.report.facts import OPPOSED, Facts
from mergestream.report.markdown import markdown
from mergestream.report.page import page
from mergestream.report.scores import Scores, TaskScore
from mergestream.report.verdict import bwt_in_words, signed, verdict
from tests.conftest import save_model
from tests.report.conftest import EXPERTS, SCORES, model
from tests.report.test_ledger import deltas, leading, mean


@pytest.fixture(scope="module")
def opposed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two experts, of which one undoes the other, but for the first layer."""
    place, base = tmp_path_factory.mktemp("opposed"), model()
    generator = torch.Generator().manual_seed(5)
    moved = {name: 0.01 * torch.randn(tensor.shape, generator=generator) for name, tensor in base.items()}
    save_model(place / "base", base)
    save_model(place / "push", {name: tensor + moved[name] for name, tensor in base.items()})
    pulled = {name: tensor - moved[name] * (-1 if ".1." in name else 1) for name, tensor in base.items()}
    save_model(place / "pull", pulled)
    return place


def of_two(path: Path, models: Path, method: Any) -> Store:
    with single_threaded():
        store = Store.create(path, models / "base", method)
        for name in ("push", "pull"):
            store.add(models / name)
    return store


def test_by_scores(scored: Store) -> None:
    told = verdict(Facts.of(scored))
    assert told == (
        "3 experts are merged by opcm: the model keeps 83% of what they score alone (accuracy 0.783 against 0.94 "
        "in the mean; the base has 0.3); look at cars first, which has 0.7 where its expert has 0.95."
    )
    text, data = markdown(Facts.of(scored)), Facts.of(scored).to_json()
    assert text.splitlines()[2] == told and data["verdict"] == told
    assert f'<p class="verdict" id="verdict">{told}</p>' in page(Facts.of(scored))
    assert "| cars | 0.700 | 0.950 | 0.200 | 26.3% |" in text


def test_scores_of_an_earlier_step_are_told_as_such(scored: Store) -> None:
    facts = Facts.of(scored)
    earlier = dataclasses.replace(facts, scores=Scores.of(EXPERTS, SCORES[:2], experts=[0.95, 0.97, 0.9]))
    assert "opcm: after step 2 the model keeps 91% of" in verdict(earlier)
    alone = dataclasses.replace(facts, scores=Scores.of(EXPERTS, SCORES, metric="F1"))
    assert "the model has a mean F1 of 0.783; see what is worth a look below." in verdict(alone)
    unknown = dataclasses.replace(facts, scores=Scores.of(EXPERTS, [[None, 0.1, 0.2]]))
    assert "after step 1 the model was not scored on all tasks" in verdict(unknown)


def test_without_scores_by_what_the_store_can_tell(store: Store, models: Path, tmp_path: Path) -> None:
    facts = Facts.of(store)
    least, (cosine, _, _) = min(entry.kept for entry in store.history), next(facts.similarity.pairs())
    assert verdict(facts) == (
        f"2 experts are merged by opcm: {least:.0%} to 100% of each entered, at cosines of {cosine:.2f} to each other; "
        "nothing stands out."
    )
    with single_threaded():
        ledger = Store.create(tmp_path / "ledger", models / "base", Ledger())
    assert verdict(Facts.of(ledger)) == "Nothing is merged yet: add the first expert (mergestream add)."
    ledger.add(models / "cars")
    assert verdict(Facts.of(ledger)).startswith("1 expert is merged by ledger: the ledger holds ")
    assert "predicts a damage of 0.00 (0 is none, 1 the base); " in verdict(Facts.of(ledger))


def test_conflicts_are_pairs_and_the_layers_they_are_in(opposed: Path, tmp_path: Path) -> None:
    facts = Facts.of(of_two(tmp_path / "store", opposed, Ledger(entries="float32")))
    (found,) = facts.conflicts
    assert (found.one, found.other) == ("push", "pull") and found.cosine < OPPOSED
    assert set(found.layers) == {"encoder.layer.2", "encoder.layer.10", "pooler"}
    assert list(found.layers.values()) == pytest.approx([-1, -1, -1], abs=1e-5)
    assert str(found).startswith(f"push and pull pull against each other (cosine −{-found.cosine:.2f}), most in ")
    text = page(facts)
    assert str(found) in text and f"## Conflicts\n\n* {str(found)[:20]}" in markdown(facts)
    assert json.loads(json.dumps(facts.to_json()))["conflicts"] == [dataclasses.asdict(found)]


def test_the_cosine_in_a_layer_is_of_what_the_entries_hold(opposed: Path, models: Path, tmp_path: Path) -> None:
    with single_threaded():
        store = Store.create(tmp_path / "store", models / "base", Ledger(entries="float32"))
        store.add(models / "cars")
        store.add(models / "pets")
    found = Facts.of(store).ledger
    assert found
    one, other = deltas(models, "cars"), deltas(models, "pets")

    def cosine(name: str) -> float:
        a, b = (u @ torch.diag(s) @ v.T for u, s, v in (leading(one[name]), leading(other[name])))
        return float((a * b).sum() / (a.norm() * b.norm()))

    plain = mean([cosine(f"encoder.layer.2.{part}.weight") for part in ("up", "down")])
    place = found.interference.layers.index("encoder.layer.2")
    assert found.interference.layer_cosine[place][0, 1] == pytest.approx(plain, abs=1e-5)


def test_an_accumulator_has_forgotten_the_layers(opposed: Path, tmp_path: Path) -> None:
    from mergestream import Average

    facts = Facts.of(of_two(tmp_path / "store", opposed, Average()))
    (found,) = facts.conflicts
    assert found.layers == {} and str(found).endswith(").")
    assert verdict(facts).endswith("; look at push and pull first, which pull against each other.")


def test_bwt_is_read_the_right_way_round(scored: Store) -> None:
    facts = Facts.of(scored)
    assert '<dd class="lost">−0.150<p>below 0: forgotten since their own experts came</p>' in page(facts)
    gained = dataclasses.replace(facts, scores=Scores.of(EXPERTS, [SCORES[0], SCORES[1], [0.95, 0.97, 0.9]]))
    text = page(gained)
    assert '<dd class="won">+0.035<p>not below 0: nothing forgotten since' in text
    assert signed(-0.5) == "−0.500" and bwt_in_words(0).startswith("not below 0")


def test_the_tasks_that_lost_most_are_drawn() -> None:
    tasks = [TaskScore("a", 0.5, 0.8, None), TaskScore("b", None, 0.8, 0.1), TaskScore("c", 2.0, -1.0, None)]
    assert [task.lost for task in tasks] == [pytest.approx(0.375), 0.0, 0.0]
    drawn = figures.against_experts(tasks, "reward")
    assert [trace.name for trace in drawn.data[1:]] == ["base", "merged", "expert alone"]
    assert drawn.data[2].x == (0.5, None, 2.0) and drawn.layout.xaxis.title.text == "reward"


def test_scores_of_hundreds_of_tasks_are_bounded(scored: Store) -> None:
    names = [f"task-{i}" for i in range(300)]
    many = Scores.of(names, [[0.5] * 300] * 300, experts=[0.6 + i / 1000 for i in range(300)])
    text = page(dataclasses.replace(Facts.of(scored), scores=many))
    assert "Of 300 tasks the 24 that lost most are shown." in text and "Most is lost of task-299, " in text
