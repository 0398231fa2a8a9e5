from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from mergestream.base.model import BaseTensor
from mergestream.digest import tensor_digest
from mergestream.engine.local import single_threaded
from mergestream.errors import MergestreamError
from mergestream.experts import sketch as module
from mergestream.experts.sketch import MIN_WIDTH, WIDTH, Sketch, cosine_error, cosines, fold, width_for
from mergestream.store.records import parse_sketch, write_sketch

Vector = dict[str, torch.Tensor]
ERROR = 0.01


def cosine(a: np.ndarray | None, b: np.ndarray | None) -> float | None:
    return cosines([a, b])[0][1]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sketches as large models have them, of models that are small enough for a test."""
    monkeypatch.setattr(module, "MIN_WIDTH", WIDTH)


def empty_sketch(vector: Vector) -> Sketch:
    """For a base of tensors like these, with a norm of about ten."""
    return Sketch(
        {
            name: BaseTensor("F32", tuple(tensor.shape), "linear" if tensor.ndim == 2 else "other", "", None, "", 10.0)
            for name, tensor in vector.items()
        }
    )


def add_pieces(sketch: Sketch, name: str, tensor: torch.Tensor, piece: int = 1 << 17) -> None:
    part = sketch.tensor(name)
    for start in range(0, tensor.numel(), piece):
        part.update(start, tensor.reshape(-1)[start : start + piece])
    sketch.add(part)


def elements_of(tensor: torch.Tensor, made: list[int] | None = None) -> Callable[[int, int], torch.Tensor]:
    """The elements on demand; ``made`` gets to know how many."""

    def elements(start: int, stop: int) -> torch.Tensor:
        if made is not None:
            made.append(stop - start)
        return tensor.reshape(-1)[start:stop]

    return elements


def sketch_of(vector: Vector, piece: int = 1 << 17, order: list[str] | None = None) -> np.ndarray:
    sketch = empty_sketch(vector)
    for name in order or vector:
        add_pieces(sketch, name, vector[name], piece)
    return sketch.values().float().numpy()


def exact(a: Vector, b: Vector) -> float:
    flat_a = torch.cat([t.reshape(-1).double() for t in a.values()])
    flat_b = torch.cat([t.reshape(-1).double() for t in b.values()])
    return float(flat_a @ flat_b / (flat_a.norm() * flat_b.norm()))


def transformer(seed: int, shared: float, kind: str) -> Vector:
    """Task vectors of a small transformer; ``shared`` is how much all of them have in common."""
    common, own = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    shapes = {"embedding": (4000, 256), "norm": (1024,), "scalar": ()}
    shapes |= {f"{i}.{part}": (512, 512) for i in range(2) for part in ("up", "down")}
    shapes |= {f"{i}.bias": (512,) for i in range(40)}
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
        if kind == "biases" and len(shape) == 2:
            one *= 0
        vector[name] = 1e-3 * one
    return vector


KINDS = ["dense", "low rank", "outliers", "one sign", "sparse", "biases"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [0.0, 0.5, 2.0])
def test_cosines_are_within_the_stated_error(kind: str, shared: float, wide: None) -> None:
    """Of the sketch of a large model, and of what it is folded to for a small one: five standard errors each."""
    vectors = [transformer(seed, shared, kind) for seed in range(4)]
    sketches = [sketch_of(vector) for vector in vectors]
    for width in (WIDTH, 1 << 14, MIN_WIDTH):
        found = cosines([fold(sketch, width) for sketch in sketches])
        for i, j in itertools.combinations(range(4), 2):
            estimate = found[i][j]
            assert estimate is not None
            assert abs(estimate - exact(vectors[i], vectors[j])) <= 5.12 * cosine_error(width)
    assert 5.12 * cosine_error(WIDTH) == ERROR


def test_the_error_has_the_stated_standard_deviation_and_no_bias(wide: None) -> None:
    errors: dict[int, list[float]] = {WIDTH: [], MIN_WIDTH: []}
    for seed in range(8):
        vectors = [transformer(100 * seed + i, 0.0, "dense") for i in range(3)]
        sketches = [sketch_of(vector) for vector in vectors]
        for i, j in itertools.combinations(range(3), 2):
            for width, found in errors.items():
                estimate = cosine(fold(sketches[i], width), fold(sketches[j], width))
                assert estimate is not None
                found.append(estimate - exact(vectors[i], vectors[j]))
    for width, found in errors.items():
        assert np.std(found) < 1.4 * cosine_error(width)
        assert abs(np.mean(found)) < 3 * cosine_error(width) / math.sqrt(len(found))


def test_a_sketch_takes_a_hundredth_of_the_model_within_bounds() -> None:
    assert width_for(0) == width_for(4_700) == MIN_WIDTH
    assert width_for(2_000_000) == 1 << 14 and 2 * width_for(2_000_000) <= 2 * 2_000_000 / 100
    assert width_for(30_000_000) == width_for(8_000_000_000) == WIDTH


def test_a_narrow_sketch_is_the_wide_one_folded_so_that_they_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of a small model goes on, whatever the width of the sketches was that it began with."""
    a, b = transformer(0, 0.5, "dense"), transformer(1, 0.5, "dense")
    narrow = [sketch_of(vector) for vector in (a, b)]
    monkeypatch.setattr(module, "MIN_WIDTH", WIDTH)
    wide = [sketch_of(vector) for vector in (a, b)]
    assert len(narrow[0]) == 1 << 14 and len(wide[0]) == WIDTH
    assert cosine(narrow[0], wide[0]) == pytest.approx(1, abs=1e-6)
    assert cosine(wide[0], narrow[1]) == pytest.approx(cosine(*narrow), abs=1e-4)


