"""One store in one order: add the experts, and score the models that are read out of it after each step."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mergestream import LocalEngine, Store
from mergestream.digest import combined_digest, tensor_digest
from mergestream.evaluation.rows import READ_BACK, Row
from mergestream.evaluation.suites import Suite, cache_directory
from mergestream.progress import NoProgress

Entries = Literal["all", "ends", "last"]
"""Entries of the accuracy matrix to score: all; the diagonal and last row, for ACC and BWT; or the last row"""
Outcome = tuple[str, tuple[str, ...]]
"""A row and an order, which decide all accuracies"""
Steps = list[dict[str, Any]]
"""For every step: accuracies, and what the store recorded"""
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".distcp")


@dataclass(frozen=True)
class Stream:
    """A row of the table in one order."""

    row: Row
    order: tuple[str, ...]
    seed: int
    entries: Entries

    @property
    def outcome(self) -> Outcome:
        """Streams with the same outcome are run once; two seeds may give the same order."""
        return self.row.key, self.order

    def names_to_score(self, suite: Suite, step: int) -> list[str]:
        """Return the tasks that are scored after a step, counted from 0; for the last also the other measures."""
        last = step == len(self.order) - 1
        names = list(self.order) if last or self.entries == "all" else []
        if self.entries == "ends" and not last:
            names = [self.order[step]]
        if self.row.readout == READ_BACK:  # each expert is scored on its own task
            return [task for task in names if task in self.order[: step + 1]]
        return [*names, *(suite.beside if last else ())]

    def is_measured(self, suite: Suite, steps: Steps) -> bool:
        """Whether recorded steps have everything that is asked for."""
        known = [{**step["accuracies"], **step.get("beside", {})} for step in steps]
        return len(known) == len(self.order) and all(
            known[step].keys() >= set(self.names_to_score(suite, step)) for step in range(len(known))
        )


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


def score(suite: Suite, model: Path, names: Sequence[str], digest: str = "") -> dict[str, float]:
    """Return the accuracy of a model on each task; the cache keeps it by the content of both."""
    if not names:
        return {}
    directory = cache_directory() / "evaluations" / suite.name / (digest or model_digest(model))
    scores = {}
    for name in names:
        path = directory / f"{suite.evaluation_key(name)}.json"
        if not path.is_file():
            text = json.dumps({"task": name, "accuracy": suite.accuracy(model, name)})
            draft = path.with_suffix(f".{os.getpid()}")  # another stream may score the same model at the same time
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text, "utf-8")
            draft.replace(path)
        scores[name] = float(json.loads(path.read_text("utf-8"))["accuracy"])
    return scores


def run_streams(suite: Suite, streams: Sequence[Stream], work: Path) -> dict[Outcome, Steps]:
    """Run streams that differ in the readout alone: add the experts to one store, and score the models of all streams.

    ``work`` is a directory for the store and the models.
    """
    shutil.rmtree(work, ignore_errors=True)  # an earlier run was interrupted
    work.mkdir(parents=True)
    method = streams[0].row.method()
    store = Store.create(work / "store", suite.base(), method, keep=0, engine=LocalEngine(1), progress=NoProgress())
    steps: dict[Outcome, Steps] = {stream.outcome: [] for stream in streams}
    for step, task in enumerate(streams[0].order):
        started = time.monotonic()
        store.add(suite.expert(task), name=task)
        seconds = time.monotonic() - started
        entry = store.history[-1]
        recorded = {
            "norm": entry.norm,
            "kept": entry.kept,
            "lambda": entry.lambda_ if math.isfinite(entry.lambda_) else None,
            "distance": entry.distance,
            "state_bytes": sum(file.stat().st_size for file in (store.path / "steps").rglob("*") if file.is_file()),
            "absorb_seconds": round(seconds, 3),
        }
        for stream in streams:
            scores, exporting = _score_models(suite, stream, step, store)
            found = {"task": task, **split_scores(suite, scores), **recorded, "export_seconds": exporting}
            steps[stream.outcome].append(found)
    shutil.rmtree(work, ignore_errors=True)
    return steps


def _score_models(suite: Suite, stream: Stream, step: int, store: Store) -> tuple[dict[str, float], float | None]:
    """Export and score what a stream needs after a step; also return the seconds of the last export, if any."""
    names = stream.names_to_score(suite, step)
    models = [[name] for name in names] if stream.row.readout == READ_BACK else [names] if names else []
    scores: dict[str, float] = {}
    seconds = None
    model = store.path.with_name("model")
    for scored in models:
        started = time.monotonic()
        store.export(model, readout=stream.row.readout_for(scored[0]))
        seconds = round(time.monotonic() - started, 3)
        scores |= score(suite, model, scored)
        shutil.rmtree(model)
    return scores, seconds


def split_scores(suite: Suite, scores: dict[str, float]) -> dict[str, dict[str, float]]:
    """Separate accuracies from the suite's other measures."""
    beside = {name: scores[name] for name in suite.beside if name in scores}
    accuracies = {name: value for name, value in scores.items() if name not in beside}
    return {"accuracies": accuracies, **({"beside": beside} if beside else {})}
