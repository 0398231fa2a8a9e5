import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mergestream.digest import tensor_digest
from mergestream.engine.local import single_threaded
from mergestream.errors import MergestreamError
from mergestream.sketch import (
    STANDARD_ERROR,
    WIDTH,
    Sketch,
    TensorSketch,
    cosine,
    read_sketch,
    sketch_elements,
    write_sketch,
)

Vector = dict[str, torch.Tensor]
ERROR = 0.01


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


def sketch_of(vector: Vector, piece: int = 1 << 17, order: list[str] | None = None) -> np.ndarray:
    sketch = Sketch(magnitude=100.0)
    for name in order or vector:
        sketch.add(tensor_sketch(name, vector[name], piece))
    return sketch.values().to(torch.float32).numpy()


def tensor_sketch(name: str, tensor: torch.Tensor, piece: int = 1 << 17) -> TensorSketch:
    part = TensorSketch(name, tensor.numel())
    for start in range(0, tensor.numel(), piece):
        part.update(start, tensor.reshape(-1)[start : start + piece])
    return part


def exact(a: Vector, b: Vector) -> float:
    flat_a = torch.cat([t.reshape(-1).double() for t in a.values()])
    flat_b = torch.cat([t.reshape(-1).double() for t in b.values()])
    return float(flat_a @ flat_b / (flat_a.norm() * flat_b.norm()))


def transformer(seed: int, shared: float, kind: str) -> Vector:
    """Task vectors of a small transformer; ``shared`` is how much all of them have in common."""
    common, own = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    shapes = {"embedding": (4000, 256), "bias": (256,), "norm": (1024,), "scalar": ()}
    shapes |= {f"layer.{i}.{part}": (512, 512) for i in range(2) for part in ("up", "down")}
    vector = {}
    for name, shape in shapes.items():
        one = shared * torch.randn(shape, generator=common) + torch.randn(shape, generator=own)
        if kind == "low rank" and len(shape) == 2:
            one = one[:, :8] @ one[:8]
        if kind == "outliers" and len(shape) == 2:
            one[:, 7] *= 100  # a column that dwarfs the others, and falls on every 512th element
            one[:3] *= 30
        if kind == "one sign":
            one = one.abs()
        if kind == "sparse":
            one = one * (one.abs() > 2.5)
        vector[name] = 1e-3 * one
    return vector


@pytest.mark.parametrize("kind", ["dense", "low rank", "outliers", "one sign", "sparse"])
@pytest.mark.parametrize("shared", [0.0, 0.5, 2.0])
def test_cosines_are_within_the_stated_error(kind: str, shared: float) -> None:
    vectors = [transformer(seed, shared, kind) for seed in range(4)]
    sketches = [sketch_of(vector) for vector in vectors]
    for i, j in itertools.combinations(range(4), 2):
        estimate = cosine(sketches[i], sketches[j])
        assert estimate is not None
        assert abs(estimate - exact(vectors[i], vectors[j])) <= ERROR


def test_the_error_has_the_stated_standard_deviation_and_no_bias() -> None:
    errors = []
    for seed in range(12):
        vectors = [transformer(100 * seed + i, 0.0, "dense") for i in range(3)]
        sketches = [sketch_of(vector) for vector in vectors]
        for i, j in itertools.combinations(range(3), 2):
            errors.append(cosine(sketches[i], sketches[j]) - exact(vectors[i], vectors[j]))
    assert np.std(errors) < 1.4 * STANDARD_ERROR
    assert abs(np.mean(errors)) < 3 * STANDARD_ERROR / math.sqrt(len(errors))


def test_a_model_with_fewer_elements_than_a_chunk_is_exact_but_for_rounding() -> None:
    a, b = ({"w": torch.randn(300, 100, generator=torch.Generator().manual_seed(i)) + 1} for i in range(2))
    assert cosine(sketch_of(a), sketch_of(b)) == pytest.approx(exact(a, b), abs=1e-4)


