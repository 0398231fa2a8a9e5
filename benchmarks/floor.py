"""The lower bound of a merge: read every input and write the output with safetensors alone.

    python -m benchmarks.floor --read B E1 E2 E3 --copy B --output OUT

No merge that uses these inputs can cost less. A tensor counts as read when its bytes are in the process's
memory. Safetensors maps files lazily, so each tensor is copied. The output has the bytes of `--copy`, one file
at a time: the same size, dtypes and shards as that input.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.stopwatch import work


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


def floor(read: list[Path], copy: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for directory in read:
        for path in files(directory):
            written = {}
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    tensor = file.get_tensor(name).clone()
                    if directory == copy:
                        written[name] = tensor
            if written:
                save_file(written, output / path.name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--read", type=Path, nargs="+", required=True, help="inputs, all read in full")
    parser.add_argument("--copy", type=Path, required=True, help="the input whose bytes are the output")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.copy not in arguments.read:
        parser.error(f"--copy {arguments.copy} is not one of the inputs")
    torch.set_num_threads(1)
    with work():
        floor(arguments.read, arguments.copy, arguments.output)


if __name__ == "__main__":
    main()
