"""The init command."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import MethodOptions, RunningOptions, argument, at_least, repeated, switch
from mergestream.cli.printing import answer, say
from mergestream.cli.status import roles_text, status_json

HELP = "make an empty store for a base model"
EXAMPLES = """
mergestream init store --base path/to/base
mergestream init store --base org/model@main --method ties --set density=0.1 --set mode=streaming
mergestream init store --base bert --heads 'classifier.*' --not-linear '*.pooler.*'
mergestream init s3://bucket/store --base s3://models/llama
mergestream init store --base org/model --config-only --max-rank 64    # adapters only
"""


@dataclass(frozen=True)
class Options(MethodOptions, RunningOptions):
    store: str = argument(metavar="STORE", help="the directory to be, or s3://BUCKET/PATH")
    heads: list[str] = repeated("--heads", "GLOB", "tensors kept per expert, not merged")
    keep: int = argument("--keep", type=int, default=1, metavar="N", help="earlier steps kept for undo (1)")
    config_only: bool = switch("--config-only", "fetch and read the base's weights only when they are needed")
    max_rank: int | None = argument(
        "--max-rank", type=at_least(1), metavar="K", help="bound the rank of what adapters add up to (exact without)"
    )


def run(options: Options) -> int:
    from mergestream.api import Store

    store = Store.create(
        options.store,
        base=options.base,
        method=options.make_method(),
        linear=options.linear,
        not_linear=options.not_linear,
        heads=options.heads,
        keep=options.keep,
        max_rank=options.max_rank,
        config_only=options.config_only,
        engine=options.make_engine(),
        progress=options.make_progress(),
    )
    answer(status_json(store))
    say(f"{store.place}: {store.manifest.method_text} on {store.manifest.base.source}")
    say(roles_text(store))
    return 0
