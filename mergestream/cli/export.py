"""The export command."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import OutputOptions, WorkingStoreOptions, argument, at_least, command_line
from mergestream.errors import UsageError

HELP = "write the merged model as a directory that from_pretrained loads"
EXAMPLES = """
mergestream export store merged
mergestream export store merged --dtype bfloat16 --max-shard-size 2GB --overwrite
mergestream export store merged-for-spam --task spam
mergestream export store merged-gently --scale 0.2
mergestream export store merged-adapter --format lora --rank 32
"""


@dataclass(frozen=True)
class Options(WorkingStoreOptions, OutputOptions):
    out: str = argument(metavar="OUT")
    task: str | None = argument("--task", metavar="NAME", help="with the head of this expert")
    format: str = argument(
        "--format", choices=("full", "lora"), default="full", help="a model, or a PEFT adapter (full)"
    )
    rank: int | None = argument("--rank", type=at_least(1), metavar="K", help="the adapter's rank (exact without)")
    scale: str | None = argument(
        "--scale",
        metavar="X",
        help="merged = base + X · direction: adaptive, sqrt, mean or a number (the method's own)",
    )


def run(options: Options) -> int:
    if options.format == "full" and options.rank is not None:
        raise UsageError("--rank is for adapters: add --format lora")
    if options.format == "lora" and options.task is not None:
        raise UsageError("--task is for full models: an adapter has no head of its own")
    store = options.open_store()
    if options.format == "lora":
        energy = store.export_adapter(
            options.out,
            rank=options.rank,
            scale=options.scale,
            dtype=options.dtype,
            overwrite=options.overwrite,
            command=command_line(),
        )
        exact = ", exactly" if energy.lost_share < 1e-12 else f", {energy.lost_share:.3%} of the energy left out"
    else:
        store.export(
            options.out,
            scale=options.scale,
            dtype=options.dtype,
            task=options.task,
            max_shard_size=options.max_shard_size,
            overwrite=options.overwrite,
            command=command_line(),
        )
        exact = ""
    print(f"{options.out}: {store.manifest.step} experts merged by {store.manifest.method}{exact}")
    return 0
