"""A plain PyTorch loop: the average is that of the recorded weights, and training does not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mergestream import EMA, LAWA, Average, Ledger, MergestreamError
from mergestream.errors import UsageError
from mergestream.methods.base import Method
from mergestream.training import Averaging

STEPS = 12


class Net(nn.Module):
    """Tied weights, batch statistics, a frozen layer, something that is not saved, and a tensor in 16 bits."""

    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.out = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.norm, self.frozen = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.out.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.scratch += 1
        found: Tensor = self.out(self.frozen(self.norm(self.body(self.embed(x)))) * self.gain.float())
        return found


class Training:
    """A model in training; what it was after each step is on record."""

    def __init__(self, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.record: list[dict[str, Tensor]] = []

    def step(self) -> None:
        generator = torch.Generator().manual_seed(len(self.record))
        x = torch.randint(6, (8,), generator=generator)
        nn.functional.cross_entropy(self.model(x), (x + 1) % 6).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.record.append(copy.deepcopy(self.model.state_dict()))


def expected(method: Method, models: list[dict[str, Tensor]], name: str) -> Tensor:
    """In float64, from the definitions."""
    values = [model[name].double() for model in models]
    if isinstance(method, EMA):
        mean = values[0]
        for value in values[1:]:
            mean = method.beta * mean + (1 - method.beta) * value
        return mean
    return torch.stack(values[-method.window :] if isinstance(method, LAWA) else values).mean(0)


@pytest.mark.parametrize("method", [EMA(beta=0.7), LAWA(window=3), Average()], ids=lambda method: method.name)
@pytest.mark.parametrize(("every", "start"), [(1, 0), (3, 0), (2, 5)])
def test_the_average_is_that_of_the_recorded_weights(method: Method, every: int, start: int) -> None:
    training = Training()
    averaging = Averaging(training.model, method, every=every, start=start)
    for _ in range(STEPS):
        training.step()
        averaging.step()
    taken = [model for i, model in enumerate(training.record, 1) if i >= start and i % every == 0]
    assert averaging.updates == len(taken)
    with averaging.swap():
        averaged = copy.deepcopy(training.model.state_dict())
    for name, tensor in averaged.items():
        if "frozen" in name or not tensor.is_floating_point():
            assert torch.equal(tensor, training.record[-1][name])  # as training has left it
        else:
            tolerance = 1e-2 if tensor.dtype == torch.bfloat16 else 1e-6
            assert torch.allclose(tensor.double(), expected(method, taken, name), rtol=tolerance, atol=tolerance), name
    assert averaged["out.weight"].data_ptr() == averaged["embed.weight"].data_ptr()
    assert set(averaging.state_dict()).isdisjoint({"frozen.weight", "scratch", "norm.num_batches_tracked"})


def test_training_goes_on_as_if_nobody_averaged() -> None:
    alone, watched = Training(), Training()
    averaging = Averaging(watched.model, every=2)
    for _ in range(STEPS):
        alone.step()
        watched.step()
        averaging.step()
        with averaging.swap(), torch.no_grad():
            watched.model.eval()(torch.arange(6))
        watched.model.train()
    for one, other in zip(alone.record, watched.record, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_weights_come_back_after_an_exception() -> None:
    training = Training()
    averaging = Averaging(training.model)
    for _ in range(3):
        training.step()
        averaging.step()
    with pytest.raises(KeyboardInterrupt), averaging.swap():
        assert not torch.equal(training.model.get_parameter("body.weight"), training.record[-1]["body.weight"])
        with averaging.swap():  # once more is once
            pass
        training.model.requires_grad_(False)  # as some evaluations do
        with pytest.raises(UsageError, match="holds its average"):
            averaging.update()
        raise KeyboardInterrupt
    assert all(torch.equal(t, training.record[-1][n]) for n, t in training.model.state_dict().items())


def test_a_model_that_has_diverged_is_not_taken_in() -> None:
    training = Training()
    averaging = Averaging(training.model)
    for _ in range(2):
        training.step()
        averaging.step()
    before = averaging.state_dict()
    with torch.no_grad():
        training.model.get_parameter("body.weight")[0, 0] = torch.nan
    with pytest.raises(MergestreamError, match=r"tensor body.weight in memory .*holds NaN or Inf"):
        averaging.step()
    assert averaging.updates == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in averaging.state_dict().items())


def test_before_the_first_update_there_is_nothing_to_swap() -> None:
    training = Training()
    averaging = Averaging(training.model, start=5)
    training.step()
    assert not averaging.step()
    with averaging.swap():
        assert torch.equal(training.model.get_parameter("body.weight"), training.record[-1]["body.weight"])
    with pytest.raises(UsageError, match="nothing has been averaged"):
        averaging.state_dict()


@pytest.mark.parametrize("method", [EMA(beta=0.7), LAWA(window=3), Average()], ids=lambda method: method.name)
@pytest.mark.parametrize("stop", [1, 5])
def test_it_goes_on_from_a_file(method: Method, stop: int, tmp_path: Path) -> None:
    training = Training()
    whole, first = (Averaging(training.model, method, every=2) for _ in range(2))
    second = Averaging(training.model, method, every=2)
    for number in range(1, STEPS + 1):
        training.step()
        whole.step()
        (first if number <= stop else second).step()
        if number == stop:
            first.save(tmp_path / "average.safetensors")
            second.load(tmp_path / "average.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["average.safetensors"]
    assert (second.steps, second.updates) == (whole.steps, whole.updates) == (STEPS, STEPS // 2)
    after = second.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in whole.state_dict().items())


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    training, path = Training(), tmp_path / "average.safetensors"
    averaging = Averaging(training.model)
    training.step()
    averaging.step()
    averaging.save(path)
    with pytest.raises(UsageError, match=r"by .*ema.*, but this one is by .*lawa"):
        Averaging(training.model, LAWA()).load(path)
    with pytest.raises(MergestreamError, match=r"another model: tensor \w+ differs"):
        Averaging(nn.Linear(2, 2)).load(path)
    with pytest.raises(MergestreamError, match="cannot be read"):
        averaging.load(tmp_path / "nothing")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(MergestreamError, match="cannot be read"):
        averaging.load(path)
    with pytest.raises(MergestreamError, match="cannot be written"):
        averaging.save(tmp_path / "nowhere" / "average.safetensors")
    with pytest.raises(UsageError, match="remembers every model"):
        Averaging(training.model, Ledger())
    with pytest.raises(UsageError, match="every=0"):
        Averaging(training.model, every=0)
    with pytest.raises(UsageError, match="nothing to average"):
        Averaging(nn.Linear(2, 2).requires_grad_(False))
    training.model.frozen.requires_grad_(True)
    with pytest.raises(UsageError, match=r"frozen.* is trained now"):
        averaging.update()


def test_whole_models_in_wrappers_are_averaged_and_sharded_ones_refused(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    try:
        training = Training(DistributedDataParallel(nn.Sequential(nn.Embedding(6, 6))))
        averaging = Averaging(training.model, Average())
        for _ in range(3):
            training.step()
            averaging.step()
        wanted = expected(Average(), training.record, "module.0.weight")
        assert torch.allclose(averaging.state_dict()["0.weight"].double(), wanted, atol=1e-6)
        on_cpu = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
        shardings: list[tuple[Callable[..., Any], str]] = [(fully_shard, "FSDP2"), (on_cpu, "FSDP")]
        for shard, who in shardings:
            with pytest.raises(UsageError, match=rf"sharded by {who}.*mergestream merge"):
                Averaging(shard(nn.Sequential(nn.Linear(4, 4))))
    finally:
        distributed.destroy_process_group()
    compiled: Any = torch.compile(nn.Linear(2, 2))
    assert Averaging(compiled).model is compiled._orig_mod
    parameter = nn.Linear(2, 2)
    parameter.weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="DeepSpeed"):
        Averaging(parameter)
