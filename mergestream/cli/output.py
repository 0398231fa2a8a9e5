"""Commands that write models: export and merge."""

from __future__ import annotations

from argparse import Namespace

from mergestream.cli.common import command_line, make_engine, make_method_from, make_progress, open_store


def export(arguments: Namespace) -> int:
    store = open_store(arguments)
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
    from mergestream.one_shot import merge

    merge(
        arguments.base,
        arguments.experts,
        arguments.out,
        make_method_from(arguments),
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
