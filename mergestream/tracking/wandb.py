"""Weights & Biases."""

from __future__ import annotations

from mergestream.tracking.step import TrackedStep


def send(target: str | None, step: TrackedStep) -> None:
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