def test_a_model_with_no_more_elements_than_the_narrowest_sketch_is_exact() -> None:
    a, b = (
        {str(i): 1 + torch.randn(400, generator=torch.Generator().manual_seed(100 * i + seed)) for i in range(10)}
        for seed in range(2)
    )
    assert len(sketch_of(a)) == MIN_WIDTH
    assert cosine(sketch_of(a), sketch_of(b)) == pytest.approx(exact(a, b), abs=1e-5)


def test_all_cosines_at_once_are_those_of_the_pairs() -> None:
    vectors = [transformer(seed, 0.5, "dense") for seed in range(3)]
    sketches = [*map(sketch_of, vectors), None, np.zeros(1 << 14, np.float16)]
    found = cosines(sketches)
    for i, j in itertools.product(range(5), repeat=2):
        assert found[i][j] == pytest.approx(cosine(sketches[i], sketches[j]), abs=1e-6)
    assert found[3] == found[4] == [None] * 5 and found[0][0] == pytest.approx(1)
    assert cosines([]) == [] and cosines([None]) == [[None]]


def test_a_model_with_no_more_elements_than_buckets_is_exact_but_for_rounding(wide: None) -> None:
    a, b = (
        {str(i): 1 + torch.randn(2000, generator=torch.Generator().manual_seed(100 * i + seed)) for i in range(130)}
        for seed in range(2)
    )
    assert cosine(sketch_of(a), sketch_of(b)) == pytest.approx(exact(a, b), abs=1e-5)


def test_order_of_tensors_threads_and_cut_into_pieces_make_no_difference() -> None:
    vector = transformer(0, 0.0, "dense")
    expected = sketch_of(vector)
    assert np.array_equal(expected, sketch_of(vector, piece=77_777))
    assert np.array_equal(expected, sketch_of(vector, order=sorted(vector, reverse=True)))
    sketch = empty_sketch(vector)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: add_pieces(sketch, name, vector[name]), vector))
    assert np.array_equal(expected, sketch.values().float().numpy())


def test_elements_on_demand_give_the_same_sketch() -> None:
    vector = transformer(0, 0.0, "dense")
    sketch = empty_sketch(vector)
    for name, tensor in vector.items():
        sketch.add_elements(name, elements_of(tensor))
    assert np.array_equal(sketch_of(vector), sketch.values().float().numpy())


@pytest.mark.parametrize(
    ("narrowest", "digest"),
    [(MIN_WIDTH, "2349aeac8570858c7795e56533051a99"), (WIDTH, "afbe36099579dd6944e988022335cbfb")],
)
def test_the_sketch_of_a_given_vector_never_changes(
    narrowest: int, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sketches of different years are compared with each other, so what is drawn is part of the format."""
    monkeypatch.setattr(module, "MIN_WIDTH", narrowest)
    vector = {"first": torch.arange(70_001) % 100 - 40.0, "second": torch.arange(300_000) % 1000 - 400.0}
    sketch = empty_sketch(vector)
    for name, tensor in vector.items():
        add_pieces(sketch, name, tensor)
    assert tensor_digest(sketch.values()) == digest


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


def test_a_sample_of_the_linear_weights_of_a_large_model_is_enough(wide: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Task vectors of rank 4 with a part in common; half of the chunks are sampled, and the others never made."""
    monkeypatch.setattr(module, "CHUNK", 1 << 11)
    module._signs.cache_clear()
    monkeypatch.setattr(module, "SAMPLED", 512)

    def vector(seed: int) -> Vector:
        common, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(seed)
        tensors: Vector = {"embedding": 0.1 * torch.randn(1000, generator=own)}
        for layer in range(8):
            left, right = (torch.randn(4, 512, generator=common) + torch.randn(4, 512, generator=own) for _ in "ab")
            tensors[f"{layer}.weight"] = left.T @ right
        return tensors

    vectors, sketches = [vector(1), vector(2)], []
    made: list[int] = []
    for one in vectors:
        sketch = empty_sketch(one)
        for name, tensor in one.items():
            sketch.add_elements(name, elements_of(tensor, made))
        sketches.append(sketch.values().float().numpy())
        assert np.array_equal(sketches[-1], sketch_of(one))
    module._signs.cache_clear()
    assert 0.4 < sum(made) / (2 * 8 * 512 * 512) < 0.6
    assert exact(*vectors) > 0.2
    estimate = cosine(*sketches)
    assert estimate is not None and abs(estimate - exact(*vectors)) <= 2 * ERROR


def test_a_sketch_is_kept_in_less_than_a_megabyte(tmp_path: Path) -> None:
    vector = transformer(0, 0.0, "dense")
    sketch = empty_sketch(vector)
    add_pieces(sketch, "norm", vector["norm"])
    digest = write_sketch(tmp_path, sketch.values())
    assert (tmp_path / "sketch.safetensors").stat().st_size < 1_000_000
    found = parse_sketch((tmp_path / "sketch.safetensors").read_bytes(), "sketch.safetensors", digest)
    assert found.shape == (1 << 14,)
    assert np.array_equal(found, sketch.values().float().numpy())


def test_a_damaged_sketch_is_named() -> None:
    with pytest.raises(MergestreamError, match=r"sketch\.safetensors is damaged"):
        parse_sketch(b"not a sketch", "sketch.safetensors", "")
