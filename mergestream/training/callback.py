"""A callback that averages the weights while a transformers Trainer trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from mergestream import Method
from mergestream.errors import MergestreamError
from mergestream.progress import Progress
from mergestream.training.averaging import Averaging

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MergestreamError("AveragingCallback needs transformers: pip install 'mergestream[transformers]'") from error

STATE = "averaging.safetensors"
"""File of the average in every checkpoint"""


class AveragingCallback(TrainerCallback):
    """Averages while a Trainer trains, evaluates the average, and saves it at the end.

        trainer.add_callback(AveragingCallback(trainer, EMA(beta=0.99), every=10))

    ``trainer.evaluate`` and ``trainer.predict`` use the averaged weights; training and checkpoints do not.
    At the end the averaged model is in ``averaged`` in the output directory.
    """

    def __init__(
        self,
        trainer: Trainer,
        method: Method | None = None,
        *,
        every: int = 1,
        start: int = 0,
        swap: bool = True,
        workers: int | None = None,
    ) -> None:
        """Take the arguments of `Averaging`; without ``swap`` the trained weights are evaluated."""
        assert trainer.model is not None
        self.averaging = Averaging(trainer.model, method, every=every, start=start, workers=workers)
        self._trainer = trainer
        for name in ("evaluate", "predict") if swap else ():
            setattr(trainer, name, self._averaged(getattr(trainer, name)))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Resume the average if training resumes from a checkpoint."""
        assert self._trainer.model is not None
        self.averaging.model = self._trainer.model  # model_init may have made a new one
        kept = _checkpoint(args, state) / STATE
        if state.global_step and kept.is_file():
            self.averaging.load(kept)
        elif state.global_step and not self.averaging.updates:
            Progress().note(f"{kept} does not exist: the average starts at step {state.global_step}")
        self.averaging.steps = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.averaging.step()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.should_save and not args.save_only_model:
            self.averaging.save(_checkpoint(args, state) / STATE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.averaging.updates:
            Progress().note(f"nothing was averaged: training ended at step {state.global_step}")
            return
        with self.averaging.swap():
            self._trainer.save_model(str(_output(args) / "averaged"), _internal_call=True)

    def _averaged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def with_average(*args: Any, **kwargs: Any) -> Any:
            with self.averaging.swap():
                return function(*args, **kwargs)

        return with_average


def _output(args: TrainingArguments) -> Path:
    assert args.output_dir is not None
    return Path(args.output_dir)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return _output(args) / f"checkpoint-{state.global_step}"
