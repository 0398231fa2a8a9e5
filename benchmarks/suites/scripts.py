"""Characters of eleven scripts, rendered from fonts that Debian packages.

Families that draw a tenth of the characters alike (a font and its fork, a proportional variant) are one design, and
every design is on one side of the split. Fonts without a character draw a box. They are recognised by what they draw
for a code point that does not exist, and skipped.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suites.fetch import Package, fetch_all
from benchmarks.suites.trained import Data, Task
from mergestream.errors import MergestreamError

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont
    from torch import Tensor

TRAIN_IMAGES, TEST_IMAGES, SIDE = 4000, 2000, 32
NOT_CHARACTERS = ("\ufffe", "\U000efffe", "\u0378")


@cache
def catalogue() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((Path(__file__).parent / "fonts.json").read_text("utf-8"))
    return loaded


def font_packages(script: str) -> list[Package]:
    pins = catalogue()["packages"]
    return [
        Package("debian", name, pins[name][0], pins[name][1], "Debian main", keep=(".ttf", ".otf", ".ttc"))
        for name in catalogue()["scripts"][script]["packages"]
    ]


def script_task(script: str) -> Task:
    sources = tuple(package.sha256 for package in font_packages(script))
    characters = catalogue()["scripts"][script]["characters"]
    return Task(script, tuple(characters), sources, partial(render_script, script, characters))


def render_script(script: str, characters: str) -> Data:
    fonts = [
        path
        for directory in fetch_all(font_packages(script))
        for path in sorted(directory.rglob("*"))
        if path.suffix in (".ttf", ".otf", ".ttc")
    ]
    designs = group_designs(fonts, characters)
    if len(designs) < 4:
        raise MergestreamError(f"only {len(designs)} fonts draw all characters of the script {script}")
    random.Random(0).shuffle(designs)
    held_out = max(2, round(0.3 * len(designs)))
    train = render(designs[held_out:], characters, TRAIN_IMAGES, seed=1)
    test = render(designs[:held_out], characters, TEST_IMAGES, seed=2)
    return Data(train[0], train[1], test[0], test[1])  # type: ignore[arg-type]


def group_designs(fonts: list[Path], characters: str) -> list[list[Path]]:
    """Return the fonts that have every character, grouped into designs."""
    families: dict[str, list[Path]] = defaultdict(list)
    drawings: dict[str, set[tuple[str, bytes]]] = defaultdict(set)
    for path in fonts:
        font = open_font(path, 24)
        if font is None:
            continue
        boxes = {glyph(font, character) for character in NOT_CHARACTERS}
        drawn = [glyph(font, character) for character in characters]
        if any(not any(mask[1]) or mask in boxes for mask in drawn) or len(set(drawn)) < len(drawn):
            continue
        family = str(font.getname()[0])
        families[family].append(path)
        drawings[family] |= {(character, mask[1]) for character, mask in zip(characters, drawn, strict=True)}
    designs: list[set[str]] = []
    for family in sorted(families):
        alike = [
            design
            for design in designs
            if any(len(drawings[family] & drawings[other]) >= 0.1 * len(characters) for other in design)
        ]
        designs = [design for design in designs if design not in alike] + [{family}.union(*alike)]
    return [[path for family in sorted(design) for path in families[family]] for design in designs]


def open_font(path: Path, size: int) -> FreeTypeFont | None:
    from PIL import ImageFont

    try:
        font = ImageFont.truetype(str(path), size)
        font.getmask("A")
    except (OSError, ValueError):
        return None  # a bitmap font without this size, or a damaged one
    return font


def glyph(font: FreeTypeFont, character: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(character)
    return mask.size, bytes(mask)


def render(designs: list[list[Path]], characters: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Render ``count`` random characters, dark on light or light on dark, slightly rotated and shifted."""
    import torch

    choice = random.Random(seed)
    images, labels = [], []
    for label in _labels(len(characters), count, choice):
        path = choice.choice(choice.choice(designs))  # designs are equally likely, with any number of weights
        images.append(draw(path, characters[label], choice))
        labels.append(label)
    return torch.stack(images), torch.tensor(labels)


def _labels(classes: int, count: int, choice: random.Random) -> Iterator[int]:
    labels = [index % classes for index in range(count)]
    choice.shuffle(labels)
    return iter(labels)


def draw(path: Path, character: str, choice: random.Random) -> Tensor:
    import numpy as np
    import torch
    from PIL import Image, ImageDraw

    font = open_font(path, choice.randint(40, 52))
    assert font is not None
    canvas = Image.new("L", (2 * SIDE, 2 * SIDE), 0)
    shift = (SIDE + choice.uniform(-4, 4), SIDE + choice.uniform(-4, 4))
    left, top, right, bottom = font.getbbox(character)
    corner = (shift[0] - (left + right) / 2, shift[1] - (top + bottom) / 2)
    ImageDraw.Draw(canvas).text(corner, character, fill=255, font=font)
    canvas = canvas.rotate(choice.uniform(-12, 12), resample=Image.Resampling.BILINEAR)
    ink = np.asarray(canvas.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.float32)[None] / 255
    back, front = [np.array([choice.uniform(0, 90) for _ in range(3)], np.float32)[:, None, None] for _ in "ab"]
    back, front = (back, 255 - front) if choice.random() < 0.5 else (255 - back, front)
    return torch.from_numpy((back * (1 - ink) + front * ink).astype(np.uint8))
