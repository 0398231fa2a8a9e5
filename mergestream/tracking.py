"""Send the numbers of each step to experiment trackers: one function per tracker."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.digest import json_digest
from mergestream.errors import MergestreamError, UsageError, did_you_mean

if TYPE_CHECKING:
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
        manifest, place = store.manifest, store.storage.address
        number = manifest.names.index(entry.name) + 1
        before = manifest.history[number - 2].mean_norm if number > 1 else 0.0
        found = {name: getattr(entry, name) for name in ("norm", "mean_norm", "kept", "seconds")}
        found |= {"relative_norm": entry.norm / before if before else None, "rank": entry.rank or None}
        if entry.cut:  # in a ledger, the readout decides the scale
            survival, damage = store.survival(), store.damage()
            found |= {f"held/{name}": held for name, held in zip(survival.experts, survival.total, strict=True)}
            found |= {f"damage/{name}": value for name, value in damage.items()}
            found["damage"] = max(damage.values(), default=None)
        else:
            found |= {"distance": entry.distance, "scale": entry.scale}
            found["lambda"] = entry.lambda_ if manifest.method == "opcm" else None
        if entry.evaluation:
            found["score"] = entry.score
            found |= {f"score/{task}": value for task, value in entry.evaluation.get("scores", {}).items()}
        return cls(
            store=Path(place).name,
            run=json_digest([place, manifest.base.digest]),
            config={"method": manifest.method, **manifest.parameters, "base": manifest.base.source},
            number=number,
            expert=entry.name,
            added=entry.added,
            scalars={key: float(value) for key, value in found.items() if value is not None and math.isfinite(value)},
        )


def _send_wandb(target: str, step: TrackedStep) -> None:
    """Log to the active run, or to the run of the store in ``target``, which is PROJECT or ENTITY/PROJECT.

    The run of a store is resumed by every command, and is finished when the process ends."""
    import wandb

    run = wandb.run
    if run is None:
        entity, _, project = target.rpartition("/")
        settings = wandb.Settings(console="off")
        about: dict[str, Any] = {"id": step.run, "name": step.store, "config": step.config}
        run = wandb.init(entity=entity or None, project=project, resume="allow", settings=settings, **about)
        run.define_metric("*", step_metric="step")  # wandb's own steps cannot go back after an undo
    run.log({"step": step.number, "expert": step.expert, **step.scalars})


def _send_mlflow(target: str, step: TrackedStep) -> None:
    """Log to the active run, or to the run of the store in the experiment ``target``, found by its tag."""
    import mlflow

    # MLflow allows fewer characters in the names of metrics than names of experts have.
    metrics = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in step.scalars.items()}
    with nullcontext() if mlflow.active_run() else _mlflow_run(target, step):
        mlflow.log_metrics(metrics, step.number)
        mlflow.set_tag(f"step.{step.number}", step.expert)


def _mlflow_run(name: str, step: TrackedStep) -> Any:
    """The run of a store in an experiment; it ends with the block."""
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(name)
    identity = experiment.experiment_id if experiment else client.create_experiment(name)
    found = client.search_runs([identity], f"tags.mergestream = '{step.run}'", max_results=1)
    if found:
        return mlflow.start_run(found[0].info.run_id)
    run = mlflow.start_run(experiment_id=identity, run_name=step.store, tags={"mergestream": step.run})
    mlflow.log_params(step.config)
    return run


def _send_tensorboard(target: str, step: TrackedStep) -> None:
    """Write to the log directory ``target``."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(target) as writer:
        writer.add_text("expert", step.expert, step.number)
        for name, value in step.scalars.items():
            writer.add_scalar(name, value, step.number)


def _send_jsonl(target: str, step: TrackedStep) -> None:
    """Append a line of JSON to the file ``target``."""
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"store": step.store, "step": step.number, "expert": step.expert, "time": step.added, **step.scalars}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


TRACKERS = {"wandb": _send_wandb, "mlflow": _send_mlflow, "tensorboard": _send_tensorboard, "jsonl": _send_jsonl}
"""All but the last need the library of the same name"""

Tracker = tuple[str, str]
"""The name of a tracker, and the project, experiment, directory or file that it writes to"""


def parse_trackers(given: str | Sequence[str], store: Store) -> list[Tracker]:
    """Read each TRACKER[:TARGET]; refuses a wrong target, or a library that is not installed, before any work."""
    defaults = {"jsonl": f"{store.storage.address}.jsonl", "tensorboard": f"runs/{Path(store.storage.address).name}"}
    found = []
    for text in [given] if isinstance(given, str) else given:
        name, colon, target = text.partition(":")
        if name not in TRACKERS or (colon and not target):
            raise UsageError(
                f"--log {text} is not of the form TRACKER[:TARGET]{did_you_mean(name, TRACKERS)} "
                f"(there are: {', '.join(TRACKERS)})"
            )
        target = target or defaults.get(name, "mergestream")
        if name == "jsonl" and (not target.endswith(".jsonl") or Path(target).is_dir()):
            raise UsageError(f"--log {text}: lines are appended to the file, so it must end in .jsonl")
        if name != "jsonl" and find_spec(name) is None:
            raise MergestreamError(f"--log {name} needs {name}: pip install 'mergestream[{name}]'")
        if name in defaults:
            store.refuse_output(target)
        found.append((name, target))
    return found


def track(trackers: Sequence[Tracker], store: Store, entry: Expert) -> None:
    """Send a finished step to the trackers; any failure becomes a note."""
    step = None
    for name, target in trackers:
        try:
            step = step or TrackedStep.of(store, entry)
            TRACKERS[name](target, step)
        except Exception as error:  # of a server, a network or another library
            reason = " ".join(str(error).split()) or type(error).__name__
            store.progress.note(f"{entry.name} is added, but not logged by {name}: {reason}")
