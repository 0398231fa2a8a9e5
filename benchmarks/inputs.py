"""Measure what a few inputs per expert are worth: readouts that know them, and routing.

    python -m benchmarks.inputs text-lora --tasks 8 --test-limit 1000
    python -m benchmarks.inputs vision-lora --tasks 14 --rows tempered,outputs,regress@64,routed@64

A row is a readout (``tempered``; ``sum*0.5`` with a scale), a readout with inputs (``regress@64``: 64 training inputs
of every expert), or ``routed@64``. Words behind a plus say which inputs they are: ``regress@64+half`` (every other
expert has none), ``+wrong`` (each expert has those of the next task), ``+other`` (they are of no task of the suite),
``routed@64+fallback`` (a tenth of the inputs, the least certain, are answered by the merged model).

Writes results.json and table.md to docs/results/inputs/SUITE-TASKS; the protocol is in benchmarks/protocol.md.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import machine
from benchmarks.suites.causal import Encoded, share_right
from benchmarks.suites.experts import ExpertSuite
from benchmarks.suites.heads import all_features, pick
from benchmarks.suites.language import LanguageSuite, neutral_texts
from benchmarks.suites.trained import TrainedSuite
from mergestream import Inputs, Store
from mergestream.escaping import markdown_table
from mergestream.evaluation.streams import score
from mergestream.export.routed import read_router, save_router
from mergestream.files import write_json, write_text
from mergestream.ledger.selection import Selection
from mergestream.ledger.span import RightFactor
from mergestream.merging.entries import EntriesReading
from mergestream.progress import NoProgress
from mergestream.storage import total_bytes

ROWS = (
    *("default", "outputs", "regress@64", "routed@64", "regress@16", "regress@64+half", "regress@256"),
    *("regress@64+wrong", "regress@64+other", "routed@64+fallback", "routed@16", "routed@256"),
    *("average", "sum*0.5", "iso"),
)
SEED = 0
UNCERTAIN = 0.1
"""The share of an expert's own inputs that the merged model answers, with ``fallback``"""
Score = dict[str, float]


@dataclass(frozen=True)
class Row:
    """What is measured: ``readout*scale@count+source``."""

    key: str

    @cached_property
    def words(self) -> set[str]:
        return set(self.key.split("+")[1:])

    @cached_property
    def count(self) -> int:
        """Inputs per expert; 0 for a row without."""
        return int(self.key.partition("+")[0].partition("@")[2] or 0)

    @cached_property
    def selection(self) -> dict[str, Any]:
        """The options of `Store.export`."""
        name, _, scale = self.key.partition("@")[0].partition("*")
        if name == "average":
            return {"readout": "sum", "scale": "mean"}
        return {"readout": None if name == "default" else name, "scale": float(scale) if scale else None}


