"""Merge the entries of all experts into one tensor of the merged task vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mergestream.algebra.lowrank import LowRank, Value
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.span import Coefficients, Entry, Product, Span, in_order
from mergestream.methods.base import Context


def merge_entries(
    readout: EntriesReadout,
    entries: Sequence[Entry],
    context: Context,
    *,
    in_factors: bool = False,
    device: str = "cpu",
) -> Value:
    """Read one tensor out; with ``in_factors`` a single matrix comes back as `LowRank`.

    Matrices are merged on the ``device``; the entries and the result are on the CPU.
    """
    moved = [number for number in in_order(entries) if entries[number].slots]
    if not moved:
        return LowRank.zeros(context.shape, context.dtype)
    if "delta" in entries[moved[0]].slots and not context.linear:
        total = torch.zeros(context.shape, dtype=torch.float64)
        for number, share in shares(readout, entries).items():
            total += share * entries[number].slots["delta"]
        return total.to(context.dtype)
    products: list[Product] = []
    Z: Coefficients
    for span in Span.of(entries, context.dtype, context.transposed, device):
        if context.linear and len(span.sigma):
            Z = readout.coefficients(span)
        else:  # a diagonal of the experts' shares
            by_expert = shares(readout, entries)
            Z = span.sigma * span.sigma.new_tensor([by_expert[number] for number in span.owner.tolist()])
        products.append(Product(span, Z, context.transposed))
    if in_factors and len(products) == 1:
        return products[0].low_rank(context.dtype, context.shape)
    merged = [product.dense().cpu() for product in products]
    return (merged[0] if len(merged) == 1 else torch.stack(merged)).reshape(context.shape)


def shares(readout: EntriesReadout, entries: Sequence[Entry]) -> dict[int, float]:
    """The share of each expert in a tensor that is no linear weight, by its number, in a fixed order."""
    total = math.fsum(entry.weight for entry in entries)
    return {number: readout.share(entries[number].weight, total) for number in in_order(entries)}
