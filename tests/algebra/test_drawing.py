"""Random choices by their address."""

from __future__ import annotations

import pytest
import torch

from mergestream.algebra.pieces import chosen

KEY = 0x0123456789ABCDEF_FEDCBA9876543210
FIRST = "011010011110101000001101"
FAR = "100100000000001001000111"


def test_these_bits_are_for_ever() -> None:
    """Stores are read and experts removed by later versions, which must draw the same."""
    for start, bits in ((0, FIRST), (10**12, FAR)):
        assert "".join(map(str, chosen(KEY, 0.5, start, 24).int().tolist())) == bits


@pytest.mark.parametrize("size", [1, 7, 8, 1000])
def test_pieces_of_any_size_are_parts_of_one_choice(size: int) -> None:
    whole = chosen(KEY, 0.3, 0, 3001)
    pieces = [chosen(KEY, 0.3, start, min(size, 3001 - start)) for start in range(0, 3001, size)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.99])
def test_the_share_is_what_was_asked_for_and_keys_are_independent(share: float) -> None:
    count = 200_000
    one, other = (chosen(key, share, 0, count).double() for key in (KEY, KEY + 1))
    deviation = (share * (1 - share) / count) ** 0.5
    assert abs(float(one.mean()) - share) < 5 * deviation
    assert abs(float((one * other).mean()) - share**2) < 5 * deviation


def test_all_and_nothing() -> None:
    assert chosen(KEY, 1.0, 5, 1000).all()
    assert chosen(KEY, 0.5, 5, 0).shape == (0,)
