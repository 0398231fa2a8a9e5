"""MLflow, at its tracking URI."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from mergestream.tracking.step import TrackedStep

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TAG = "mergestream"
_MOST = 500
"""Metrics in a request"""


def send(target: str | None, step: TrackedStep) -> None:
    """``target`` is the experiment. A run that is active is used; else a store has one of its own, found by its tag."""
    import mlflow
    from mlflow.entities import Metric

    client, active = mlflow.MlflowClient(), mlflow.active_run()
    run = active.info.run_id if active else _own_run(client, target or "mergestream", step)
    now = int(time.time() * 1000)
    # Names of experts may be anything, those of metrics may not.
    metrics = [Metric(re.sub(r"[^\w\-. :/]", "_", name), x, now, step.number) for name, x in step.scalars.items()]
    for start in range(0, len(metrics), _MOST):
        client.log_batch(run, metrics[start : start + _MOST])
    client.set_tag(run, f"step.{step.number}", step.expert)
    if not active:
        client.set_terminated(run)


def _own_run(client: MlflowClient, name: str, step: TrackedStep) -> str:
    experiment = client.get_experiment_by_name(name)
    identity = experiment.experiment_id if experiment else client.create_experiment(name)
    found = client.search_runs([identity], f"tags.{_TAG} = '{step.run}'", max_results=1)
    if found:
        return str(found[0].info.run_id)
    run = client.create_run(identity, run_name=step.store, tags={_TAG: step.run})
    for key, value in step.config.items():
        client.log_param(run.info.run_id, key, value)
    return str(run.info.run_id)
