"""One stream: add the experts to a store in one order, and score the merged model after each step.

Every finished step leaves a file, and the store stays until the end, so an interrupted run is resumed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mergestream import Engine, Store
from mergestream.digest import combined_digest, tensor_digest
from mergestream.evaluation.cache import cache_directory, key_of, written_whole
from mergestream.evaluation.rows import CONTINUAL_FINE_TUNING, READ_BACK, Row
from mergestream.evaluation.suites.base import Suite
from mergestream.files import write_json, write_text
from mergestream.progress import NoProgress

Entries = Literal["all", "ends", "last"]
"""Entries of the accuracy matrix to score: all; the diagonal and last row, for ACC and BWT; or the last row"""
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".distcp")


@dataclass(frozen=True)
class Stream:
    """A row of the table in one order."""

    row: Row
    order: tuple[str, ...]
    seed: int
    entries: Entries

    @property
    def outcome(self) -> tuple[str, tuple[str, ...], str]:
        """Streams with the same outcome are run once; two seeds may give the same order."""
        return self.row.key, self.order, self.entries

    def key(self, suite: Suite) -> str:
        """Digest of everything that decides the outcome; names the stream's directory."""
        tasks = [(task, suite.expert(task).name, suite.evaluation_key(task)) for task in self.order]
        beside = [suite.evaluation_key(name) for name in suite.beside]
        return key_of(self.row.key, self.entries, suite.base().name, tasks, *beside)

    def wanted(self, step: int) -> list[str]:
        """Return the tasks that are scored after step ``step``, counted from 0."""
        if self.entries == "all" or step == len(self.order) - 1:
            return list(self.order)
        return [self.order[step]] if self.entries == "ends" else []


