"""The verify command."""

from __future__ import annotations

from argparse import ArgumentParser

from mergestream.cli.options import WorkingStoreOptions, add_moved_base, add_running_options, add_store

HELP = "recompute every digest of a store and its base"
EXAMPLES = "mergestream verify store"

Options = WorkingStoreOptions


def add_arguments(parser: ArgumentParser) -> None:
    add_store(parser)
    add_moved_base(parser)
    add_running_options(parser)


def run(options: Options) -> int:
    store = options.open_store()
    store.verify()
    print(f"{store.path}: all digests match")
    return 0
