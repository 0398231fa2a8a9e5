import pytest
import torch
from mergestream_iso import Iso

from mergestream.testing import LINEAR, Check, make_models, merged_in_memory, method_checks


@pytest.mark.parametrize("check", method_checks(Iso(), Iso(alpha=1.5)), ids=str)
def test_the_contract(check: Check) -> None:
    check()


def test_it_equals_the_formula() -> None:
    base, *experts = make_models(3, torch.float64)
    merged = merged_in_memory(Iso(alpha=1.5), base, experts)
    for name, theta in base.items():
        S = torch.stack([expert[name] - theta for expert in experts]).sum(0)
        direction = S / 3
        if name in LINEAR:
            U, sigma, Vh = torch.linalg.svd(S, full_matrices=False)
            direction = U @ torch.eye(len(sigma), dtype=S.dtype) @ Vh * sigma.sum() / min(S.shape)
        torch.testing.assert_close(merged[name], theta + 1.5 * direction)
