"""The bench command."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

HELP = "merge a suite's experts in shuffled orders with several methods, and score every task after each step"
EXAMPLES = """
mergestream bench vision --tasks 8 --orders 10 -o results
mergestream bench text --methods opcm --orders 3 --sweep alpha=0.1:1.0:0.1 -o results
mergestream bench clip --model vit-b-32 --tasks 8 --orders 10 -o results
mergestream bench my-suite.yaml --methods opcm,average --evaluate 'python score.py {model} {task}' -o results
"""


@dataclass(frozen=True)
class Options:
    suite: str
    output: str
    methods: str
    orders: int
    seed: int
    tasks: int | None
    sweep: str | None
    full_orders: int
    finetune_orders: int
    last_only: bool
    test_limit: int | None
    model: str
    evaluate: str | None
    workers: int | None


def add_arguments(parser: ArgumentParser) -> None:
    from mergestream.evaluation.command import add_arguments

    add_arguments(parser)


def run(options: Options) -> int:
    from mergestream.evaluation.command import run

    return run(Namespace(**vars(options)))
