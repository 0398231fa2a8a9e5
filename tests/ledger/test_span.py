"""What a span says of its experts, against the same of their task vectors."""

from __future__ import annotations

import torch

from mergestream.ledger.span import Entry, Span


def test_inner_products_and_overlaps_are_those_of_the_task_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    deltas, entries = [], []
    for number, rank in enumerate((2, 4, 3)):
        left, right = (torch.randn(size, rank, generator=generator).double() for size in (7, 6))
        u, s, vh = torch.linalg.svd(3.0**number * left @ right.T, full_matrices=False)
        u, s, vh = u[:, :rank], s[:rank], vh[:rank]
        slots = {"left": u.T.contiguous(), "sigma": s, "right": vh.contiguous(), "norm2": s.square().sum()}
        entries.append(Entry(slots, 1.0))
        deltas.append(u * s @ vh)
    (span,) = Span.of(entries, torch.float64, transposed=False)

    flat = torch.stack([delta.reshape(-1) for delta in deltas])
    torch.testing.assert_close(span.inner_products(3), flat @ flat.T)
    squares = torch.stack([(delta.T @ delta).reshape(-1) for delta in deltas])
    squares /= squares.norm(dim=1, keepdim=True)
    torch.testing.assert_close(span.overlap(3), squares @ squares.T)