class Subject:
    """A suite, its experts in a store, and what can be measured of them."""

    def __init__(self, suite: ExpertSuite, work: Path) -> None:
        self.suite, self.tasks, self.work = suite, suite.tasks, work
        self._calibrated: dict[str, Store] = {}
        started = time.monotonic()
        self.plain = Store.create(work / "store", suite.base(), progress=NoProgress())
        for task in self.tasks:
            self.plain.add(suite.expert(task), name=task)
        self.add_seconds = (time.monotonic() - started) / len(self.tasks)
        self.calibrate_seconds: dict[str, float] = {}

    # --- inputs ---------------------------------------------------------------------------------------------

    def inputs(self, task: str, row: Row) -> Sequence[Any]:
        """Unlabelled inputs for the expert of a task."""
        if "other" in row.words:
            return self._of_no_task(task, row.count)
        source = self.tasks[(self.tasks.index(task) + 1) % len(self.tasks)] if "wrong" in row.words else task
        if isinstance(self.suite, LanguageSuite):
            train = self.suite.data(source)[0]
            return [self.suite.encoded(source, *train[index]) for index in _drawn(len(train), row.count)]
        items = self.suite.data(source).train_items
        return pick(items, _drawn(len(items), row.count))

    def _of_no_task(self, task: str, count: int) -> Sequence[Any]:
        """Sentences of Grimm's tales, or images of the tasks that are not merged."""
        place = self.tasks.index(task)
        if isinstance(self.suite, TrainedSuite) and self.suite.data_of == "vision":
            whole = replace(self.suite, count=len(self.suite.all_tasks))
            others = [each for each in whole.tasks if each not in self.tasks]
            images = torch.cat([whole.data(each).train_items[: 8 * count] for each in others])
            chosen: Sequence[Any] = images[_drawn(len(images), count, place)]  # type: ignore[assignment]
            return chosen
        texts = [sentence for text in neutral_texts() for sentence in text.split(". ") if len(sentence) > 20]
        drawn = [texts[index] for index in _drawn(len(texts), count, place)]
        if isinstance(self.suite, LanguageSuite):
            return [Encoded(self.suite.backbone.tokenizer.encode(text).ids, [2]) for text in drawn]
        return drawn

    def store(self, row: Row) -> Store:
        """The store of all experts, calibrated with the row's inputs: every expert, or with ``half`` every other."""
        if not row.count:
            return self.plain
        key = f"{row.count}{sorted(row.words - {'fallback'})}"
        if key not in self._calibrated:
            path = self.work / f"store-{len(self._calibrated)}"
            shutil.copytree(self.plain.path, path)
            store = self._calibrated[key] = Store(path, progress=NoProgress())
            model = self.suite.load(self.suite.base())
            for task in self.tasks[::2] if "half" in row.words else self.tasks:
                started = time.monotonic()
                inputs = Inputs(self.inputs(task, row), row.count, model=model, call=self._forward)
                store.calibrate(task, inputs)
                self.calibrate_seconds[f"{task}@{row.count}"] = time.monotonic() - started
        return self._calibrated[key]

    def _forward(self, model: Any, each: Any) -> Tensor:
        """Run the model on one input; returns the features that a router sees."""
        each = each["text"] if isinstance(each, dict) else each
        if isinstance(each, Encoded):
            hidden: Tensor = model.get_decoder()(torch.tensor([each.prompt + each.answer])).last_hidden_state
            return hidden[:, : len(each.prompt)].mean(1)
        assert isinstance(self.suite, TrainedSuite)
        features: Tensor = self.suite.backbone.features(model, [each] if isinstance(each, str) else each[None])
        return features

    # --- merged ---------------------------------------------------------------------------------------------

    def merged(self, row: Row, work: Path, only: Sequence[str] = ()) -> tuple[Path, float]:
        """Export the merged model of a row to a new directory; returns it and the seconds."""
        target, started = work / f"merged-{time.monotonic_ns()}", time.monotonic()
        model = self.store(row).export(target, **row.selection, only=list(only))
        return model, time.monotonic() - started

    def damage(self, row: Row, measured: Row) -> dict[str, float]:
        """The predicted damage of every expert by a row's readout, on the inputs of another row; on the experts' own
        directions if that has none."""
        store, found = self.store(row), dict[str, list[float]]()
        with store.snapshot() as snapshot, self.store(measured).snapshot() as other:
            known = {entry.name: other.inputs.get(entry.number) for entry in other.manifest.history}
            reading = snapshot.reading(store.engine, Selection(row.selection["readout"]))
            assert isinstance(reading, EntriesReading)
            factor = reading.scale(row.selection["scale"], store.engine)
            for name, matrices in reading.measured(store.engine, lambda span: span):
                moments = {task: reader.moment(name) if reader else None for task, reader in known.items()}
                for span in matrices:
                    merged = RightFactor(factor * span.right_factor(reading.readout.coefficients(span)).double())
                    entries = {
                        number: replace(entry, moment=moments[reading.experts[number].name])
                        for number, entry in span.experts.items()
                    }
                    for number, value in replace(span, experts=entries).damage(merged).items():
                        found.setdefault(reading.experts[number].name, []).append(value)
        return {task: sum(values) / len(values) for task, values in found.items()}

    def bytes_of(self, row: Row) -> dict[str, int]:
        """Bytes of the store, and of the moments in it."""
        sizes = {folder: total_bytes(self.store(row).storage.files(folder)) for folder in ("steps", "inputs")}
        return {"store": sizes["steps"], "moments": sizes["inputs"]}

    # --- routed ---------------------------------------------------------------------------------------------

    def routed(self, row: Row, work: Path) -> dict[str, Any]:
        """Every test input goes to the expert whose inputs look most like it."""
        base, path = self.suite.load(self.suite.base()), work / "router.safetensors"
        with self.store(row).snapshot() as snapshot:
            readers = {entry.name: snapshot.inputs[entry.number] for entry in snapshot.manifest.history}
            known = {name: features for name, reader in readers.items() if (features := reader.features())}
        save_router(path, self.tasks, known)
        names, router, quantiles = read_router(path)
        assert router is not None and quantiles is not None
        places = torch.tensor([self.tasks.index(name) for name in names])

        def route(features: Tensor) -> tuple[Tensor, Tensor]:
            expert, confidence = router.route(features)
            return places[expert], confidence

        least = float(quantiles[round(100 * UNCERTAIN)]) if "fallback" in row.words else 0.0
        tests = {task: self._tests(task) for task in self.tasks}
        chosen = {task: route(self._features(base, tests[task])) for task in self.tasks}
        right = dict.fromkeys(self.tasks, 0)
        models = [self.plain.export(work / f"{row.key}-{task}", readout=f"expert:{task}") for task in self.tasks]
        if least:
            models.append(self.merged(Row(f"regress@{row.count}"), work)[0])
        for number, directory in enumerate(models):
            model = self.suite.load(directory)
            for task, (expert, confidence) in chosen.items():
                sent = torch.where(confidence < least, len(self.tasks), expert)
                right[task] += self._right(model, task, (sent == number).nonzero().flatten().tolist())
        numbered = enumerate(self.tasks)
        return {
            "accuracies": {task: right[task] / len(tests[task]) for task in self.tasks},
            "routed_right": {task: float((chosen[task][0] == place).double().mean()) for place, task in numbered},
            "answered_by_merged": {task: float((chosen[task][1] < least).double().mean()) for task in self.tasks},
        }

    def _tests(self, task: str) -> Sequence[Any]:
        limit = self.suite.test_limit
        if isinstance(self.suite, LanguageSuite):
            return [self.suite.encoded(task, *example) for example in self.suite.data(task)[1][:limit]]
        items: Sequence[Any] = self.suite.data(task).test_items[:limit]
        return items

    def _features(self, base: Any, items: Sequence[Any]) -> Tensor:
        with torch.inference_mode():
            if isinstance(self.suite, TrainedSuite):
                return all_features(self.suite.backbone, base, items)
            return torch.cat([self._forward(base, each) for each in items])

    def _right(self, model: Any, task: str, places: Sequence[int]) -> int:
        """How many of these test inputs of a task a model answers rightly."""
        if not places:
            return 0
        if isinstance(self.suite, LanguageSuite):
            examples = [self._tests(task)[place] for place in places]
            choices = [self.suite.encoded(task, "", choice).answer[0] for choice in self.suite._tasks[task].choices]
            return round(share_right(model, examples, choices) * len(examples))
        assert isinstance(self.suite, TrainedSuite)
        data = self.suite.data(task)
        features = all_features(self.suite.backbone, model, pick(data.test_items, places))
        labels = data.test_labels[torch.tensor(places)]
        return int((self.suite.head(task)(features).argmax(1) == labels).sum())