def model_digest(directory: Path) -> str:
    """Digest of a model's or adapter's tensors, independent of their sharding.

    Other files that hold weights, and the config of an adapter, count by their bytes.
    """
    import torch
    from safetensors import safe_open

    digests: dict[str, str] = {}
    for path in directory.iterdir():
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                digests |= {name: tensor_digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        elif path.suffix in _OTHER_WEIGHTS or path.name == "adapter_config.json":
            content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
            digests[path.name] = tensor_digest(content)
    return combined_digest(digests)


def score(suite: Suite, model: Path, digest: str, task: str) -> float:
    """Return the accuracy of a model on a task; the cache keeps it by the content of both."""
    path = _score_path(suite, digest, task)
    if not path.is_file():
        accuracy = suite.accuracy(model, task)
        with written_whole(path) as draft:  # another stream may score the same model at the same time
            write_json(draft, {"task": task, "accuracy": accuracy})
    known: float = json.loads(path.read_text("utf-8"))["accuracy"]
    return known


def _score_path(suite: Suite, digest: str, task: str) -> Path:
    return cache_directory() / "evaluations" / suite.name / digest / f"{suite.evaluation_key(task)}.json"


def run_stream(
    suite: Suite, stream: Stream, directory: Path, engine: Engine
) -> tuple[tuple[str, tuple[str, ...], str], list[dict[str, Any]]]:
    """Run or resume a stream in ``directory``; returns its outcome key and its steps."""
    finished, work = directory / "stream.json", directory / "work"
    if not finished.is_file():
        work.mkdir(parents=True, exist_ok=True)
        if stream.row.name == CONTINUAL_FINE_TUNING:
            steps = _fine_tune(suite, stream, work)
        else:
            steps = _merge(suite, stream, directory, engine)
        result = {"method": stream.row.key, "order": list(stream.order), "entries": stream.entries, "steps": steps}
        write_json(finished, result)
        shutil.rmtree(work, ignore_errors=True)
    return stream.outcome, json.loads(finished.read_text("utf-8"))["steps"]


def _run_steps(stream: Stream, work: Path, run: Callable[[int, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the record of every step; ``run(step, task)`` makes it unless an earlier run has."""
    steps = []
    for step, task in enumerate(stream.order):
        record = work / f"step-{step:02d}.json"
        if not record.is_file():
            write_json(record, {"task": task, **run(step, task)})
        steps.append(json.loads(record.read_text("utf-8")))
    return steps


def _merge(suite: Suite, stream: Stream, directory: Path, engine: Engine) -> list[dict[str, Any]]:
    from mergestream.report.facts import Facts, finite
    from mergestream.report.render import render_markdown

    method = stream.row.method()
    path = directory / "work" / "store"
    quiet = NoProgress()  # the report has the store's notes; every stream would repeat them
    if (path / "manifest.json").is_file():
        store = Store(path, engine=engine, progress=quiet)
    else:
        shutil.rmtree(path, ignore_errors=True)
        store = Store.create(path, base=suite.base(), method=method, keep=0, engine=engine, progress=quiet)

    def add(step: int, task: str) -> dict[str, Any]:
        started = time.monotonic()
        if len(store.history) == step:
            store.add(suite.expert(task), name=task)
        seconds = time.monotonic() - started
        entry = store.history[step]
        scores, exporting = _score_step(suite, stream, step, store, directory.parent / "known", method.commutative)
        return {
            **_split_scores(suite, scores),
            "norm": entry.norm,
            "kept": entry.kept,
            "lambda": finite(entry.lambda_),
            "distance": entry.distance,
            "state_bytes": sum(file.stat().st_size for file in (path / "steps").rglob("*") if file.is_file()),
            "absorb_seconds": round(seconds, 3),
            "export_seconds": exporting,
        }

    steps = _run_steps(stream, directory / "work", add)
    store.attach_scores(stream.order, [[step["accuracies"].get(task) for task in stream.order] for step in steps])
    if stream.entries == "all":
        write_text(directory / "report.md", render_markdown(Facts.of(store)))
    return steps


def _score_step(
    suite: Suite, stream: Stream, step: int, store: Store, known: Path, commutative: bool
) -> tuple[dict[str, float], float | None]:
    """Score the store's merged model; also return the seconds of an export, if one was needed.

    Models of a commutative method differ between orders only by rounding. One is scored for all of them: ``known``
    has a file with its digest.
    """
    scores: dict[str, float] = {}
    seconds = None
    experts = sorted(suite.expert(task).name for task in stream.order[: step + 1])
    for selection, tasks in _models(suite, stream, step):
        same = known / f"{key_of(stream.row.key, suite.base().name, experts, selection)}.txt"
        digest = same.read_text() if commutative and same.is_file() else ""
        with tempfile.TemporaryDirectory(dir=store.path.parent) as directory:
            model = Path(directory) / "model"
            if not digest or not all(_score_path(suite, digest, task).is_file() for task in tasks):
                started = time.monotonic()
                store.export(model, **selection, pictures=False)
                seconds = round(time.monotonic() - started, 3)
                digest = model_digest(model)
                if commutative:
                    same.parent.mkdir(exist_ok=True)
                    same.write_text(digest)
            scores |= {task: score(suite, model, digest, task) for task in tasks}
    return scores, seconds


def _models(suite: Suite, stream: Stream, step: int) -> list[tuple[dict[str, Any], list[str]]]:
    """List the models to export after a step, as options of `Store.export`, with the tasks to score each on."""
    if stream.row.readout == READ_BACK:  # each expert is scored on its own task
        added = [task for task in stream.wanted(step) if task in stream.order[: step + 1]]
        return [(stream.row.selection(task), [task]) for task in added]
    names = _names_to_score(suite, stream, step)
    return [(stream.row.selection(""), names)] if names else []


def _names_to_score(suite: Suite, stream: Stream, step: int) -> list[str]:
    """Return the wanted tasks; for the last model also the suite's other measures."""
    return [*stream.wanted(step), *(suite.beside if step == len(stream.order) - 1 else ())]


def _split_scores(suite: Suite, scores: dict[str, float]) -> dict[str, dict[str, float]]:
    beside = {name: scores.pop(name) for name in suite.beside if name in scores}
    return {"accuracies": scores, **({"beside": beside} if beside else {})}


def _fine_tune(suite: Suite, stream: Stream, work: Path) -> list[dict[str, Any]]:
    """Continual fine-tuning: train θ^(t−1) on task t; θ^(1) is the first task's expert."""

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
        scores = _score_all(suite, trained, _names_to_score(suite, stream, step))
        shutil.rmtree(work / f"model-{step - 1:02d}", ignore_errors=True)
        return _split_scores(suite, scores)

    return _run_steps(stream, work, train)


def score_beside(suite: Suite) -> dict[str, float]:
    """Return the suite's other measures, of the base."""
    return _score_all(suite, suite.base(), suite.beside)


def score_individual(suite: Suite, task: str) -> tuple[str, float, float]:
    """Return a task, the accuracy of the base and that of the task's expert."""
    base, expert = (_score_all(suite, model, [task])[task] for model in (suite.base(), suite.expert(task)))
    return task, base, expert


def _score_all(suite: Suite, model: Path, names: Sequence[str]) -> dict[str, float]:
    digest = model_digest(model) if names else ""
    return {name: score(suite, model, digest, name) for name in names}
