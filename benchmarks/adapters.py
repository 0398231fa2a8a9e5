"""Adapters: cost of the 1st, 10th and 20th on a 7B shape, and accuracy of the merge, compared with PEFT and mergekit.

    python -m benchmarks.adapters            a Llama of 7B, 20 adapters of rank 16: 20 minutes on two quiet cores
    python -m benchmarks.adapters --quick    two of its 32 layers, a smaller layer for the peers
    python -m benchmarks.adapters --growth ledger     only the growth of one store

The base is only a config.json; no weight is read. Writes results.md and results.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks import cases, report
from benchmarks.checkpoints import CACHE, family
from benchmarks.measure import ROOT, Cost, disk_bytes, run
from benchmarks.suite import Target
from mergestream import OPCM, Ledger
from mergestream.algebra.lowrank import LowRank, dense
from mergestream.algebra.projection import project, protected_directions
from mergestream.algebra.svd import thin_svd
from mergestream.checkpoints import open_checkpoint
from mergestream.engine.local import single_threaded
from mergestream.methods.base import Method
from mergestream.store.store import Store

PLACE = CACHE / "adapters"
RANK = 16
HIDDEN, WIDE = 4096, 11008
GIGABYTE = 10**9
METHODS: dict[str, type[Method]] = {"OPCM": OPCM, "ledger": Ledger}


@dataclass(frozen=True)
class Step:
    """Cost of adding one adapter in a separate process, without the imports."""

    number: int
    wall: float
    cpu: float
    anonymous: int
    disk: int
    """Bytes of the store afterwards; shared files count once"""


def modules(layers: int, hidden: int, wide: int) -> dict[str, tuple[int, int]]:
    """All linear weights of a Llama, output × input."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{prefix}.mlp.{part}_proj": (wide, hidden) for part in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj"] = (hidden, wide)
    return shapes


