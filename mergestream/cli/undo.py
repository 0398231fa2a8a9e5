"""The undo command."""

from __future__ import annotations

from argparse import ArgumentParser

from mergestream.cli.options import StoreOptions, add_store

HELP = "go back to before the last expert"
EXAMPLES = "mergestream undo store"

Options = StoreOptions


def add_arguments(parser: ArgumentParser) -> None:
    add_store(parser)


def run(options: Options) -> int:
    store = options.open_store()
    undone = store.undo()
    print(f"{undone.name} taken back; {store.path} is at step {store.manifest.step}")
    return 0
