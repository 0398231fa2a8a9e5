"""The ``clip`` suite: the paper's models, experts and data sets, from the hub.

Only the vision tower is merged; the text tower and both projections are the base's. The head of a class is the mean
text embedding of its prompts, and logits are exp(logit_scale)·cosine. Data comes from the Parquet files that the hub
has of every data set, so no code of a data set is run.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suites.cache import cache_directory, cached_directory, key_of, written_whole
from benchmarks.suites.encoders import Head, load_pretrained
from mergestream import download
from mergestream.errors import MergestreamError, UsageError, first_line
from mergestream.evaluation.suites import Suite, first_tasks

if TYPE_CHECKING:
    from torch import Tensor

SIZES = {  # size: the paper's name, base
    "vit-b-32": ("ViT-B/32", "openai/clip-vit-base-patch32"),
    "vit-b-16": ("ViT-B/16", "openai/clip-vit-base-patch16"),
    "vit-l-14": ("ViT-L/14", "openai/clip-vit-large-patch14"),
}
PARQUET_REVISION = "refs/convert/parquet"

PHOTO = ("a photo of a {}.", "a picture of the {}.", "a close-up photo of a {}.", "a low resolution photo of a {}.")
SATELLITE = ("a satellite photo of {}.", "an aerial view of {}.", "a centered satellite photo of {}.")
DIGIT = ('a photo of the number "{}".', "the digit {}.", "a handwritten or printed number {}.")
LETTER = ("the handwritten character {}.", 'a photo of the letter "{}".')
FACE = ("a photo of a {} looking face.", "a face that looks {}.", "a photo of a person who is {}.")
TEXTURE = ("a photo of a {} texture.", "a photo of a {} pattern.", "a photo of a {} thing.")
SIGN = ('a photo of a "{}" traffic sign.', "a close-up photo of a {} road sign.")

DIGITS = tuple("0123456789")
EMOTIONS = ("angry", "disgusted", "fearful", "happy", "neutral", "sad", "surprised")
TRAFFIC_SIGNS = (
    *(f"{speed} km/h speed limit" for speed in (20, 30, 50, 60, 70, 80)),
    "end of 80 km/h speed limit", "100 km/h speed limit", "120 km/h speed limit", "no passing",
    "no passing for trucks", "priority at the next crossing", "priority road", "yield", "stop", "no vehicles",
    "no trucks", "no entry", "general danger", "dangerous curve to the left", "dangerous curve to the right",
    "double curve", "bumpy road", "slippery road", "road narrows on the right", "road works", "traffic light ahead",
    "pedestrian crossing", "children crossing", "bicycle crossing", "ice and snow", "wild animals crossing",
    "end of all limits", "turn right ahead", "turn left ahead", "ahead only", "go straight or right",
    "go straight or left", "keep right", "keep left", "roundabout", "end of no passing",
    "end of no passing for trucks",
)  # fmt: skip


@dataclass(frozen=True)
class ClipTask:
    """A data set of the hub: its test split, columns, class names and prompts."""

    key: str
    title: str  # in the paper
    dataset: str
    prompts: tuple[str, ...] = PHOTO
    classes: tuple[str, ...] = ()  # if the data set has no useful names
    config: str = "default"
    split: str = "test"
    image: str = "image"
    label: str = "label"


TASKS = (
    ClipTask("sun397", "SUN397", "tanganke/sun397"),
    ClipTask("stanford-cars", "Cars", "tanganke/stanford_cars"),
    ClipTask("resisc45", "RESISC45", "tanganke/resisc45", SATELLITE),
    ClipTask("eurosat", "EuroSAT", "tanganke/eurosat", SATELLITE),
    ClipTask("svhn", "SVHN", "ufldl-stanford/svhn", DIGIT, DIGITS, config="cropped_digits"),
    ClipTask("gtsrb", "GTSRB", "tanganke/gtsrb", SIGN, TRAFFIC_SIGNS),
    ClipTask("mnist", "MNIST", "ylecun/mnist", DIGIT, DIGITS, config="mnist"),
    ClipTask("dtd", "DTD", "tanganke/dtd", TEXTURE),
    ClipTask("oxford_flowers102", "Flowers102", "dpdl-benchmark/oxford_flowers102"),
    ClipTask("pcam", "PCAM", "1aurent/PatchCamelyon", ("a histopathology photo of {}.", "tissue with {}."),
             ("a healthy lymph node", "a lymph node with metastatic tumor tissue")),
    ClipTask("fer2013", "FER2013", "clip-benchmark/wds_fer2013", FACE, EMOTIONS, image="jpg", label="cls"),
    ClipTask("oxford-iiit-pet", "OxfordIIITPet", "timm/oxford-iiit-pet"),
    ClipTask("stl10", "STL10", "tanganke/stl10"),
    ClipTask("cifar100", "CIFAR100", "tanganke/cifar100", label="fine_label"),
    ClipTask("cifar10", "CIFAR10", "tanganke/cifar10"),
    ClipTask("food101", "Food101", "ethz/food101", split="validation"),
    ClipTask("fashion_mnist", "FashionMNIST", "zalando-datasets/fashion_mnist", config="fashion_mnist"),
    ClipTask("emnist_letters", "EMNIST", "tanganke/emnist_letters", LETTER, tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")),
    ClipTask("kmnist", "KMNIST", "tanganke/kmnist", LETTER,
             ("お o", "き ki", "す su", "つ tsu", "な na", "は ha", "ま ma", "や ya", "れ re", "を wo")),
    ClipTask("rendered-sst2", "RenderedSST2", "nateraw/rendered-sst2", ("a {} review of a movie.",),
             ("negative", "positive")),
)  # fmt: skip


@dataclass
class ClipSuite(Suite):
    """The first ``count`` tasks (8, 14 or 20 in the paper); without ``test_limit`` the whole test sets."""

    name = "clip"
    size: str = "vit-b-32"
    count: int = 8
    test_limit: int | None = None

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise UsageError(f"there is no CLIP model {self.size!r}; there are {', '.join(SIZES)}")
        self.model_name, self.base_id = SIZES[self.size]
        self._tasks = {task.title: task for task in first_tasks(self.name, TASKS, self.count)}
        self.tasks = tuple(self._tasks)
        self._model: tuple[Path, Any] | None = None

    def limited(self, tasks: int | None = None, test_limit: int | None = None) -> Suite:
        return replace(self, count=tasks if tasks is not None else self.count, test_limit=test_limit or self.test_limit)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "whole_base"} | {"_model": None}

    def base(self) -> Path:
        return vision_tower(self.base_id)

    def expert(self, task: str) -> Path:
        return vision_tower(f"tanganke/{self.base_id.split('/')[1]}_{self._tasks[task].key}")

    @cached_property
    def whole_base(self) -> Path:
        """The base with its text tower and tokenizer."""
        return download(self.base_id)[0]

    def accuracy(self, model: Path, task: str) -> float:
        import torch

        if self._model is None or self._model[0] != model:
            self._model = (model, self._image_encoder(model))
        encoder, head = self._model[1], self.head(task)
        right = total = 0
        for images, labels in self._batches(task):
            with torch.inference_mode():
                right += int((head(encoder(images)).argmax(1) == labels).sum())
            total += len(labels)
        if not total:
            raise MergestreamError(f"the test split of {self._tasks[task].dataset} is empty")
        return right / total

    def _image_encoder(self, model: Path) -> Any:
        """Return the vision tower followed by the base's projection, on the GPU if there is one."""
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        clip: Any = load_pretrained("CLIPModel", self.whole_base)
        clip.vision_model.load_state_dict(_tower_state(load_pretrained("CLIPVisionModel", model)))
        tower, projection = clip.vision_model.to(device), clip.visual_projection.to(device)
        side: int = clip.config.vision_config.image_size

        def encode(images: Sequence[bytes]) -> Tensor:
            with ThreadPoolExecutor() as pool:
                pixels = torch.stack(list(pool.map(lambda image: preprocess(image, side), images)))
            embeds: Tensor = projection(tower(pixel_values=pixels.to(device)).pooler_output).cpu()
            return embeds

        return encode

    def _batches(self, task: str, size: int = 64) -> Iterator[tuple[list[bytes], Tensor]]:
        import pyarrow.parquet
        import torch

        known, left = self._tasks[task], self.test_limit
        for path in parquet_files(known):
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(size, columns=[known.image, known.label]):
                rows = batch.to_pylist()[:left]
                if left is not None:
                    left -= len(rows)
                if rows:
                    yield [row[known.image]["bytes"] for row in rows], torch.tensor([row[known.label] for row in rows])

    def head(self, task: str) -> Head:
        """Return a task's head; the cache keeps it."""
        path = cache_directory() / "heads" / "clip" / f"{self.size}-{self._head_key(task)}.safetensors"
        if not path.is_file():
            head = self._make_head(self._tasks[task])
            with written_whole(path) as draft:
                head.save(draft)
        return Head.load(path)

    def _head_key(self, task: str) -> str:
        known = self._tasks[task]
        return key_of(known.key, known.prompts, class_names(known), self.whole_base.name)

    def _make_head(self, task: ClipTask) -> Head:
        """Embed every prompt of a class, normalise, and average."""
        import torch
        from torch.nn.functional import normalize

        tokenizer = load_tokenizer(self.whole_base)
        clip: Any = load_pretrained("CLIPModel", self.whole_base)
        rows = []
        with torch.inference_mode():
            for name in class_names(task):
                encoded = tokenizer.encode_batch([prompt.format(name) for prompt in task.prompts])
                ids, mask = torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded])
                embeds = clip.text_projection(clip.text_model(input_ids=ids, attention_mask=mask).pooler_output)
                rows.append(normalize(embeds, dim=1).mean(0))
        weight = normalize(torch.stack(rows), dim=1)
        zeros, ones = torch.zeros(weight.shape[1]), torch.ones(weight.shape[1])
        return Head(weight, zeros, ones, float(clip.logit_scale.exp()))

    def evaluation_key(self, task: str) -> str:
        known = self._tasks[task]
        files = [path.resolve().name for path in parquet_files(known)]  # in the hub's cache: digests of the content
        return key_of(self._head_key(task), files, self.test_limit, known.image, known.label)

    def protocol(self) -> dict[str, Any]:
        return {
            "head": "prompts, by the base's text tower",
            "test_limit": self.test_limit,
            "data_sets": {title: task.dataset for title, task in self._tasks.items()},
        }


