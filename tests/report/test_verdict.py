"""The first lines of a report, the scores against the experts, and experts that oppose each other."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import escape

from mergestream import Ledger, Store
from mergestream.engine.local import single_threaded
from mergestream.report.facts import OPPOSED, Facts
from mergestream.report.render import render_html, render_markdown
from mergestream.report.scores import Scores, TaskScore
from mergestream.report.verdict import NextStep, find_problem, next_step, verdict
from tests.conftest import save_model
from tests.report.conftest import EXPERTS, SCORES, model


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
        "3 experts merged by opcm. The model keeps 83% of the experts' own scores (mean accuracy 0.783, experts 0.94, "
        "base 0.3). cars lost most: 0.7, its expert has 0.95."
    )
    text, data = render_markdown(Facts.of(scored)), Facts.of(scored).to_json()
    assert text.splitlines()[2] == told and data["verdict"] == told
    assert f'<p class="verdict" id="verdict">{escape(told)}</p>' in render_html(Facts.of(scored))
    assert "| cars | 0.700 | 0.950 | 0.200 | 26.3% |" in text


def test_scores_of_an_earlier_step_are_told_as_such(scored: Store) -> None:
    facts = Facts.of(scored)
    earlier = dataclasses.replace(facts, scores=Scores.of(EXPERTS, SCORES[:2], experts=[0.95, 0.97, 0.9]))
    assert "opcm. After step 2 the model keeps 91% of" in verdict(earlier)
    alone = dataclasses.replace(facts, scores=Scores.of(EXPERTS, SCORES, metric="F1"))
    assert verdict(alone).endswith("opcm. The model has a mean F1 of 0.783.")
    unknown = dataclasses.replace(facts, scores=Scores.of(EXPERTS, [[None, 0.1, 0.2]]))
    assert "After step 1 the model was not scored on all tasks." in verdict(unknown)


def test_without_scores_by_what_the_store_can_tell(store: Store, models: Path, tmp_path: Path) -> None:
    facts = Facts.of(store)
    least = min(entry.kept for entry in store.history)
    assert verdict(facts) == (
        f"2 experts merged by opcm. {least:.0%} to 100% of each entered the merged state. There are no findings."
    )
    with single_threaded():
        ledger = Store.create(tmp_path / "ledger", models / "base", Ledger())
    assert verdict(Facts.of(ledger)) == "This store has no experts yet."
    ledger.add(models / "cars")
    assert verdict(Facts.of(ledger)).startswith("1 expert merged by ledger. The ledger holds ")
    assert "Predicted damage: 0.00 (0 is none, 1 is the base)." in verdict(Facts.of(ledger))


def test_the_first_lines_say_what_to_do_next(store: Store, scored: Store, models: Path, tmp_path: Path) -> None:
    facts = Facts.of(store)
    merge = NextStep("Merge the experts.", f"mergestream export {store.path} merged")
    assert next_step(facts) == merge and facts.to_json()["next_step"] == dataclasses.asdict(merge)
    assert render_markdown(facts).splitlines()[4] == f"Next: {merge.advice} `{merge.command}`"
    assert f"<strong>Next:</strong> {merge.advice} <code>{merge.command}</code>" in render_html(facts)
    lost = next_step(Facts.of(scored))
    assert lost.advice == "Merge by a ledger, which can leave out cars later; opcm cannot."
    last = dataclasses.replace(Facts.of(scored), scores=Scores.of(EXPERTS, SCORES, experts=[0.7, 0.85, 1]))
    assert next_step(last) == NextStep(
        "Take back pets, the last expert, and serve it alone.", f"mergestream undo {scored.path}"
    )
    empty = Facts.of(Store.create(tmp_path / "empty", models / "base"))
    assert next_step(empty).command == f"mergestream add {tmp_path / 'empty'} EXPERT"


def test_a_ledger_leaves_one_out_or_serves_all_one_by_one(models: Path, tmp_path: Path) -> None:
    with single_threaded():
        store = Store.create(tmp_path / "ledger", models / "base", Ledger())
        for name in EXPERTS:
            store.add(models / name)
    facts = Facts.of(store)
    one = dataclasses.replace(facts, scores=Scores.of(EXPERTS, SCORES, experts=[0.95, 0.85, 0.8]))
    assert next_step(one).advice == "Leave out cars, and serve it separately."
    assert next_step(one).command.endswith("ledger merged --without cars")
    most = dataclasses.replace(facts, scores=Scores.of(EXPERTS, SCORES, experts=[0.95, 1, 0.8]))
    assert next_step(most).advice.startswith("Serve the experts one by one as adapters")
    assert next_step(most).command.endswith("ledger adapters --format loras")


def test_a_merge_of_adapters_is_scored_before_it_is_used(models: Path, tmp_path: Path) -> None:
    with single_threaded():
        store = Store.create(tmp_path / "ledger", models / "base", Ledger())
        store.add(models / "cars")
    facts = Facts.of(store)
    history = (dataclasses.replace(facts.history[0], rank=8),)
    adapters = dataclasses.replace(facts, manifest=dataclasses.replace(facts.manifest, history=history))
    assert next_step(adapters).advice == "Merge the adapters, and score the model before you use it."
    assert "Only scores show how good a merge of adapters is." in verdict(adapters)


def test_experts_that_oppose_each_other_are_found(opposed: Path, tmp_path: Path) -> None:
    facts = Facts.of(of_two(tmp_path / "store", opposed, Ledger(budget=8.0, entries="float32")))
    (found,) = facts.conflicts
    assert found == (facts.interference and facts.interference.cosines[0][1], 0, 1) and -1 < found[0] < OPPOSED
    sentence = f"Experts that oppose each other (cosine): push and pull (−{-found[0]:.2f})."
    assert sentence in facts.findings() and sentence in render_html(facts)
    assert facts.interference
    unharmed = dataclasses.replace(facts, interference=dataclasses.replace(facts.interference, damage=(None, None)))
    assert find_problem(unharmed) == (["pull"], f"push and pull oppose each other (cosine −{-found[0]:.2f}).")
    told = json.loads(json.dumps(facts.to_json()))["conflicts"]
    assert told == [{"one": "push", "other": "pull", "cosine": found[0]}]


def test_scores_count_more_than_cosines(opposed: Path, tmp_path: Path) -> None:
    facts = Facts.of(of_two(tmp_path / "store", opposed, Ledger(budget=8.0, entries="float32")))
    good = dataclasses.replace(facts, scores=Scores.of(["a", "b"], [[1, 1], [1, 1]], experts=[1, 1]))
    assert facts.conflicts and next_step(good).advice == "Merge the experts."


def test_bwt_is_read_the_right_way_round(scored: Store) -> None:
    facts = Facts.of(scored)
    assert "BWT −0.150 is the mean change since a task&#39;s expert was added (below 0: earlier" in render_html(facts)
    gained = dataclasses.replace(facts, scores=Scores.of(EXPERTS, [SCORES[0], SCORES[1], [0.95, 0.97, 0.9]]))
    assert "BWT +0.035" in render_html(gained) and "(not below 0: nothing was forgotten)" in render_html(gained)


def test_what_a_task_lost_is_known_where_its_expert_has_a_score() -> None:
    tasks = [TaskScore("a", 0.5, 0.8, None), TaskScore("b", None, 0.8, 0.1), TaskScore("c", 2.0, -1.0, None)]
    assert [task.lost for task in tasks] == [pytest.approx(0.375), 0.0, 0.0]


def test_scores_of_hundreds_of_tasks_are_bounded(scored: Store) -> None:
    names = [f"task-{i}" for i in range(300)]
    many = Scores.of(names, [[0.5] * 300] * 300, experts=[0.6 + i / 1000 for i in range(300)])
    text = render_html(dataclasses.replace(Facts.of(scored), scores=many))
    assert "This shows the 24 of 300 tasks that lost most." in text and ">task-299" in text
