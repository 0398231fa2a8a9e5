"""TensorBoard: scalars in a log directory."""

from __future__ import annotations

from pathlib import Path

from mergestream.tracking.step import TrackedStep


def send(target: str | None, step: TrackedStep) -> None:
    """Write to the log directory ``target``, by default ``runs/STORE``."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(target or str(Path("runs") / step.store)) as writer:
        writer.add_text("expert", step.expert, step.number)
        for name, value in step.scalars.items():
            writer.add_scalar(name, value, step.number)