def test_order_of_tensors_threads_and_cut_into_pieces_make_no_difference() -> None:
    vector = transformer(0, 0.0, "dense")
    expected = sketch_of(vector)
    assert np.array_equal(expected, sketch_of(vector, piece=77_777))
    assert np.array_equal(expected, sketch_of(vector, order=sorted(vector, reverse=True)))
    sketch = Sketch(magnitude=100.0)
    with ThreadPoolExecutor(8) as pool:
        for part in pool.map(lambda name: tensor_sketch(name, vector[name]), vector):
            sketch.add(part)
    assert np.array_equal(expected, sketch.values().float().numpy())


def test_the_sketch_of_a_given_vector_never_changes() -> None:
    """Sketches of different years are compared with each other, so the drawing of buckets is part of the format."""
    sketch = Sketch(magnitude=1.0)
    sketch.add(tensor_sketch("layer.weight", torch.arange(300_000) % 1000 - 400.0))
    assert tensor_digest(sketch.values()) == "ecd167f9cebcd4f3a5233d2c0ba30c50"


def test_scale_does_not_matter_and_opposite_vectors_have_cosine_minus_one() -> None:
    vector = transformer(0, 0.0, "dense")
    opposite = {name: -3 * tensor for name, tensor in vector.items()}
    assert cosine(sketch_of(vector), sketch_of(opposite)) == pytest.approx(-1, abs=1e-6)


def test_float64_and_bfloat16_pieces_are_taken() -> None:
    vector = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    double = {"w": vector["w"].double()}
    assert np.array_equal(sketch_of(vector), sketch_of(double))


def test_a_zero_vector_has_no_cosine() -> None:
    zero, other = sketch_of({"w": torch.zeros(10)}), sketch_of({"w": torch.ones(10)})
    assert cosine(zero, other) is None
    assert cosine(None, other) is None


def test_a_sketch_is_kept_in_less_than_a_megabyte(tmp_path) -> None:
    sketch = Sketch(magnitude=1.0)
    sketch.add(tensor_sketch("w", torch.randn(1000)))
    write_sketch(tmp_path, sketch.values())
    assert (tmp_path / "sketch.safetensors").stat().st_size < 1_000_000
    found = read_sketch(tmp_path)
    assert found is not None and found.shape == (WIDTH,)
    assert np.array_equal(found, sketch.values().float().numpy())


def test_a_damaged_sketch_is_named(tmp_path) -> None:
    (tmp_path / "sketch.safetensors").write_bytes(b"not a sketch")
    with pytest.raises(MergestreamError, match=r"sketch\.safetensors is damaged"):
        read_sketch(tmp_path)
    assert read_sketch(tmp_path / "nowhere") is None


def test_a_sample_of_a_large_linear_weight_is_enough() -> None:
    """Task vectors of rank 4 that have a part in common, in weights of 64 chunks of which half are taken."""

    def factors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        common, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(seed)
        parts = [torch.randn(4, n, generator=common) + torch.randn(4, n, generator=own) for n in (4096, 2048)]
        return parts[0], parts[1]

    vectors, sketches = [], []
    for seed in (1, 2):
        sketch, vector = Sketch(magnitude=1e4), {}
        for layer in range(4):
            left, right = factors(10 * layer + seed)
            name, delta = f"{layer}.weight", left.T @ right
            sampled = sketch_elements(name, delta.numel(), lambda a, b, d=delta: d.view(-1)[a:b], linear=True)
            whole = TensorSketch(name, delta.numel(), linear=True)
            whole.update(0, delta)
            assert torch.equal(sampled.buckets, whole.buckets)
            taken = sum(sampled.takes(chunk) for chunk in range(64))
            assert 16 < taken < 48
            sketch.add(sampled)
            vector[name] = delta
        vectors.append(vector)
        sketches.append(sketch.values().to(torch.float32).numpy())
    assert exact(*vectors) > 0.2
    assert abs(cosine(*sketches) - exact(*vectors)) <= ERROR