def vision_tower(hub_id: str) -> Path:
    """Download a CLIP model from the hub and return its vision tower as a separate checkpoint."""
    snapshot, identity = download(hub_id)
    target = cache_directory() / "towers" / identity.replace("/", "--")

    def make(directory: Path) -> None:
        load_pretrained("CLIPVisionModel", snapshot).save_pretrained(directory)  # type: ignore[operator]

    return cached_directory(target, make)


def _tower_state(tower: Any) -> dict[str, Tensor]:
    """Return the tower's tensors; some versions of transformers prefix them with ``vision_model``."""
    return {name.removeprefix("vision_model."): tensor for name, tensor in tower.state_dict().items()}


def load_tokenizer(directory: Path) -> Any:
    """Load CLIP's tokenizer, with truncation and padding."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise MergestreamError(f"{directory} has no tokenizer.json, which is needed for the prompts")
    tokenizer = Tokenizer.from_file(str(path))
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.enable_truncation(77)
    tokenizer.enable_padding(pad_id=end, pad_token="<|endoftext|>")
    return tokenizer


def preprocess(image: bytes, side: int) -> Tensor:
    """Preprocess an image as CLIP does: resize (bicubic), crop the centre, normalise."""
    import numpy as np
    import torch
    from PIL import Image

    with Image.open(io.BytesIO(image)) as opened:
        picture = opened.convert("RGB")
    scale = side / min(picture.size)
    width, height = (max(side, round(length * scale)) for length in picture.size)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - side) // 2, (height - side) // 2
    pixels = np.asarray(picture.crop((left, top, left + side, top + side)), dtype=np.float32) / 255
    mean, deviation = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    return torch.from_numpy(((pixels - mean) / deviation).astype(np.float32).transpose(2, 0, 1))


def parquet_files(task: ClipTask) -> list[Path]:
    """Download the Parquet files of the test split into the hub's cache."""
    import huggingface_hub as hub

    folder = f"{task.config}/{task.split}/"
    try:
        snapshot = hub.snapshot_download(
            task.dataset, repo_type="dataset", revision=PARQUET_REVISION, allow_patterns=f"{folder}*.parquet"
        )
    except Exception as error:  # each client library has its own types
        raise MergestreamError(
            f"the data set {task.dataset} cannot be downloaded from the hub ({first_line(error)})"
        ) from error
    files = sorted((Path(snapshot) / folder).glob("*.parquet"))
    if not files:
        raise MergestreamError(f"the data set {task.dataset} has no Parquet files for {folder.rstrip('/')} on the hub")
    return files


def class_names(task: ClipTask) -> list[str]:
    """Return the task's class names, else those in the metadata of the Parquet files."""
    if task.classes:
        return list(task.classes)
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_schema(parquet_files(task)[0]).metadata or {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        names = features[task.label]["names"]
    except (KeyError, ValueError):
        raise MergestreamError(f"the data set {task.dataset} does not name the classes of {task.label}") from None
    return [str(name).replace("_", " ") for name in names]