def factors(shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random B (output × rank) and A (rank × input) with a decaying spectrum, as trained adapters have."""
    decay = torch.arange(1, RANK + 1) ** -0.5
    left = torch.randn(shape[0], RANK, generator=generator) * decay * 0.01
    return left, torch.randn(RANK, shape[1], generator=generator)


def make_adapter(directory: Path, shapes: dict[str, tuple[int, int]], seed: int) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module, shape in shapes.items():
        left, right = factors(shape, generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = left.bfloat16()
        tensors[f"base_model.model.{module}.lora_A.weight"] = right.bfloat16()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def growth(method: Method, layers: int, adapters: int) -> list[Step]:
    """Add one adapter after the other to a store whose base is only a config."""
    shutil.rmtree(PLACE, ignore_errors=True)
    base = PLACE / "base"
    base.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "torch_dtype": "bfloat16",
    }
    (base / "config.json").write_text(json.dumps(config))
    store = Store.create(PLACE / "store", base, method)
    steps = []
    for number in range(1, adapters + 1):
        adapter = make_adapter(PLACE / f"adapter-{number:02d}", modules(layers, HIDDEN, WIDE), number)
        cost = run((sys.executable, "-m", "benchmarks.ours", "add", store.path, adapter))
        shutil.rmtree(adapter)
        steps.append(Step(number, cost.work["wall"], cost.work["cpu"], cost.anonymous, disk_bytes(store.path)))
        seconds = f"{steps[-1].wall:.1f} s, CPU {steps[-1].cpu:.1f} s"
        print(f"   {method.name}, adapter {number}: {seconds}", file=sys.stderr, flush=True)
    return steps


def one_layer(size: int, adapters: int) -> dict[str, float]:
    """Time the last of several adapters on one layer, factored and dense, on one thread; also return the error."""
    generator = torch.Generator().manual_seed(0)
    state: Any = None
    exact: Any = None
    factored = 0.0
    for _ in range(adapters):
        left, right = factors((size, size), generator)
        started = time.thread_time()
        delta = LowRank.from_factors(left, right, torch.float32)
        state = delta if state is None else _absorb(state, delta)
        factored = time.thread_time() - started
        wide = LowRank.from_factors(left.double(), right.double(), torch.float64)
        exact = wide if exact is None else _absorb(exact, wide)
    before, last = dense(state), dense(delta)
    started = time.thread_time()
    _absorb(before, last)
    return {"factored": factored, "dense": time.thread_time() - started, "error": _error(state, dense(exact))}


def _absorb(state: Any, delta: Any) -> Any:
    """Run one OPCM step on one weight."""
    svd = thin_svd(state)
    return state + project(delta, svd, protected_directions(svd.s, 0.5), "reference")


def exactness(size: int, adapters: int) -> dict[str, float]:
    """Return the error of the float32 state against the dense float64 formula, with a full SVD at every step."""
    generator = torch.Generator().manual_seed(1)
    state: Any = None
    formula: Any = None
    for _ in range(adapters):
        left, right = factors((size, size), generator)
        delta, plain = LowRank.from_factors(left, right, torch.float32), left.double() @ right.double()
        state = delta if state is None else _absorb(state, delta)
        formula = plain if formula is None else _absorb(formula, plain)
    return {"error": _error(state, formula)}


def beside_peft(size: int, adapters: int) -> dict[str, tuple[float, float]]:
    """Average independent adapters on one layer; returns CPU seconds and the error against the float64 mean."""
    import peft

    generator = torch.Generator().manual_seed(2)
    pairs = [factors((size, size), generator) for _ in range(adapters)]
    zero = torch.zeros(size, size, dtype=torch.float64)
    exact = sum((left.double() @ right.double() for left, right in pairs), zero) / adapters
    found = {}

    def ours() -> Tensor:
        total: Any = LowRank.zeros((size, size), torch.float32)
        for left, right in pairs:
            total = total + LowRank.from_factors(left, right, torch.float32)
        return dense(total / adapters)

    found["mergestream"] = _timed(ours, exact)
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["0"])
    model: Any = peft.get_peft_model(nn.Sequential(nn.Linear(size, size, bias=False)), config, adapter_name="a0")
    for number in range(1, adapters):
        model.add_adapter(f"a{number}", config)
    layer = model.base_model.model[0]
    for number, (left, right) in enumerate(pairs):
        layer.lora_A[f"a{number}"].weight.data = right.clone()
        layer.lora_B[f"a{number}"].weight.data = left.clone()
    names = [f"a{number}" for number in range(adapters)]
    for kind in ("linear", "svd", "cat"):

        def theirs(kind: str = kind) -> Tensor:
            weights = [1 / adapters] * adapters
            options = {"svd_rank": RANK} if kind == "svd" else {}
            model.add_weighted_adapter(names, weights, kind, combination_type=kind, **options)
            delta: Tensor = layer.get_delta_weight(kind)
            return delta

        found[f"PEFT, {kind}"] = _timed(theirs, exact)
    return found


def _timed(work: Callable[[], Tensor], exact: Tensor) -> tuple[float, float]:
    started = time.thread_time()
    with torch.no_grad():
        merged = work()
    return time.thread_time() - started, _error(merged, exact)


def _error(value: Any, exact: Tensor) -> float:
    return float((dense(value).double() - exact).norm() / exact.norm())


def beside_mergekit(adapters: int) -> dict[str, Cost]:
    """Merge adapters by task arithmetic; mergekit first turns each adapter into a full model."""
    base = family("llama-200mb", 0).base
    with open_checkpoint(base) as checkpoint:
        weights = {name: info.shape for name, info in checkpoint.tensors.items() if name.endswith("_proj.weight")}
    shapes = {name.removesuffix(".weight"): (rows, columns) for name, (rows, columns) in weights.items()}
    made = [make_adapter(PLACE / f"small-{n}", shapes, 100 + n) for n in range(adapters)]
    out = PLACE / "merged"
    common: cases.Command = ("--base", base, "--method", "task_arithmetic", "--set", "scale=0.3", out, *made)
    shutil.rmtree(out, ignore_errors=True)
    costs = {"mergestream": run((sys.executable, "-m", "benchmarks.ours", "merge", *common))}
    if cases.have_peers():
        shutil.rmtree(out, ignore_errors=True)
        experts = [f"{base}+{adapter}" for adapter in made]
        command: cases.Command = ("benchmarks.peers.mergekit_merge", "task_arithmetic", "--base", base, "--output", out)
        cache = ("--lora-cache", PLACE / "mergekit-cache")
        costs["mergekit"] = run((cases.PEERS[0], "-m", *command, *cache, "--experts", *experts))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure adapters: ours, PEFT's and mergekit's.")
    parser.add_argument("--quick", action="store_true", help="two layers, and a smaller layer for the peers")
    parser.add_argument("--growth", choices=METHODS, help="only the store of this method; writes METHOD.md and .json")
    parser.add_argument("--output", type=Path, help="directory for results.md and results.json")
    arguments = parser.parse_args()
    quick = arguments.quick
    output = arguments.output or (CACHE / "quick" if quick else ROOT / "docs" / "results" / "adapters")
    about = report.machine()
    layers, count = (2, 10) if quick else (32, 20)

    name = f"Llama of {layers} layers (7B has 32)" if quick else "Llama 7B shape"
    growths = {
        method: growth(METHODS[method](), layers, count)
        for method in ([arguments.growth] if arguments.growth else METHODS)
    }
    targets = [target for method, steps in growths.items() for target in _growth_targets(f"{name}, {method}", steps)]
    if arguments.growth:
        shutil.rmtree(PLACE, ignore_errors=True)
        lines = [*_heading(about, targets), *_growth_table(growths)]
        facts = {"machine": about, "targets": list(map(asdict, targets)), "steps": _as_json(growths)}
        return _write(output, arguments.growth, facts, lines)
    with single_threaded():
        layer = one_layer(2048 if quick else 4096, 20)
        exact = exactness(1024, 20)
        peft = beside_peft(512 if quick else 2048, 8)
    mergekit = beside_mergekit(4)
    shutil.rmtree(PLACE, ignore_errors=True)

    error = max(layer["error"], exact["error"])
    targets += [
        Target(
            f"the 20th adapter on a {2048 if quick else 4096}² layer, our factors against our dense path (CPU)",
            f"{layer['dense'] / layer['factored']:.0f}× faster ({layer['dense']:.2f} s / {layer['factored']:.3f} s)",
            "≥ 50×",
            layer["dense"] >= 50 * layer["factored"],
        ),
        Target("20 adapters merged by OPCM against float64, relative error", f"{error:.1e}", "≤ 1e-05", error <= 1e-5),
    ]
    facts = {
        "machine": about,
        "targets": list(map(asdict, targets)),
        "steps": _as_json(growths),
        "layer": layer,
        "exactness": exact,
        "peft": {who: {"cpu": cpu, "error": wrong} for who, (cpu, wrong) in peft.items()},
        "mergekit": {who: asdict(cost) for who, cost in mergekit.items()},
    }
    lines = _markdown(about, targets, growths, peft, mergekit, 512 if quick else 2048)
    _write(output, "adapters" if quick else "results", facts, lines)


def _write(output: Path, stem: str, facts: dict[str, Any], lines: list[str]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{stem}.json").write_text(json.dumps(facts, indent=1) + "\n")
    (output / f"{stem}.md").write_text("\n".join(lines))
    print("\n".join(lines))


def _as_json(growths: dict[str, list[Step]]) -> dict[str, Any]:
    return {method: list(map(asdict, steps)) for method, steps in growths.items()}


def _growth_targets(work: str, steps: list[Step]) -> list[Target]:
    peak = max(step.anonymous for step in steps)
    seconds = [
        Target(
            f"{work}, rank {RANK}, adapter {step.number}: wall (CPU)",
            f"{step.wall:.1f} s ({step.cpu:.1f} s)",
            "≤ 10 s",
            step.wall <= 10,
        )
        for step in (steps[0], steps[9], *steps[19:])
    ]
    memory = Target(f"{work}: peak anonymous memory", f"{peak / GIGABYTE:.2f} GB", "≤ 1 GB", peak <= GIGABYTE)
    return [*seconds, memory]


def _markdown(
    about: dict[str, Any],
    targets: list[Target],
    growths: dict[str, list[Step]],
    peft: dict[str, tuple[float, float]],
    mergekit: dict[str, Cost],
    size: int,
) -> list[str]:
    table = report.table
    return [
        *_heading(about, targets),
        f"The mean of 8 independent adapters of rank {RANK} on a {size}² layer, one thread:",
        "",
        *table(
            ("who", "CPU (s)", "relative error"),
            [(who, f"{cpu:.3f}", f"{wrong:.1e}") for who, (cpu, wrong) in peft.items()],
        ),
        "",
        "Four adapters and a Llama of 200 MB to a merged model (task arithmetic):",
        "",
        *table(
            ("who", "wall (s)", "CPU (s)", "anonymous (MB)"),
            [
                (who, f"{c.work['wall']:.2f}", f"{c.work['cpu']:.2f}", f"{c.anonymous / 1e6:.0f}")
                for who, c in mergekit.items()
            ],
        ),
        "",
        *_growth_table(growths),
    ]


def _heading(about: dict[str, Any], targets: list[Target]) -> list[str]:
    verdict = {True: "reached", False: "**missed**", None: ""}
    return [
        f"{about['cpu']}, {about['cores']} cores; {about['time']} UTC; load average before the run: "
        f"{about['load_before'][0]}.",
        "",
        *report.table(
            ("work", "measured", "target", ""),
            [(t.work, t.measured, t.target, verdict[t.reached]) for t in targets],
        ),
        "",
    ]


def _growth_table(growths: dict[str, list[Step]]) -> list[str]:
    return [
        "Each adapter of the growing store:",
        "",
        *report.table(
            ("method", "adapter", "wall (s)", "CPU (s)", "anonymous (MB)", "store (MB)"),
            [
                (method, str(s.number), *map("{:.2f}".format, (s.wall, s.cpu)), *map(_megabytes, (s.anonymous, s.disk)))
                for method, steps in growths.items()
                for s in steps
            ],
        ),
        "",
    ]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f}"


if __name__ == "__main__":
    main()