def _drawn(available: int, count: int, seed: int = SEED) -> list[int]:
    return sorted(random.Random(seed).sample(range(available), min(count, available)))


def measure(subject: Subject, row: Row, work: Path, bwt: bool) -> dict[str, Any]:
    """Everything of one row."""
    suite, tasks = subject.suite, subject.tasks
    if row.key.startswith("routed"):
        started = time.monotonic()
        routed = subject.routed(row, work)
        return {**routed, "seconds": time.monotonic() - started}
    model, seconds = subject.merged(row, work)
    scores = score(suite, model, [*tasks, *suite.beside])
    shutil.rmtree(model)
    found: dict[str, Any] = {
        "accuracies": {task: scores[task] for task in tasks},
        "beside": {name: scores[name] for name in suite.beside},
        "export_seconds": seconds,
        "bytes": subject.bytes_of(row),
        "damage": {
            "by_directions": subject.damage(row, Row("default")),
            "by_inputs": subject.damage(row, Row("regress@64")),
        },
    }
    if bwt:
        lost = []
        for step, task in enumerate(tasks[:-1]):
            model, _ = subject.merged(row, work, tasks[: step + 1])
            lost.append(scores[task] - score(suite, model, [task])[task])
            shutil.rmtree(model)
        found["bwt"] = sum(lost) / len(lost)
    return found


def table(results: Mapping[str, Any]) -> str:
    """The rows as Markdown."""
    lines = []
    for key, row in results["rows"].items():
        found = list(row["accuracies"].values())
        right = row.get("routed_right")
        cells = (
            f"{100 * sum(found) / len(found):.1f}",
            f"{100 * min(found):.1f}",
            f"{100 * row['bwt']:+.1f}" if "bwt" in row else "–",
            f"{100 * sum(right.values()) / len(right):.1f}" if right else "–",
            *(f"{value:.2f}" for value in row.get("beside", {}).values()),
        )
        lines.append((f"`{key}`", *cells))
    experts = list(results["experts"].values())
    lines.append(("experts", f"{100 * sum(experts) / len(experts):.1f}", f"{100 * min(experts):.1f}", "–", "–"))
    headings = ("", "ACC", "worst task", "BWT", "right expert", *results["beside"])
    width = len(headings)
    return "\n".join(markdown_table(headings, [(*line, *[""] * (width - len(line))) for line in lines])) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.inputs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--test-limit", type=int, default=1000)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--bwt", action="store_true", help="also score every row after each expert, on its own task")
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args(arguments)
    suite = import_module(f"benchmarks.suites.{chosen.suite.replace('-', '_')}").SUITE
    suite = suite.limited(chosen.tasks, chosen.test_limit)
    output: Path = chosen.output or Path(f"docs/results/inputs/{chosen.suite}-{chosen.tasks}")
    output.mkdir(parents=True, exist_ok=True)
    path = output / "results.json"
    results: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {"rows": {}}
    results |= {"suite": chosen.suite, "tasks": suite.tasks, "test_limit": chosen.test_limit, "beside": suite.beside}
    results |= {"machine": machine(), "protocol": suite.protocol()}
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        subject = Subject(suite, work)
        results["add_seconds"] = subject.add_seconds
        if "experts" not in results:
            results["experts"] = {task: score(suite, suite.expert(task), [task])[task] for task in suite.tasks}
        for key in chosen.rows.split(","):
            if key not in results["rows"]:
                results["rows"][key] = measure(subject, Row(key), work, chosen.bwt)
                results["calibrate_seconds"] = {**results.get("calibrate_seconds", {}), **subject.calibrate_seconds}
                write_json(path, results)
                write_text(output / "table.md", table(results))
                print(key, results["rows"][key]["accuracies"], flush=True)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
