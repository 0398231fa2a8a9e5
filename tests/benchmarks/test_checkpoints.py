from pathlib import Path

import pytest
import torch

from benchmarks import checkpoints
from mergestream.checkpoints import open_checkpoint


@pytest.mark.parametrize("shape", [(96, 96), (120, 48), (48, 120), (257, 64)])
def test_task_vectors_have_a_power_law_spectrum(shape: tuple[int, int]) -> None:
    delta = checkpoints.task_vector(shape, torch.Generator().manual_seed(1))
    assert delta.shape == shape
    s = torch.linalg.svdvals(delta.double())
    expected = torch.arange(1, min(shape) + 1).double() ** -checkpoints.DECAY
    assert torch.allclose(s / s[0], expected, rtol=1e-4)
    expected_norm = checkpoints.RELATIVE_NORM * checkpoints.BASE_STD * (shape[0] * shape[1]) ** 0.5
    assert float(delta.norm()) == pytest.approx(expected_norm, rel=1e-4)


def test_a_family_is_made_once_and_again_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = checkpoints.llama(2, hidden=64, wide=96, heads=4, vocabulary=50, dtype=torch.bfloat16)
    monkeypatch.setitem(checkpoints.MODELS, "tiny", checkpoints.Shape(tiny.config, tiny.tensors, tiny.dtype, 30_000))
    first = checkpoints.family("tiny", 2, tmp_path / "a")
    again = checkpoints.family("tiny", 2, tmp_path / "b")
    assert len(list(first.base.glob("model-*.safetensors"))) > 1
    for one, other in zip((first.base, *first.experts), (again.base, *again.experts), strict=True):
        with open_checkpoint(one) as a, open_checkpoint(other) as b:
            assert a.tensors.keys() == tiny.tensors.keys()
            assert all(torch.equal(a.read(name), b.read(name)) for name in a.tensors)
    before = first.base.stat().st_mtime_ns
    assert checkpoints.family("tiny", 2, tmp_path / "a") == first
    assert first.base.stat().st_mtime_ns == before
