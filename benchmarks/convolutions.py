"""What a ledger keeps of a UNet's convolutions: a full fine-tune and a LoRA, each read back from its entry.

    python -m benchmarks.convolutions                     about two minutes on one core
    python -m benchmarks.convolutions --steps 50          a quick look

A small UNet of diffusers learns to denoise blobs, and is then tuned to stripes: all of its weights, or a LoRA of rank 4
on its convolutions and attention. Each expert goes into a store alone (the entries of up to eight full fine-tunes are
as long) and comes back by ``expert:NAME``. The rows "r directions" give convolutions β·r directions, as linear weights
have and as versions before 0.3 did; the others give them β·2mn/(m + n).

Prints the relative error of the weights, ‖Δ' − Δ‖/‖Δ‖, for convolutions and linear weights; the error of the output
relative to what the expert changes, ‖f' − f‖/‖f − f⁰‖; and the loss on new stripes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

from mergestream import Ledger, Store
from mergestream.engine import single_threaded
from mergestream.methods.base import Context
from mergestream.progress import NoProgress

diffusers: Any = import_module("diffusers")  # has no types
UNet, DDPMScheduler = diffusers.UNet2DConditionModel, diffusers.DDPMScheduler
SIZE, BATCH, RANK = 16, 16, 4
UNET: dict[str, Any] = {
    "sample_size": SIZE,
    "layers_per_block": 1,
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "in_channels": 3,
    "out_channels": 3,
    "norm_num_groups": 8,
    "attention_head_dim": 8,
    "cross_attention_dim": 32,
}
TARGETS = ["conv1", "conv2", "conv_shortcut", "to_q", "to_k", "to_v", "to_out.0"]
NOISE = DDPMScheduler(num_train_timesteps=100)


def equal_directions(method: Ledger, context: Context) -> float:
    """As many directions of a convolution as of a linear weight: r."""
    return min(context.matrices[1:])


CAPACITIES = {"r directions": equal_directions, "2mn/(m + n)": Ledger.capacity}


def blobs(count: int) -> Tensor:
    """Images of one soft blob each."""
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, SIZE)] * 2, indexing="ij"))
    distance = (grid - (torch.rand(count, 2, 1, 1) - 0.5)).square().sum(1, keepdim=True)
    return (2 * torch.exp(-distance / 0.1) - 1) * (0.5 + 0.5 * torch.rand(count, 3, 1, 1))


def stripes(count: int) -> Tensor:
    """Images of stripes in one direction each."""
    rows, columns = torch.meshgrid(*[torch.arange(SIZE)] * 2, indexing="ij")
    angle, phase = 3.14 * torch.rand(count, 1, 1, 1), 6.28 * torch.rand(count, 1, 1, 1)
    waves = torch.sin(rows * angle.cos() + columns * angle.sin() + phase)
    return waves * (0.5 + 0.5 * torch.rand(count, 3, 1, 1))


def noisy(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy images, their times and their noise."""
    noise, times = torch.randn_like(images), torch.randint(0, 100, (len(images),))
    return NOISE.add_noise(images, noise, times), times, noise


def predict(model: Any, given: Tensor, times: Tensor) -> Tensor:
    """The noise that a model finds, without a text."""
    found: Tensor = model(given, times, torch.ones(len(given), 1, UNET["cross_attention_dim"])).sample
    return found


def train(model: Any, draw: Callable[[int], Tensor], parameters: Iterable[Tensor], steps: int, rate: float) -> None:
    optimiser = torch.optim.AdamW(list(parameters), lr=rate)
    for _ in range(steps):
        given, times, noise = noisy(draw(BATCH))
        loss = (predict(model, given, times) - noise).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@dataclass(frozen=True)
class Models:
    """The directories of the base and the experts, and the experts as full models."""

    base: Path
    experts: dict[str, Path]
    tuned: dict[str, Any]


def make_models(directory: Path, steps: int) -> Models:
    """Train a base, and tune it in full and by a LoRA."""
    torch.manual_seed(0)
    base = UNet(**UNET)
    train(base, blobs, base.parameters(), 2 * steps, 1e-3)
    base.save_pretrained(directory / "base")
    full = UNet.from_pretrained(directory / "base")
    train(full, stripes, full.parameters(), steps, 3e-4)
    full.save_pretrained(directory / "full")
    lora = UNet.from_pretrained(directory / "base")
    lora.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS))
    train(lora, stripes, (p for p in lora.parameters() if p.requires_grad), steps, 3e-3)
    diffusers.StableDiffusionPipeline.save_lora_weights(directory / "lora", get_peft_model_state_dict(lora))
    lora.fuse_lora()
    lora.unload_lora()
    return Models(
        directory / "base",
        {"full fine-tune": directory / "full", f"LoRA of rank {RANK}": directory / "lora"},
        {"full fine-tune": full, f"LoRA of rank {RANK}": lora},
    )


def read_back(base: Path, expert: Path) -> Any:
    """The expert as a store gives it back."""
    with tempfile.TemporaryDirectory() as directory:
        store = Store.create(Path(directory) / "store", base, Ledger(), progress=NoProgress())
        store.add(expert, name="expert")
        again = store.export(Path(directory) / "again", readout="expert:expert")
        return UNet.from_pretrained(again)


def weight_errors(base: Any, tuned: Any, again: Any) -> dict[int, float]:
    """‖Δ' − Δ‖/‖Δ‖ of all convolutions and all linear weights together, by their number of dimensions."""
    sums = {2: [0.0, 0.0], 4: [0.0, 0.0]}
    before, after, found = (dict(model.named_parameters()) for model in (base, tuned, again))
    for name, weight in before.items():
        if weight.ndim in sums:
            sums[weight.ndim][0] += float((found[name] - after[name]).square().sum())
            sums[weight.ndim][1] += float((after[name] - weight).square().sum())
    return {ndim: (lost / whole) ** 0.5 for ndim, (lost, whole) in sums.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="of each tuning; the base gets twice as many")
    steps = parser.parse_args().steps
    print("| expert | kept of convolutions | error of convolutions | of linear weights | of the output | loss |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place, single_threaded():
        with torch.enable_grad():
            models = make_models(Path(place), steps)
        base = UNet.from_pretrained(models.base)
        torch.manual_seed(1)
        given, times, noise = noisy(stripes(256))
        before = predict(base, given, times)
        print(f"| base | | | | 1.000 | {float((before - noise).square().mean()):.4f} |")
        for expert, tuned in models.tuned.items():
            wanted = predict(tuned, given, times)
            print(f"| {expert} | | | | 0.000 | {float((wanted - noise).square().mean()):.4f} |")
            for label, capacity in CAPACITIES.items():
                with patch.object(Ledger, "capacity", capacity):
                    again = read_back(models.base, models.experts[expert])
                found = predict(again, given, times)
                errors = weight_errors(base, tuned, again)
                output = float((found - wanted).norm() / (wanted - before).norm())
                loss = float((found - noise).square().mean())
                print(
                    f"| {expert}, read back | {label} | {errors[4]:.3f} | {errors[2]:.3f} | {output:.3f} | {loss:.4f} |"
                )


if __name__ == "__main__":
    main()
