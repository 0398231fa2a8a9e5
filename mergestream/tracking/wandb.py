"""Weights & Biases."""

from __future__ import annotations

from mergestream.tracking.step import TrackedStep


def send(target: str | None, step: TrackedStep) -> None:
    """``target`` is the project, or ENTITY/PROJECT. A run that is active is used; else a store has one of its own,
    which goes on with every command and is finished as this process ends."""
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
        run.define_metric("*", step_metric="step")  # its own steps never go back, as ours do after an undo
    run.log({"step": step.number, "expert": step.expert, **step.scalars})
