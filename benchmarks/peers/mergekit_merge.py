"""Run mergekit's task arithmetic or TIES through its API. Executed by the peers' interpreter.

    .venv-peers/bin/python -m benchmarks.peers.mergekit_merge ties --base B --experts E1 E2 E3 --output OUT

The configuration is what a YAML file for the `mergekit-yaml` command would hold, and the run is the call that
this command makes; only its imports, several seconds, are kept out of the measured work.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions

from benchmarks.stopwatch import work


def configuration(method: str, base: Path, experts: list[Path], dtype: str) -> MergeConfiguration:
    """Task arithmetic with λ = 0.3; TIES keeping 20 % of each task vector, disjoint mean, λ = 1."""
    parameters = {"task_arithmetic": {"weight": 0.3}, "ties": {"weight": 1.0, "density": 0.2}}[method]
    return MergeConfiguration.model_validate(
        {
            "merge_method": method,
            "base_model": str(base),
            "models": [{"model": str(expert), "parameters": parameters} for expert in experts],
            "dtype": dtype,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=("task_arithmetic", "ties"))
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--experts", type=Path, nargs="+", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--lora-cache", help="where the full models go that experts BASE+ADAPTER are made into")
    arguments = parser.parse_args()
    config = configuration(arguments.method, arguments.base, arguments.experts, arguments.dtype)
    options = MergeOptions(copy_tokenizer=False, quiet=True, lora_merge_cache=arguments.lora_cache)
    with work():
        run_merge(config, str(arguments.output), options=options)


if __name__ == "__main__":
    main()
