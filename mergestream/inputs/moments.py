"""The second moments of what linear layers get as input, summed by hooks while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mergestream.errors import MergestreamError
from mergestream.ledger.moment import Moment
from mergestream.sizes import format_size

if TYPE_CHECKING:
    from mergestream.inputs.reading import Sample

Run = Callable[["Sample"], None]


@dataclass(frozen=True)
class LayerMoments:
    """The moment of every layer input; layers that get the same input share one."""

    shared: Mapping[str, str]
    """For each weight, the name under which its moment is in ``moments``"""
    moments: Mapping[str, Moment]


def find_layers(model: nn.Module, names: Iterable[str]) -> dict[str, list[nn.Module]]:
    """The linear layers (`torch.nn.Linear`, transformers' ``Conv1D``) with weights of these names; several share one
    that is tied."""
    linear = [
        (f"{path}.weight", module)
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    wanted = set(names)
    owners = {id(module.weight): name for name, module in linear if name in wanted}
    found: dict[str, list[nn.Module]] = {}
    for module in dict.fromkeys(module for _, module in linear):
        if name := owners.get(id(module.weight)):
            found.setdefault(name, []).append(module)
    return found


def measure_moments(
    model: nn.Module,
    directions: Mapping[str, int],
    samples: Sequence[Sample],
    run: Run,
    *,
    memory: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> LayerMoments:
    """G = mean over tokens of x xᵀ (float64), cut to the given number of ``directions``, for each of these weights.

    Only as many matrices as fit into the ``memory`` are summed at a time, and the samples are run again for the next.
    """
    layers = find_layers(model, directions)
    groups = _group_by_input(layers, lambda: run(samples[0]))
    # Conv1D stores its weight as input × output, and has no in_features.
    widths = {k: getattr(one, "in_features", 0) or len(one.get_parameter("weight")) for k, (one, *_) in layers.items()}
    shared: dict[str, str] = {}
    moments: dict[str, Moment] = {}
    while groups:
        part = _first_part(groups, widths, memory)
        groups = groups[len(part) :]
        squares = {group[0]: (widths[group[0]],) * 2 for group in part}
        sums = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in squares.items()}
        counts = _add_up({name: layers[name] for group in part for name in group}, sums, samples, run)
        for group in part:
            if len({counts[name] for name in group}) > 1:  # the first sample does not show how they differ
                groups += [[name] for name in group]
            elif count := counts[group[0]]:
                kept = max(directions[name] for name in group)
                moments[group[0]] = Moment.of((sums.pop(group[0]) / count).cpu(), kept, dtype)
                shared |= dict.fromkeys(group, group[0])
    return LayerMoments(shared, moments)


def _add_up(
    layers: Mapping[str, Sequence[nn.Module]], sums: Mapping[str, Tensor], samples: Sequence[Sample], run: Run
) -> dict[str, int]:
    """Add x xᵀ of all samples to the sums; returns the number of tokens of each layer."""
    counts = dict.fromkeys(layers, 0)

    def add(name: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])
        counts[name] += len(rows)
        if name in sums:
            if not rows.isfinite().all():
                raise MergestreamError(f"{sample.where}: the input of the layer {name} holds NaN or Inf")
            wide = rows.double()
            sums[name].addmm_(wide.T, wide)

    with torch.inference_mode(), _hooked(layers, add):
        for sample in samples:
            run(sample)
    return counts


def _group_by_input(layers: Mapping[str, Sequence[nn.Module]], run: Callable[[], None]) -> list[list[str]]:
    """Group layers that get the very same tensors, such as q, k and v. No value is compared."""
    held: list[Tensor] = []  # so that no memory is used again
    seen: dict[str, list[tuple[Any, ...]]] = {name: [] for name in layers}

    def look(name: str, x: Tensor) -> None:
        held.append(x)
        version = len(held) if x.is_inference() else x._version
        seen[name].append((x.data_ptr(), x.shape, x.stride(), version))

    with torch.no_grad(), _hooked(layers, look):
        run()
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in layers:
        groups.setdefault(tuple(seen[name]) or (name,), []).append(name)
    return list(groups.values())


@contextmanager
def _hooked(layers: Mapping[str, Sequence[nn.Module]], hook: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call ``hook`` with the name of a weight and the input of its layer, whenever the layer is called."""

    def on_call(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: hook(name, (args[0] if args else kwargs["input"]).detach())

    with ExitStack() as handles:
        for name, modules in layers.items():
            for module in modules:
                handles.callback(module.register_forward_pre_hook(on_call(name), with_kwargs=True).remove)
        yield


def _first_part(groups: list[list[str]], sizes: Mapping[str, int], memory: int) -> list[list[str]]:
    """As many groups as fit; room for the eigenvectors of one matrix is left."""
    part: list[list[str]] = []
    used = 0
    for group in groups:
        size = 8 * sizes[group[0]] ** 2
        used += size
        if used + 3 * max(8 * sizes[first] ** 2 for first, *_ in (*part, group)) > memory:
            break
        part.append(group)
    if not part:
        raise MergestreamError(
            f"the second moment of the input of {groups[0][0]} needs {format_size(32 * sizes[groups[0][0]] ** 2)} of "
            f"memory beside the model, more than the {format_size(max(0, memory))} there are; raise --max-memory, or "
            "use a larger machine"
        )
    return part
