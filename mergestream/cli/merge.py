"""``mergestream merge``: merge experts in one go, without a store."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.cli.options import (
    MODEL,
    AddingOptions,
    MethodOptions,
    OutputOptions,
    RunningOptions,
    argument,
    arguments_of,
    command_line,
)
from mergestream.cli.printing import answer, say
from mergestream.sizes import counted


@dataclass(frozen=True)
class Merge(MethodOptions, AddingOptions, OutputOptions, RunningOptions):
    EXAMPLES = """
        mergestream merge --base base experts/* -o merged
        mergestream merge --base base --method average expert-1 expert-2 expert-3 -o merged
        mergestream merge --base base --method opcm --alpha 0.4 experts/* -o merged
        """
    experts: list[str] = argument("EXPERT", MODEL, nargs="+")
    out: str = argument("-o --out OUT", "the output directory, or s3://BUCKET/PATH", required=True)

    def run(self) -> None:
        from mergestream.export.one_shot import merge

        method = self.make_method()
        merge(**arguments_of(merge, self, method=method, command=command_line(), **self.running))
        answer({"out": self.out, "method": method.name, "parameters": method.parameters, "experts": self.experts})
        say(f"{self.out}: {counted(len(self.experts), 'expert')} merged by {method.name}")
