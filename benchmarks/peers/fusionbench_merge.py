"""Run FusionBench's continual merging on checkpoints on disk. Executed by the peers' interpreter.

    .venv-peers/bin/python -m benchmarks.peers.fusionbench_merge opcm --base B --experts E1 E2 --output OUT

The algorithm, the profiler that times its steps and the merge functions are FusionBench's. What is ours is
the pool, which loads each expert when it is asked for (as FusionBench's own pools do, so that twenty experts
need not be in memory at once), and one shim: FusionBench 0.2.33 imports a class that transformers 5 has
folded into CLIPVisionModel; OPCM never uses it, so its name is given back before the import.
OUT gets the merged weights under the base's names. The wall time of every step (without loading) and λ are recorded.
"""

from __future__ import annotations

import argparse
import types
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import CLIPVisionModel
from transformers.models.clip import modeling_clip
from transformers.utils import logging

from benchmarks.stopwatch import work

setattr(modeling_clip, "CLIPVisionTransformer", CLIPVisionModel)  # noqa: B010 (absent, so not an attribute)
logging.set_verbosity_error()

from fusion_bench import BaseModelPool  # noqa: E402
from fusion_bench.method.opcm.opcm import OPCMForCLIP  # noqa: E402
from fusion_bench.method.opcm.task_arithmetic import ContinualTaskArithmeticForCLIP  # noqa: E402
from fusion_bench.method.opcm.ties_merging import ContinualTiesMergingForCLIP  # noqa: E402


class DirectoryPool(BaseModelPool):  # type: ignore[misc]
    """A pool of models in directories, loaded on demand."""

    def load_model(self, name: str, *args: object, **kwargs: object) -> torch.nn.Module:
        return CLIPVisionModel.from_pretrained(self._models[name], dtype=torch.float32)


ALGORITHMS = {
    "opcm": lambda: OPCMForCLIP(alpha=0.5, shuffle_order=False, save_on_every_step=False),
    "task_arithmetic": lambda: ContinualTaskArithmeticForCLIP(
        scaling_factor=0.3, shuffle_order=False, save_on_every_step=False
    ),
    "ties": lambda: ContinualTiesMergingForCLIP(
        scaling_factor=0.3, threshold=20, merge_func="sum", shuffle_order=False, save_on_every_step=False
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=ALGORITHMS)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--experts", type=Path, nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    models = {"_pretrained_": str(arguments.base)}
    models |= {f"expert{i}": str(path) for i, path in enumerate(arguments.experts)}
    algorithm = ALGORITHMS[arguments.method]()
    # The algorithms read the data sets of the task pool, although the evaluation is off.
    algorithm._program = types.SimpleNamespace(taskpool=types.SimpleNamespace(_test_datasets=None))
    with work() as facts:
        merged = algorithm.run(DirectoryPool(models))
        facts["steps"] = algorithm.profiler.recorded_durations["merging model"]
        facts["lambda"] = float(getattr(algorithm, "previous_lambda_t", 1))

    arguments.output.mkdir(parents=True, exist_ok=True)
    weights = {f"vision_model.{n}": t.contiguous() for n, t in merged.state_dict().items()}
    save_file(weights, arguments.output / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
