"""Send the numbers of each step to experiment trackers: one function per tracker."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.digest import json_digest
from mergestream.errors import MergestreamError, UsageError, did_you_mean

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from mergestream import Expert, Store


@dataclass(frozen=True)
class TrackedStep:
    """One absorbed expert, and its store."""

    store: str
    run: str
    """The same for all steps of a store"""
    config: dict[str, Any]
    number: int
    expert: str
    added: str
    scalars: dict[str, float]
    """Numbers by flat names; the name of an expert or a task comes last"""

    @classmethod
    def of(cls, store: Store, entry: Expert) -> TrackedStep:
        """Collect the numbers of a step; in a ledger, damage takes a pass over the linear weights of all experts."""
        manifest = store.manifest
        place = store.storage.address
        return cls(
            store=Path(place).name,
            run=json_digest([place, manifest.base.digest]),
            config={"method": manifest.method, **manifest.parameters, "base": manifest.base.source},
            number=manifest.names.index(entry.name) + 1,
            expert=entry.name,
            added=entry.added,
            scalars=_scalars(store, entry),
        )


def _scalars(store: Store, entry: Expert) -> dict[str, float]:
    names = store.manifest.names
    position = names.index(entry.name)
    before = store.manifest.history[position - 1].mean_norm if position else 0.0
    found: dict[str, float | None] = {
        "norm": entry.norm,
        "mean_norm": entry.mean_norm,
        "relative_norm": entry.norm / before if before else None,
        "kept": entry.kept,
        "seconds": entry.seconds,
        "rank": entry.rank or None,
    }
    if entry.cut:  # in a ledger, the readout decides the scale
        survival, damage = store.survival(), store.damage()
        found |= _by_name("held", dict(zip(survival.experts, survival.total, strict=True)))
        found |= {"damage": _largest(damage), **_by_name("damage", damage)}
    else:
        is_opcm = store.manifest.method == "opcm"
        found |= {"distance": entry.distance, "scale": entry.scale, "lambda": entry.lambda_ if is_opcm else None}
    if entry.evaluation:
        found |= {"score": entry.score, **_by_name("score", entry.evaluation.get("scores", {}))}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _by_name(quantity: str, values: Mapping[str, float | None]) -> dict[str, float | None]:
    """``damage/NAME`` for each name."""
    return {f"{quantity}/{name}": value for name, value in values.items()}


def _largest(values: Mapping[str, float | None]) -> float | None:
    return max((value for value in values.values() if value is not None), default=None)


def _send_wandb(target: str | None, step: TrackedStep) -> None:
    """Log to the active run, or to the run of the store in ``target``, which is PROJECT or ENTITY/PROJECT.

    The run of a store is resumed by every command, and is finished when the process ends."""
    import wandb

    run = wandb.run
    if run is None:
        entity, _, project = (target or "mergestream").rpartition("/")
        run = wandb.init(
            entity=entity or None,
            project=project,
            id=step.run,
            name=step.store,
            resume="allow",
            config=step.config,
            settings=wandb.Settings(console="off"),
        )
        run.define_metric("*", step_metric="step")  # wandb's own steps cannot go back after an undo
    run.log({"step": step.number, "expert": step.expert, **step.scalars})


def _send_mlflow(target: str | None, step: TrackedStep) -> None:
    """Log to the active run, or to the run of the store in the experiment ``target``, found by its tag."""
    import mlflow

    client, active = mlflow.MlflowClient(), mlflow.active_run()
    run = active.info.run_id if active else _find_mlflow_run(client, target or "mergestream", step)
    # MLflow allows fewer characters in the names of metrics than names of experts have.
    metrics = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in step.scalars.items()}
    mlflow.log_metrics(metrics, step.number, run_id=run)
    client.set_tag(run, f"step.{step.number}", step.expert)
    if not active:
        client.set_terminated(run)


def _find_mlflow_run(client: MlflowClient, name: str, step: TrackedStep) -> str:
    """The run of a store; created at the first step."""
    experiment = client.get_experiment_by_name(name)
    identity = experiment.experiment_id if experiment else client.create_experiment(name)
    found = client.search_runs([identity], f"tags.mergestream = '{step.run}'", max_results=1)
    if found:
        return str(found[0].info.run_id)
    run = client.create_run(identity, run_name=step.store, tags={"mergestream": step.run})
    for key, value in step.config.items():
        client.log_param(run.info.run_id, key, value)
    return str(run.info.run_id)


def _send_tensorboard(target: str | None, step: TrackedStep) -> None:
    """Write to the log directory ``target``, by default ``runs/STORE``."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(target or str(Path("runs") / step.store)) as writer:
        writer.add_text("expert", step.expert, step.number)
        for name, value in step.scalars.items():
            writer.add_scalar(name, value, step.number)


def _send_jsonl(target: str | None, step: TrackedStep) -> None:
    """Append a line of JSON to the file ``target``."""
    assert target is not None
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"store": step.store, "step": step.number, "expert": step.expert, "time": step.added, **step.scalars}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


TRACKERS = {"wandb": _send_wandb, "mlflow": _send_mlflow, "tensorboard": _send_tensorboard, "jsonl": _send_jsonl}
"""All but the last need the library of the same name"""


@dataclass(frozen=True)
class Tracker:
    """A tracker, and the project, experiment, directory or file that it writes to."""

    name: str
    target: str | None

    @classmethod
    def parse(cls, text: str, store: Store) -> Tracker:
        """Read TRACKER[:TARGET]; refuses a wrong target, or a library that is not installed, before any work."""
        name, colon, target = text.partition(":")
        if name not in TRACKERS or (colon and not target):
            raise UsageError(
                f"--log {text} is not of the form TRACKER[:TARGET]{did_you_mean(name, TRACKERS)} "
                f"(there are: {', '.join(TRACKERS)})"
            )
        if name == "jsonl":
            target = target or f"{store.storage.address}.jsonl"
            if not target.endswith(".jsonl") or Path(target).is_dir():
                raise UsageError(f"--log {text}: lines are appended to the file, so it must end in .jsonl")
        elif find_spec(name) is None:
            raise MergestreamError(f"--log {name} needs {name}: pip install 'mergestream[{name}]'")
        if target and name in ("jsonl", "tensorboard"):
            store.refuse_output(target)
        return cls(name, target or None)

    def __str__(self) -> str:
        return f"{self.name}:{self.target}" if self.target else self.name


def parse_trackers(given: str | Sequence[str], store: Store) -> list[Tracker]:
    """All trackers that a user has named."""
    return [Tracker.parse(text, store) for text in ([given] if isinstance(given, str) else given)]


def track(trackers: Sequence[Tracker], store: Store, entry: Expert) -> None:
    """Send a finished step to the trackers; any failure becomes a note."""
    step = None
    for tracker in trackers:
        try:
            step = step or TrackedStep.of(store, entry)
            TRACKERS[tracker.name](tracker.target, step)
        except Exception as error:  # of a server, a network or another library
            reason = " ".join(str(error).split()) or type(error).__name__
            store.progress.note(f"{entry.name} is added, but not logged by {tracker}: {reason}")
