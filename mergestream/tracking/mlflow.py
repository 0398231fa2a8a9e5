"""MLflow, at its own tracking URI."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from mergestream.tracking.step import TrackedStep

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TAG = "mergestream"
_MAX_METRICS = 500
"""Metrics per request"""


def send(target: str | None, step: TrackedStep) -> None:
    """Log to the active run, or to the run of the store in the experiment ``target``, found by its tag."""
    import mlflow
    from mlflow.entities import Metric

    client, active = mlflow.MlflowClient(), mlflow.active_run()
    run = active.info.run_id if active else _find_or_create_run(client, target or "mergestream", step)
    now = int(time.time() * 1000)
    # MLflow allows fewer characters in the names of metrics than names of experts have.
    metrics = [Metric(re.sub(r"[^\w\-. :/]", "_", name), x, now, step.number) for name, x in step.scalars.items()]
    for start in range(0, len(metrics), _MAX_METRICS):
        client.log_batch(run, metrics[start : start + _MAX_METRICS])
    client.set_tag(run, f"step.{step.number}", step.expert)
    if not active:
        client.set_terminated(run)


def _find_or_create_run(client: MlflowClient, name: str, step: TrackedStep) -> str:
    experiment = client.get_experiment_by_name(name)
    identity = experiment.experiment_id if experiment else client.create_experiment(name)
    found = client.search_runs([identity], f"tags.{_TAG} = '{step.run}'", max_results=1)
    if found:
        return str(found[0].info.run_id)
    run = client.create_run(identity, run_name=step.store, tags={_TAG: step.run})
    for key, value in step.config.items():
        client.log_param(run.info.run_id, key, value)
    return str(run.info.run_id)
