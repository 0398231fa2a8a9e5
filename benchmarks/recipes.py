"""Compare ``from-mergekit`` with mergekit on the same recipes (run `make peers` first).

    python -m benchmarks.recipes

Three experts of a tiny Llama, in float32. Every recipe is run by mergekit and by ``from-mergekit``. Prints
‖ours − theirs‖ / ‖theirs − base‖. DARE drops entries at random, so its recipes keep all of them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import PEERS, have_peers
from mergestream.checkpoints import open_checkpoint
from mergestream.cli import main as mergestream

WEIGHTS = [{"weight": 0.5}, {"weight": 0.3}, {"weight": 0.9}]
DENSITIES = [{"weight": 0.5, "density": 0.3}, {"weight": 0.3, "density": 1.0}, {"weight": -0.4, "density": 0.6}]
NONE: list[dict[str, float]] = [{}, {}, {}]
RECIPES: dict[str, tuple[str, list[dict[str, float]], dict[str, Any]]] = {
    "linear, from the first model": ("linear", WEIGHTS, {}),
    "task_arithmetic": ("task_arithmetic", WEIGHTS, {}),
    "task_arithmetic, normalized": ("task_arithmetic", WEIGHTS, {"normalize": True, "lambda": 0.7}),
    "ties": ("ties", DENSITIES, {"int8_mask": True}),
    "ties, not normalized": ("ties", DENSITIES, {"normalize": False, "lambda": 0.7}),
    "ties, one weight and density for all": ("ties", NONE, {"weight": 0.4, "density": 0.2}),
    "dare_linear, all entries": ("dare_linear", WEIGHTS, {"lambda": 0.5}),
    "dare_ties, all entries": ("dare_ties", WEIGHTS, {"normalize": True}),
    "model_stock": ("model_stock", NONE, {}),
    "model_stock, adapters": ("model_stock", NONE, {}),
}


def make_models(directory: Path, count: int = 3) -> tuple[Path, list[Path], list[Path]]:
    """Make a base, experts that share a part and differ in norm, and LoRA adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, utils

    logging: Any = utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    base.save_pretrained(directory / "base")
    common = {name: 0.001 * torch.randn_like(x) for name, x in base.named_parameters()}
    experts, adapters = [], []
    for number in range(1, count + 1):
        expert = LlamaForCausalLM(config)
        moved = {name: x + common[name] + 0.001 * number * torch.randn_like(x) for name, x in base.state_dict().items()}
        expert.load_state_dict(moved)
        expert.save_pretrained(directory / f"expert{number}")
        experts.append(directory / f"expert{number}")
        adapter = get_peft_model(
            LlamaForCausalLM.from_pretrained(directory / "base"),
            LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
        )
        adapter.save_pretrained(str(directory / f"adapter{number}"))
        adapters.append(directory / f"adapter{number}")
    return directory / "base", experts, adapters


def relative_difference(ours: Path, theirs: Path, base: Path) -> float:
    difference, norm = 0.0, 0.0
    with open_checkpoint(ours) as a, open_checkpoint(theirs) as b, open_checkpoint(base) as zero:
        for name in zero.tensors:
            reference = b.read(name).double()
            difference += float((a.read(name).double() - reference).square().sum())
            norm += float((reference - zero.read(name).double()).square().sum())
    return math.sqrt(difference / norm)


def compare(directory: Path, title: str, base: Path, models: Sequence[str]) -> float:
    method, own, shared = RECIPES[title]
    recipe = {
        "merge_method": method,
        "models": [{"model": model, "parameters": given} for model, given in zip(models, own, strict=True)],
        "parameters": shared,
        "dtype": "float32",
        **({"base_model": str(base)} if method != "linear" else {}),
    }
    path, theirs, ours = (directory / f"{title}{suffix}" for suffix in (".yaml", "-theirs", "-ours"))
    path.write_text(json.dumps(recipe))  # JSON is YAML
    cache = directory / "loras"
    command = [*PEERS, "mergekit.scripts.run_yaml", path, theirs, "--quiet", "--lora-merge-cache", cache]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    assert mergestream(["from-mergekit", str(path), "-o", str(ours), "--quiet", "--overwrite"]) == 0
    return relative_difference(ours, theirs, base)


def main() -> None:
    if not have_peers():
        sys.exit("mergekit is not installed: make peers")
    with tempfile.TemporaryDirectory() as place:
        base, experts, adapters = make_models(Path(place))
        for title in RECIPES:
            models = [f"{base}+{path}" for path in adapters] if "adapters" in title else list(map(str, experts))
            print(f"{title}: {compare(Path(place), title, base, models):.1e}", flush=True)


if __name__ == "__main__":
    main()
