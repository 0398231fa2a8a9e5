"""A Trainer that trains for real: the average is evaluated and saved, and training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from mergestream import EMA, LAWA, Average, MergestreamWarning
from mergestream.training import AveragingCallback
from tests.workshop import TEXT

STEPS = 8
DATA = [{"input_ids": row, "labels": row} for row in torch.arange(40).repeat(2).view(-1, 5)]


class Recorder(TrainerCallback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append({name: tensor.detach().clone() for name, tensor in model.named_parameters()})


def make_trainer(directory: Path, **options: Any) -> tuple[Trainer, Recorder]:
    torch.manual_seed(0)
    settings: dict[str, Any] = {**TEXT, "num_key_value_heads": 1, "attention_dropout": 0.1}
    model, recorder = LlamaForCausalLM(LlamaConfig(**settings)), Recorder()
    arguments = TrainingArguments(
        str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, **options},
    )
    return Trainer(model, arguments, train_dataset=DATA, eval_dataset=DATA[:4], callbacks=[recorder]), recorder


def model_of(trainer: Trainer) -> LlamaForCausalLM:
    assert isinstance(trainer.model, LlamaForCausalLM)
    return trainer.model


def loss_of(trainer: Trainer, weights: dict[str, Tensor]) -> float:
    """By hand, of a copy of the model."""
    model = LlamaForCausalLM(model_of(trainer).config).eval()
    model.load_state_dict(weights)
    rows = torch.stack([item["input_ids"] for item in DATA[:4]])
    return float(model(input_ids=rows, labels=rows).loss.item())


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_average_is_evaluated_and_saved_and_training_does_not_notice(tmp_path: Path) -> None:
    alone, recorded_alone = make_trainer(tmp_path / "alone")
    alone.train()
    trainer, recorded = make_trainer(tmp_path / "watched")
    trainer.add_callback(AveragingCallback(trainer, Average(), every=2, start=3))
    trainer.train()
    for one, other in zip(recorded_alone.weights, recorded.weights, strict=True):
        assert_same(one, other)
    assert_same(load_file(tmp_path / "alone/checkpoint-8/model.safetensors"), dict(model_of(trainer).state_dict()))

    taken = [recorded.weights[step - 1] for step in (4, 6, 8)]
    mean = {name: torch.stack([weights[name].double() for weights in taken]).mean(0).float() for name in taken[0]}
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "watched/averaged").state_dict()
    assert all(torch.allclose(saved[name], tensor, atol=1e-6) for name, tensor in mean.items())

    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses == pytest.approx([loss_of(trainer, taken[0]), loss_of(trainer, mean)], rel=1e-5)
    assert losses[1] != pytest.approx(loss_of(trainer, taken[-1]), rel=1e-3)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[1], rel=1e-6)  # afterwards, too


@pytest.mark.parametrize("method", [EMA(beta=0.5), LAWA(window=3)], ids=lambda method: method.name)
def test_a_resumed_run_goes_on_with_its_average(method: EMA | LAWA, tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path)
    trainer.add_callback(AveragingCallback(trainer, method))
    trainer.train()
    whole = load_file(tmp_path / "averaged/model.safetensors")
    resumed, recorded = make_trainer(tmp_path)
    callback = AveragingCallback(resumed, method)
    resumed.add_callback(callback)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert len(recorded.weights) == 4
    assert callback.averaging.updates == STEPS
    assert_same(load_file(tmp_path / "averaged/model.safetensors"), whole)


def test_the_weights_come_back_where_an_evaluation_fails(tmp_path: Path) -> None:
    def fails(prediction: Any) -> dict[str, float]:
        assert not torch.equal(model_of(trainer).lm_head.weight, recorded.weights[-1]["lm_head.weight"])
        raise RuntimeError("no metric")

    trainer, recorded = make_trainer(tmp_path)
    trainer.compute_metrics = fails
    trainer.add_callback(AveragingCallback(trainer))
    with pytest.raises(RuntimeError, match="no metric"):
        trainer.train()
    assert_same(dict(model_of(trainer).named_parameters()), recorded.weights[-1])


def test_training_weights_are_evaluated_where_asked_for(tmp_path: Path) -> None:
    trainer, recorded = make_trainer(tmp_path, save_strategy="no")
    trainer.model_init = lambda: LlamaForCausalLM(model_of(trainer).config)  # another model than the callback has seen
    callback = AveragingCallback(trainer, swap=False)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.averaging.model is trainer.model
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss_of(trainer, recorded.weights[-1]), rel=1e-5)


def test_what_could_not_be_averaged_is_told(tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path)
    trainer.train()
    resumed, _ = make_trainer(tmp_path)
    resumed.add_callback(AveragingCallback(resumed, start=100))
    with pytest.warns(MergestreamWarning) as notes:
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    told = [str(note.message) for note in notes if note.category is MergestreamWarning]
    assert "checkpoint-4/averaging.safetensors does not exist: the average starts" in told[0]
    assert told[1] == f"nothing was averaged: training ended at step {STEPS}"
    assert not (tmp_path / "averaged").exists()
