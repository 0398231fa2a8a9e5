"""Commands on a store: init, add, inspect, status, log, verify, undo."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mergestream.api import Store
from mergestream.cli.common import (
    make_engine,
    make_method_from,
    make_progress,
    open_store,
    print_json,
    print_table,
)
from mergestream.errors import UsageError
from mergestream.sizes import format_size
from mergestream.store import Expert

if TYPE_CHECKING:
    from mergestream.store.inspection import Inspection


def init(arguments: Namespace) -> int:
    store = Store.create(
        arguments.store,
        base=arguments.base,
        method=make_method_from(arguments),
        linear=arguments.linear,
        not_linear=arguments.not_linear,
        heads=arguments.heads,
        keep=arguments.keep,
        max_rank=arguments.max_rank,
        config_only=arguments.config_only,
        engine=make_engine(arguments),
        progress=make_progress(arguments),
    )
    roles = Counter(tensor.role for tensor in store.manifest.base.tensors.values())
    print(f"{store.path}: {_method(store)} on {store.manifest.base.source}")
    print(_counts(roles))
    return 0


def add(arguments: Namespace) -> int:
    if arguments.name and len(arguments.experts) > 1:
        raise UsageError("--name is for one expert, and several were given")
    store = open_store(arguments)
    if arguments.dry_run:
        told = [store.inspect(e, partial=arguments.partial, ignore=arguments.ignore) for e in arguments.experts]
        if arguments.json:
            print_json([inspection.to_json() for inspection in told])
        else:
            for inspection in told:
                _show(inspection, as_json=False)
        return 0
    absorbed = []
    try:
        for expert in arguments.experts:
            entry = store.add(
                expert,
                arguments.name,
                partial=arguments.partial,
                ignore=arguments.ignore,
                allow_duplicate=arguments.allow_duplicate,
                gates=arguments.gate,
                evaluate=arguments.evaluate,
            )
            absorbed.append(entry)
            if not arguments.json:
                print_step(store, entry)
    finally:  # those before a failing one are committed
        if arguments.json:
            print_json([_entry(entry) for entry in absorbed])
    return 0


def print_step(store: Store, entry: Expert) -> None:
    print(
        f"step {store.manifest.step}: {entry.name}  ‖Δ‖ {entry.norm:.4g}  kept {entry.kept:.1%}  "
        f"λ {entry.lambda_:.4g}  {entry.seconds:.1f} s",
        flush=True,
    )


def inspect(arguments: Namespace) -> int:
    inspection = open_store(arguments).inspect(arguments.expert, partial=arguments.partial, ignore=arguments.ignore)
    _show(inspection, arguments.json)
    return 0


def status(arguments: Namespace) -> int:
    store = open_store(arguments)
    base, last = store.manifest.base, store.history[-1] if store.history else None
    roles = Counter(tensor.role for tensor in base.tensors.values())
    if arguments.json:
        print_json(status_of(store))
        return 0
    print(f"{store.path}: {store.manifest.step} experts merged by {_method(store)}")
    print(f"base: {base.source}")
    print(f"tensors: {_counts(roles)}")
    if last:
        print(f"λ {last.lambda_:.6g}   n {last.mean_norm:.6g}   distance to the base {last.distance:.6g}")
        print(f"last: {last.name} ({last.added})")
        if last.rank or last.lost:
            print(_ranks(store))
    if arguments.tensors:
        print()
        print_table(
            ("tensor", "role", "rule", "dtype", "shape"),
            (
                (name, tensor.role, tensor.rule, tensor.dtype, "×".join(map(str, tensor.shape)) or "scalar")
                for name, tensor in base.tensors.items()
            ),
            left=4,
        )
    return 0


def status_of(store: Store) -> dict[str, Any]:
    """The store as one object, nothing in it volatile."""
    manifest = store.manifest
    last = manifest.history[-1] if manifest.history else None
    tensors = manifest.base.tensors
    return {
        "step": manifest.step,
        "method": manifest.method,
        "parameters": dict(manifest.parameters),
        "base": {"source": manifest.base.source, "digest": manifest.base.digest},
        "lambda": last.lambda_ if last else None,
        "n": last.mean_norm if last else None,
        "distance": last.distance if last else 0.0,
        "experts": [entry.name for entry in manifest.history],
        "keep": manifest.keep,
        "max_rank": manifest.max_rank,
        "rank": last.rank if last else 0,
        "lost": [entry.lost for entry in manifest.history],
        "heads": list(manifest.base.heads),
        "counts": dict(sorted(Counter(tensor.role for tensor in tensors.values()).items())),
        "tensors": [
            {
                "name": name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "role": tensor.role,
                "rule": tensor.rule,
                "tied_to": tensor.tied_to,
            }
            for name, tensor in tensors.items()
        ],
    }


def log(arguments: Namespace) -> int:
    store = open_store(arguments)
    if arguments.json:
        print_json([_entry(entry) for entry in store.history])
        return 0
    if not store.history:
        print(f"{store.path} has absorbed nothing yet")
        return 0
    print_table(
        ("expert", "added", "digest", "step", "‖Δ‖", "kept", "λ", "rank", "dropped"),
        (
            (
                *(e.name, e.added, e.digest[:12], number, f"{e.norm:.4g}", f"{e.kept:.1%}", f"{e.lambda_:.4g}"),
                *(e.rank or "-", f"{e.lost:.2%}" if e.lost else "-"),
            )
            for number, e in enumerate(store.history, 1)
        ),
        left=3,
    )
    return 0


def verify(arguments: Namespace) -> int:
    store = open_store(arguments)
    store.verify()
    print(f"{store.path}: all digests match")
    return 0


def undo(arguments: Namespace) -> int:
    store = open_store(arguments)
    undone = store.undo()
    print(f"{undone.name} taken back; {store.path} is at step {store.manifest.step}")
    return 0


def _ranks(store: Store) -> str:
    """How large the factors are, and what bounding them has cost so far."""
    bound = f", bounded by {store.manifest.max_rank}" if store.manifest.max_rank else ""
    lost = [entry for entry in store.history if entry.lost]
    cost = f"; {len(lost)} steps dropped up to {max(e.lost for e in lost):.2%} of the energy" if lost else ""
    return f"in factors of rank {store.history[-1].rank} at most{bound}{cost}"


def _method(store: Store) -> str:
    parameters = ", ".join(f"{key}={value}" for key, value in store.manifest.parameters.items())
    return f"{store.manifest.method}({parameters})"


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1]))


def _entry(entry: Expert) -> dict[str, Any]:
    return {
        "name": entry.name,
        "source": entry.source,
        "digest": entry.digest,
        "norm": entry.norm,
        "lambda": entry.lambda_,
        "kept": entry.kept,
        "time": entry.added,
        "seconds": entry.seconds,
        "mean_norm": entry.mean_norm,
        "distance": entry.distance,
        "rank": entry.rank,
        "lost": entry.lost,
        "tensors": dict(entry.fates),
        "options": dict(entry.options),
        "gates": [dict(gate) for gate in entry.gates],
        "evaluation": entry.evaluation,
    }


def _show(inspection: Inspection, as_json: bool) -> None:
    if as_json:
        print_json(inspection.to_json())
        return
    print(f"{inspection.source} would be step {inspection.step}")
    if inspection.duplicate_of:
        print(f"it has been absorbed already, as {inspection.duplicate_of}")
    print(f"tensors: {_counts(inspection.fates)}")
    print(f"‖Δ‖ {inspection.norm:.4g}, {inspection.relative_norm:.2f} × the mean of the experts so far")
    if inspection.large:
        print("warning: it is so much larger than they are that it would outweigh them")
    print(f"kept {inspection.kept:.1%}   λ {inspection.lambda_:.4g}   distance to the base {inspection.distance:.4g}")
    print(
        f"time about {inspection.seconds:.1f} s   RAM for tensors {format_size(inspection.memory)}   "
        f"disk {format_size(inspection.disk)}"
    )
    if inspection.cosines:
        print("\ncosine to each expert, largest first:")
        known = {name: value for name, value in inspection.cosines.items() if value is not None}
        print_table(
            ("expert", "cosine"),
            ((name, f"{known[name]:.3f}") for name in sorted(known, key=lambda name: -known[name])),
        )
    if inspection.kept < 1:
        print("\nlayers with the most interference:")
        print_table(
            ("layer", "kept"),
            ((layer, f"{share:.1%}") for layer, share in list(inspection.layers.items())[:5]),
        )
    linear = {name: tensor for name, tensor in inspection.tensors.items() if tensor.role == "linear"}
    if linear:
        print("\nlinear weights by what survives, least first:")
        least = sorted(linear.items(), key=lambda item: (item[1].kept, item[0]))
        print_table(
            ("tensor", "kept", "‖Δ‖", "‖Δ‖/‖θ⁰‖", "protected"),
            (
                (
                    name,
                    f"{t.kept:.1%}",
                    f"{t.norm:.4g}",
                    f"{t.relative_norm:.2%}",
                    "-" if t.protected is None else t.protected,
                )
                for name, t in least[:20]
            ),
        )
        if len(least) > 20:
            print(f"… and {len(least) - 20} more (--json lists all)")
