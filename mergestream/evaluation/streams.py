"""One stream: the experts arrive in one order, a store absorbs them, and each merged model is scored.

A stream leaves a file for every step that was scored and the store itself, so a killed run goes on where it was.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mergestream.digest import combined_digest, tensor_digest
from mergestream.evaluation.cache import cache_directory, key_of, written_whole
from mergestream.evaluation.rows import CONTINUAL_FINE_TUNING, READ_BACK, Row
from mergestream.evaluation.workers import report
from mergestream.files import write_json, write_text
from mergestream.progress import NoProgress

if TYPE_CHECKING:
    from mergestream.engine import Engine
    from mergestream.evaluation.suites.base import Suite
    from mergestream.ledger.selection import Selection
    from mergestream.store.store import Store

Entries = Literal["all", "ends", "last"]


@dataclass(frozen=True)
class Stream:
    """A row of the table in one order. ``entries`` of the accuracy matrix: all of it; the diagonal and the last
    row, which is all that ACC and BWT need; or the last row."""

    row: Row
    order: tuple[str, ...]
    seed: int
    entries: Entries

    def key(self, suite: Suite) -> str:
        """Of all that decides the outcome: a directory of that name holds no other stream."""
        tasks = [(task, suite.expert(task).name, suite.evaluation_key(task)) for task in self.order]
        beside = [suite.evaluation_key(name) for name in suite.beside]
        return key_of(self.row.key, self.entries, suite.base().name, tasks, *beside)

    def wanted(self, step: int) -> range:
        """Which tasks, by order of arrival, are scored after step ``step`` (counted from 0)."""
        count = len(self.order)
        if self.entries == "all" or step == count - 1:
            return range(count)
        return range(step, step + 1) if self.entries == "ends" else range(0)

    def wanted_tasks(self, step: int) -> list[str]:
        return [self.order[index] for index in self.wanted(step)]

    @property
    def measurements(self) -> int:
        return sum(len(self.wanted(step)) for step in range(len(self.order)))


def model_digest(directory: Path) -> str:
    """The digest of a model's tensors, however they are sharded, or of an adapter's."""
    from mergestream.experts import open_expert
    from mergestream.experts.adapters import Adapter

    with closing(open_expert(directory)) as model:
        weights = model.weights if isinstance(model, Adapter) else model
        digests = {name: tensor_digest(weights.read(name)) for name in weights.tensors}
        if isinstance(model, Adapter):  # the same factors make another model where they are scaled otherwise
            digests |= {module: str(model.config.scaling(module)) for module in model.factors}
        return combined_digest(digests)


def score(suite: Suite, model: Path, digest: str, task: str) -> float:
    """Accuracy of a model on a task, measured once for every content of both."""
    path = _score_path(suite, digest, task)
    if not path.is_file():
        accuracy = suite.accuracy(model, task)
        with written_whole(path) as draft:  # another stream may come to the same model, and score it at the same time
            write_json(draft, {"task": task, "accuracy": accuracy})
    known: float = json.loads(path.read_text("utf-8"))["accuracy"]
    return known


def _score_path(suite: Suite, digest: str, task: str) -> Path:
    return cache_directory() / "evaluations" / suite.name / digest / f"{suite.evaluation_key(task)}.json"


def run_stream(suite: Suite, stream: Stream, directory: Path, engine: Engine) -> dict[str, Any]:
    """Run (or go on with) a stream in ``directory``; returns its steps. The ``engine`` merges."""
    finished, work = directory / "stream.json", directory / "work"
    if finished.is_file():
        report("done", stream.measurements)
        kept: dict[str, Any] = json.loads(finished.read_text("utf-8"))
        return kept
    work.mkdir(parents=True, exist_ok=True)
    if stream.row.name == CONTINUAL_FINE_TUNING:
        steps = _fine_tuned(suite, stream, directory)
    else:
        steps = _merged(suite, stream, directory, engine)
    result = {"method": stream.row.key, "order": list(stream.order), "entries": stream.entries, "steps": steps}
    write_json(finished, result)
    shutil.rmtree(work, ignore_errors=True)
    return result


def _steps(stream: Stream, work: Path, make: Callable[[int, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """What is recorded of every step; ``make`` gives it, by number and task, where no earlier run has."""
    steps = []
    for step, task in enumerate(stream.order):
        record = work / f"step-{step:02d}.json"
        if record.is_file():
            report("done", len(stream.wanted(step)))
        else:
            write_json(record, {"task": task, **make(step, task)})
        steps.append(json.loads(record.read_text("utf-8")))
    return steps


def _merged(suite: Suite, stream: Stream, directory: Path, engine: Engine) -> list[dict[str, Any]]:
    from mergestream.report.facts import Facts, finite
    from mergestream.report.render import render_markdown
    from mergestream.store.store import Store

    method = stream.row.method()
    path = directory / "work" / "store"
    quiet = NoProgress()  # what a store notes of an expert it would note in every stream; its report has it
    if (path / "manifest.json").is_file():
        store = Store(path, engine=engine, progress=quiet)
    else:
        shutil.rmtree(path, ignore_errors=True)
        store = Store.create(path, base=suite.base(), method=method, keep=0, engine=engine, progress=quiet)

    def absorb(step: int, task: str) -> dict[str, Any]:
        started = time.monotonic()
        if len(store.history) == step:
            store.add(suite.expert(task), name=task)
        seconds = time.monotonic() - started
        entry = store.history[step]
        identity = _identity(suite, stream, step) if method.commutative else None
        scores, exporting = _score_step(suite, stream, step, store, directory.parent / "known", identity)
        return {
            **_recorded(suite, scores),
            "norm": entry.norm,
            "kept": entry.kept,
            "lambda": finite(entry.lambda_),
            "distance": entry.distance,
            "state_bytes": sum(file.stat().st_size for file in (path / "steps").rglob("*") if file.is_file()),
            "absorb_seconds": round(seconds, 3),
            "export_seconds": exporting,
        }

    steps = _steps(stream, directory / "work", absorb)
    store.attach_scores(stream.order, [[step["accuracies"].get(task) for task in stream.order] for step in steps])
    if stream.entries == "all":
        write_text(directory / "report.md", render_markdown(Facts.of(store)))
    return steps


def _identity(suite: Suite, stream: Stream, step: int) -> str:
    """Of a model that does not depend on the order in which its experts came."""
    return key_of(
        stream.row.key, suite.base().name, sorted(suite.expert(task).name for task in stream.order[: step + 1])
    )


def _score_step(
    suite: Suite, stream: Stream, step: int, store: Store, known: Path, identity: str | None
) -> tuple[dict[str, float], float | None]:
    """Scores of the store's merged model, and the seconds that one took to export, where one had to be.

    ``known`` remembers, for methods whose result does not depend on the order and so has an ``identity``, the model
    that stands for all orders: they differ in rounding only, and one is enough to score.
    """
    scores: dict[str, float] = {}
    seconds = None
    for selection, tasks in _models(suite, stream, step):
        remembered = known / f"{key_of(identity, selection.readout, selection.balance)}.txt" if identity else None
        with tempfile.TemporaryDirectory(dir=store.path.parent) as directory:
            model = Path(directory) / "model"
            digest = remembered.read_text() if remembered and remembered.is_file() else ""
            if not digest or not all(_score_path(suite, digest, task).is_file() for task in tasks):
                started = time.monotonic()
                store.export(model, readout=selection.readout, balance=selection.balance, pictures=False)
                seconds = round(time.monotonic() - started, 3)
                digest = model_digest(model)
                if remembered:
                    remembered.parent.mkdir(exist_ok=True)
                    remembered.write_text(digest)
            scores |= _scores(suite, tasks, model, digest)
    return scores, seconds


def _models(suite: Suite, stream: Stream, step: int) -> list[tuple[Selection, list[str]]]:
    """What is read out after a step, each with the tasks that it is scored on: one model for all tasks, but for experts
    that are read back."""
    if stream.row.readout == READ_BACK:
        wanted = stream.wanted_tasks(step)
        return [(stream.row.selection(task), [task]) for task in wanted if task in stream.order[: step + 1]]
    names = _scored(suite, stream, step)
    return [(stream.row.selection(""), names)] if names else []


def _scored(suite: Suite, stream: Stream, step: int) -> list[str]:
    """The tasks wanted, and with the last model what is measured beside them."""
    beside = suite.beside if step == len(stream.order) - 1 else ()
    return [*stream.wanted_tasks(step), *beside]


def _recorded(suite: Suite, scores: dict[str, float]) -> dict[str, dict[str, float]]:
    beside = {name: scores.pop(name) for name in suite.beside if name in scores}
    return {"accuracies": scores, **({"beside": beside} if beside else {})}


def _scores(suite: Suite, tasks: Sequence[str], model: Path, digest: str) -> dict[str, float]:
    scores = {}
    for task in tasks:
        scores[task] = score(suite, model, digest, task)
        report("done", 1)
    return scores


def _fine_tuned(suite: Suite, stream: Stream, directory: Path) -> list[dict[str, Any]]:
    """Continual fine-tuning: θ^(t) is θ^(t−1) fine-tuned on task t with the experts' recipe.

    θ^(1) is the first task's expert, which is there already.
    """
    work = directory / "work"

    def model(step: int) -> Path:
        return work / f"model-{step:02d}" if step else suite.expert(stream.order[0])

    def train(step: int, task: str) -> dict[str, Any]:
        trained = model(step)
        if not trained.is_dir():
            draft = work / "draft"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            suite.fine_tune(model(step - 1), task, draft)
            draft.replace(trained)
        scores = _scores(suite, _scored(suite, stream, step), trained, model_digest(trained))
        shutil.rmtree(work / f"model-{step - 1:02d}", ignore_errors=True)
        return _recorded(suite, scores)

    return _steps(stream, work, train)


def score_beside(suite: Suite) -> dict[str, float]:
    """What is measured beside the tasks, of the base."""
    base = suite.base()
    return {name: score(suite, base, model_digest(base), name) for name in suite.beside}


def score_individual(suite: Suite, task: str) -> tuple[str, float, float]:
    """Accuracy of the base and of the task's own expert."""
    base, expert = suite.base(), suite.expert(task)
    pretrained = score(suite, base, model_digest(base), task)
    fine_tuned = score(suite, expert, model_digest(expert), task)
    report("done", 2)
    return task, pretrained, fine_tuned
