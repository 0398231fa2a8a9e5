"""Cost of the latency of object storage in a merge, with a slow server on this machine.

    python -m benchmarks.remote                       20 ms before every answer, 2 to 16 workers
    python -m benchmarks.remote --latency 0.1 --workers 4

`download` is the bare transfer: all bytes of base and experts, in ranges of 4 MiB, eight at a time. `near` is the merge
of the same models on the disk, one worker a core. The server takes its share of the same cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import save_file

import mergestream
from benchmarks.report import machine
from mergestream.checkpoints.location import locate

SHAPES = {"small": (48, 64), "large": (2, 1024)}
"""Number of layers, and their width"""
NAMES = ("base", "expert-1", "expert-2", "expert-3")
COLUMNS = ("model", "workers", "download, s", "near, s", "merge, s", "merge / download")


def make(place: Path, layers: int, width: int) -> None:
    """Save the models in directories."""
    shapes = {"up.weight": (4 * width, width), "down.weight": (width, 4 * width), "norm.weight": (width,)}
    base: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(NAMES):
        own = torch.Generator().manual_seed(seed)
        drawn = {
            f"layers.{layer}.{part}": torch.randn(shape, generator=own)
            for layer in range(layers)
            for part, shape in shapes.items()
        }
        base = base or drawn
        tensors = {key: base[key] + 0.01 * tensor for key, tensor in drawn.items()}
        (place / name).mkdir(parents=True)
        save_file(tensors, place / name / "model.safetensors")


def serve(place: Path, latency: float, parent: Connection) -> None:
    server = import_module("tests.cloud.server")  # the module has no types
    with (
        server.serve() as endpoint,
        server.disturbed(endpoint, server.Trouble(seconds=latency)) as slow,
    ):
        for directory in place.iterdir():
            server.upload(server.opened(endpoint), directory, directory.name)
        parent.send({**server.CREDENTIALS, "AWS_ENDPOINT_URL": slow})
        parent.recv()


@contextmanager
def in_a_bucket(place: Path, latency: float) -> Iterator[None]:
    """What is in the place is in ``s3://models`` too, as the environment of this process says."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(place, latency, there))
    process.start()
    try:
        os.environ.update(here.recv())
        yield
    finally:
        here.send("enough")
        process.join()


def download(urls: Sequence[str]) -> None:
    for url in urls:
        for found in locate(url).objects.values():
            found.read_into(memoryview(bytearray(found.size)), 0)


def merge(sources: Sequence[str], out: Path, workers: int) -> None:
    engine = mergestream.LocalEngine(workers)
    mergestream.merge(sources[0], sources[1:], out, "average", overwrite=True, engine=engine)


def seconds(work: Callable[..., None], *arguments: object) -> float:
    start = time.monotonic()
    work(*arguments)
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before every answer (0.02)")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16])
    options = parser.parse_args()
    print(machine())
    print(" | ".join(COLUMNS))
    with tempfile.TemporaryDirectory() as directory:
        place, out = Path(directory) / "models", Path(directory) / "out"
        for shape, (layers, width) in SHAPES.items():
            make(place / shape, layers, width)
        with in_a_bucket(place, options.latency):
            for shape in SHAPES:
                files = [str(place / shape / name) for name in NAMES]
                urls = [f"s3://models/{shape}/{name}" for name in NAMES]
                merge(files, out, 2)  # the first run imports and compiles
                near = seconds(merge, files, out, os.cpu_count() or 1)
                for workers in options.workers:
                    bare, merged = seconds(download, urls), seconds(merge, urls, out, workers)
                    cells = (shape, str(workers), *(f"{value:.1f}" for value in (bare, near, merged, merged / bare)))
                    print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
