"""Run mergestream through its Python API, as `benchmarks.stopwatch` work (the imports are not measured).

python -m benchmarks.ours add STORE EXPERT [--max-memory 2GB]
python -m benchmarks.ours export STORE OUT [--max-memory 2GB]
python -m benchmarks.ours merge --base B --method ties --set mode=streaming [--workers N] [--max-memory 2GB] OUT E1 E2
python -m benchmarks.ours merger --base B E1 E2                the second model into an in-memory `Merger`
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import Tensor

from benchmarks.stopwatch import work
from mergestream import OPCM
from mergestream.base.architecture import load_architecture
from mergestream.checkpoints import open_checkpoint
from mergestream.cli.options import make_engine
from mergestream.engine import LocalEngine
from mergestream.export.one_shot import merge
from mergestream.merging.merger import Merger
from mergestream.methods import make_method
from mergestream.sizes import parse_size
from mergestream.store.store import Store


def state_dict(path: Path) -> dict[str, Tensor]:
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name).clone() for name in checkpoint.tensors}


def store(path: Path, max_memory: int | None) -> Store:
    return Store(path, engine=LocalEngine(max_memory=max_memory))


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("add", "export"):
        command = commands.add_parser(name)
        command.add_argument("--max-memory", type=parse_size)
        command.add_argument("store", type=Path)
        command.add_argument("path", type=Path)
    command = commands.add_parser("merge")
    command.add_argument("--max-memory", type=parse_size)
    command.add_argument("--base", type=Path, required=True)
    command.add_argument("--method", required=True)
    command.add_argument("--set", action="append", default=[], dest="parameters")
    command.add_argument("--workers", type=int)
    command.add_argument("path", type=Path)
    command.add_argument("experts", type=Path, nargs="+")
    command = commands.add_parser("merger")
    command.add_argument("--base", type=Path, required=True)
    command.add_argument("--projection", default="reference")
    command.add_argument("experts", type=Path, nargs=2)
    arguments = parser.parse_args()

    if arguments.command == "merger":
        merger = Merger(state_dict(arguments.base), OPCM(projection=arguments.projection))
        first, second = map(state_dict, arguments.experts)
        merger.add(first)
        with work():
            merger.add(second)
    elif arguments.command == "merge":
        method = make_method(arguments.method, dict(item.split("=") for item in arguments.parameters))
        engine = make_engine("local", workers=arguments.workers, max_memory=arguments.max_memory)
        load_architecture(arguments.base)  # imports transformers, as the peers' runners do before their work
        with work():
            merge(arguments.base, arguments.experts, arguments.path, method, engine=engine)
    elif arguments.command == "add":
        with work() as facts:
            facts["lambda"] = 1 / store(arguments.store, arguments.max_memory).add(arguments.path).scale
    else:
        with work():
            store(arguments.store, arguments.max_memory).export(arguments.path)


if __name__ == "__main__":
    main()
