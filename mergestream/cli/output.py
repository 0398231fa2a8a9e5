"""Commands that write models: export and merge."""

from __future__ import annotations

from argparse import Namespace

from mergestream.cli.common import command_line, make_engine, make_method_from, make_progress, open_store
from mergestream.errors import UsageError


def export(arguments: Namespace) -> int:
    if arguments.format == "full" and arguments.rank is not None:
        raise UsageError("--rank is for adapters: add --format lora")
    if arguments.format == "lora" and arguments.task is not None:
        raise UsageError("--task is for full models: an adapter has no head of its own")
    store = open_store(arguments)
    if arguments.format == "lora":
        energy = store.export_adapter(
            arguments.out,
            rank=arguments.rank,
            dtype=arguments.dtype,
            overwrite=arguments.overwrite,
            command=command_line(),
        )
        exact = "exactly" if energy.lost_share < 1e-12 else f"{energy.lost_share:.3%} of the energy left out"
        print(f"{arguments.out}: {store.manifest.step} experts merged by {store.manifest.method}, {exact}")
        return 0
    out = store.export(
        arguments.out,
        dtype=arguments.dtype,
        task=arguments.task,
        max_shard_size=arguments.max_shard_size,
        overwrite=arguments.overwrite,
        command=command_line(),
    )
    print(f"{out}: {store.manifest.step} experts merged by {store.manifest.method}")
    return 0


def merge(arguments: Namespace) -> int:
    from mergestream.export.one_shot import merge, usual_workers

    method = make_method_from(arguments)
    arguments.workers = arguments.workers or usual_workers(method, len(arguments.experts))
    merge(
        arguments.base,
        arguments.experts,
        arguments.out,
        method,
        linear=arguments.linear,
        not_linear=arguments.not_linear,
        partial=arguments.partial,
        ignore=arguments.ignore,
        allow_duplicate=arguments.allow_duplicate,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        overwrite=arguments.overwrite,
        engine=make_engine(arguments),
        progress=make_progress(arguments),
        command=command_line(),
    )
    print(f"{arguments.out}: {len(arguments.experts)} experts merged by {arguments.method}")
    return 0
