"""Inputs of strangers, continued: recipes, samples, tokenizers, LoRAs in one file, routed exports, buckets, the hub.

Each surface writes one input with faults, or serves it from a server of this machine, and reads it as commands do.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy
import torch
import yaml
from safetensors.torch import load_file, save, save_file

from mergestream import Store, TaskArithmetic, merge
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.cli import main
from mergestream.engine import LocalEngine
from mergestream.experts import make_task_vector, open_expert
from mergestream.inputs.reading import open_image, read_inputs
from mergestream.progress import NoProgress
from tests.faults import servers
from tests.faults.inputs import Case, Evil, deeply_disturbed, nasty, scarred, to_json, weights

MANY = 4_000
METHODS = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "model_stock", "slerp")
WORDS = ("<unk>", "<eos>", "the", "cat", "sat", "on", "a", "mat")


class Surface(NamedTuple):
    """How a kind of input is written (from chance and an empty directory), and how commands read it."""

    write: Callable[[random.Random, Path], Path]
    read: Callable[[Path], object]


def cases(_: Path) -> Iterator[Case]:
    for number in range(MANY):
        yield case(number)


def case(seed: int, kind: str | None = None) -> Case:
    """The same for the same seed, of one kind or of any."""
    kind = kind or list(SURFACES)[seed % len(SURFACES)]
    write, read = SURFACES[kind]
    return Case(f"{kind} {seed}", lambda place: write(random.Random(seed), place), read)


# --- mergekit recipes ---------------------------------------------------------------------------------------


def _recipe(draw: random.Random, place: Path) -> Path:
    method = draw.choice(METHODS)
    base, *names = [str(place / name) for name in (("base", "one") if method == "slerp" else ("base", "one", "two"))]
    for model in (base, *names):
        Path(model).mkdir()
        (Path(model) / "model.safetensors").write_bytes(weights())
    models = [{"model": name, "parameters": {"weight": 0.5, "density": 0.3}} for name in names]
    content: dict[str, Any] = {"merge_method": method, "base_model": base, "models": models, "dtype": "bfloat16"}
    if draw.random() < 0.3:
        ranges = [{"sources": [{"model": name, "layer_range": [0, 4]} for name in names]}]
        content = {**content, "slices": ranges, "parameters": {"t": 0.5}}
        del content["models"]
    content = deeply_disturbed(draw, content)
    text = yaml.safe_dump(content, allow_unicode=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    kind = draw.randrange(5)
    if kind == 0:
        text = scarred(draw, text)
    elif kind == 1:
        nested = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, draw.choice((3, 12, 30))))
        text += f"a0: &a0 [x, x]\n{nested}".encode()
    elif kind == 2:
        text += b"dtype: !!python/object/apply:os.mkdir [" + bytes(place.parent / "outside") + b"]\n"
    (place / "recipe.yaml").write_bytes(text)
    return place / "recipe.yaml"


def _run_recipe(path: Path) -> None:
    from huggingface_hub import constants

    with patch.object(constants, "HF_HUB_OFFLINE", True):  # a strange name may be a repository
        main(["from-mergekit", str(path), str(path.with_name("out")), "--quiet", "--workers", "1"])


# --- inputs -------------------------------------------------------------------------------------------------


def _record(draw: random.Random) -> Any:
    message = {"role": "user", "content": "the cat"}
    good: list[dict[str, Any]] = [
        {"text": "the cat", "label": 1},
        {"messages": [message, {**message, "role": "assistant"}]},
        {"prompt": [message], "completion": [message]},
        {"prompt": "the cat", "completion": "sat"},
        {"sentence1": "the cat", "sentence2": "sat"},
        {"image": {"bytes": b"", "path": "x.png"}},
    ]
    return deeply_disturbed(draw, draw.choice(good)) if draw.random() < 0.3 else draw.choice(good)


def _samples(draw: random.Random, place: Path) -> Path:
    from PIL import Image
    from pyarrow import Table, parquet

    suffix = draw.choice((".jsonl", ".txt", ".parquet", ".npz", ".safetensors", ".png", ".csv", ""))
    path, records = place / f"inputs{suffix}", [_record(draw) for _ in range(5)]
    if suffix == ".parquet":
        with suppress(Exception):  # values of different types in a column
            parquet.write_table(Table.from_pylist(records), path)
    elif suffix in (".npz", ".safetensors"):
        shapes: list[Any] = [(4, 6), (4,), (), (0, 3), (1, 2), (2, 2**3)]
        arrays = {draw.choice(("input_ids", "labels", "x", "a/b")): numpy.ones(draw.choice(shapes)) for _ in range(2)}
        if suffix == ".npz":
            odd = {"input_ids": numpy.array([Evil(os.mkdir, str(place.parent / "outside"))] * 3, dtype=object)}
            numpy.savez(path, **(odd if draw.random() < 0.2 else arrays), allow_pickle=True)
        else:
            save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    elif suffix == ".png":
        path = place
        for number in range(3):
            Image.new(draw.choice(("RGB", "L", "P", "RGBA", "CMYK", "I;16", "F")), (8, 6)).save(
                place / f"{number}.tiff", format="TIFF"
            )
            Image.new("RGB", (8, 6)).save(place / f"{number}{draw.choice(('.png', '.jpg', '.gif'))}", format="PNG")
        if draw.random() < 0.3:
            (place / "link.png").symlink_to(draw.choice((place.parent / "canary", Path("/dev/zero"))))
    else:
        lines = [json.dumps(record, default=repr) if suffix == ".jsonl" else str(record) for record in records]
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    if draw.random() < 0.5:
        for file in sorted(path.iterdir()) if path.is_dir() else [path] * path.exists():
            if not file.is_symlink():
                file.write_bytes(scarred(draw, file.read_bytes()))
    return path


def _read_samples(path: Path) -> None:
    from mergestream.inputs.reading import explained

    for sample in read_inputs(path):
        if isinstance(sample.value, dict) and "image" in sample.value:
            with explained(sample.where):
                open_image(sample.value["image"])


# --- tokenizers ---------------------------------------------------------------------------------------------


def _vocabulary(draw: random.Random, place: Path) -> Path:
    """A base and an expert with more tokens, whose tokenizers have faults."""
    for name, words in (("base", WORDS), ("expert", (*WORDS, "dog", "ran"))):
        (place / name).mkdir()
        shapes = {"embed_tokens": (len(words), 4), "lm_head": (len(words), 4), "layers.0.q": (4, 4)}
        generator = torch.Generator().manual_seed(0)
        change = 1 + 0.01 * (name == "expert")
        tensors = {f"{key}.weight": change * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        save_file(tensors, place / name / "model.safetensors")
        ids = {word: number for number, word in enumerate(words)}
        added = [{"id": len(words) - 1, "content": words[-1], "special": True}]
        files: dict[str, Any] = {
            "config.json": {"model_type": "llama", "vocab_size": len(words)},
            "tokenizer.json": {"model": {"type": "WordLevel", "vocab": ids}, "added_tokens": added},
            "tokenizer_config.json": {"added_tokens_decoder": {str(len(words) - 1): {"content": words[-1]}}},
        }
        if draw.random() < 0.4:
            files |= {"vocab.json": ids, "added_tokens.json": {words[-1]: len(words) - 1}}
            del files["tokenizer.json"]
        for file, content in files.items():
            if draw.random() < 0.4:
                content = deeply_disturbed(draw, content)
            data = to_json(draw, content).encode("utf-8", "surrogatepass")
            (place / name / file).write_bytes(scarred(draw, data) if draw.random() < 0.1 else data)
        if draw.random() < 0.2:
            (place / name / "vocab.txt").write_bytes("\n".join(words).encode() + draw.randbytes(draw.randrange(4)))
    (place / "vocab").write_text(draw.choice(("base", "grow")))
    return place


def _merge_vocabularies(place: Path) -> None:
    options: Any = {"engine": LocalEngine(1), "vocab": (place / "vocab").read_text()}
    merge(place / "base", [place / "expert"], place / "out", TaskArithmetic(), progress=NoProgress(), **options)


# --- LoRAs in one file --------------------------------------------------------------------------------------

UNET = {
    "_class_name": "UNet2DConditionModel",
    "block_out_channels": [4, 8],
    "layers_per_block": 1,
    "cross_attention_dim": 8,
}
ATTENTION = "mid_block.attentions.0.transformer_blocks.0.attn1"


@cache
def _unet() -> Path:
    """A base with a few names of a UNet, for the whole run."""
    place = Path(tempfile.mkdtemp(prefix="torture-unet-"))
    (place / "config.json").write_text(json.dumps(UNET))
    save_file(
        {f"{ATTENTION}.{name}.weight": torch.ones(8, 8) for name in ("to_q", "to_k")}, place / "model.safetensors"
    )
    return place


def _lora_file(draw: random.Random, place: Path) -> Path:
    kohya = f"lora_unet_{ATTENTION.replace('.', '_')}"
    down, up = torch.ones(2, 8), torch.ones(8, 2)
    if draw.random() < 0.6:
        tensors = {f"{kohya}_to_q.lora_down.weight": down, f"{kohya}_to_q.lora_up.weight": up}
        tensors[f"{kohya}_to_q.alpha"] = torch.tensor(draw.choice((1.0, 0.0, float("nan"), -1.0, 1e38)))
    else:
        tensors = {f"unet.{ATTENTION}.to_q.lora_A.weight": down, f"unet.{ATTENTION}.to_q.lora_B.weight": up}
    shapes = [(2, 8), (8, 2), (0, 8), (2, 8, 1, 1), (), (3, 8), (2, 2**6)]
    for _ in range(draw.randrange(4)):
        key = draw.choice(list(tensors))
        kind = draw.randrange(4)
        if kind == 0:
            key = key.replace(*draw.choice((("to_q", "to_z"), ("unet", "te2"), ("attn1", "attn10"), ("0", "99"))))
        elif kind == 1:
            key += draw.choice((".lora_mid.weight", ".hada_w1", ".dora_scale", ".x", "", "_", "é"))
        elif kind == 2:
            key = re.sub(r"lora_unet|unet", draw.choice(("", "lora_te1", "transformer", "lora_unet_lora_unet")), key)
        else:
            del tensors[key]
        tensors[key] = torch.ones(draw.choice(shapes), dtype=draw.choice((torch.float32, torch.int64, torch.bfloat16)))
    metadata = {"lora_adapter_metadata": to_json(draw, {"unet.r": nasty(draw), "unet.lora_alpha": nasty(draw)})}
    data = save(tensors, metadata if draw.random() < 0.3 else None)
    (place / "lora.safetensors").write_bytes(scarred(draw, data) if draw.random() < 0.2 else data)
    return place / "lora.safetensors"


def _read_lora_file(path: Path) -> None:
    with open_checkpoint(_unet()) as base, closing(open_expert(path)) as expert:
        model = BaseModel.examine(base, engine=LocalEngine(1))
        vector = make_task_vector(model, base, expert)
        for name in vector.names:
            for _ in vector.pieces(name):
                pass


# --- routed exports -----------------------------------------------------------------------------------------


@cache
def _routed() -> Path:
    """A routed export of two adapters of a tiny Llama, for the whole run."""
    from tests import speaking
    from tests.workshop import Workshop

    place = Path(tempfile.mkdtemp(prefix="torture-routed-"))
    speaking.save(place / "base", speaking.llama(), speaking.tokenizer())
    store, workshop = Store.create(place / "store", place / "base", progress=NoProgress()), Workshop(place)
    for seed, name in enumerate(("cats", "dogs")):
        store.add(workshop.adapter(place / "base", name, seed, target_modules="all-linear"), name, inputs=["a cat"] * 4)
    store.export_routed(place / "out", with_base=True)
    return place / "out"


def _routed_export(draw: random.Random, place: Path) -> Path:
    out = shutil.copytree(_routed(), place / "out")
    path = draw.choice([path for path in sorted(out.rglob("*")) if path.suffix in (".json", ".safetensors")])
    if draw.random() < 0.4:
        path = out / "router.safetensors"
    kind = draw.randrange(5)
    if kind == 4:
        path = draw.choice(sorted((out / "base").iterdir()))
        path.unlink()
        path.symlink_to("/dev/zero") if draw.random() < 0.5 else os.mkfifo(path)
    elif path.suffix == ".json" and kind:
        path.write_text(to_json(draw, deeply_disturbed(draw, json.loads(path.read_text()))), "utf-8", "surrogatepass")
    elif path.name == "router.safetensors" and kind:
        tensors, names = load_file(path), {"expert_0": "cats", "expert_1": "dogs"}
        names[draw.choice(("expert_0", "expert_2", "x"))] = draw.choice(
            ("../../../canary", str(place.parent), "merged", "", "é", "..", "dogs")
        )
        odd = [torch.ones(3), torch.ones(2, 8), torch.full((2,), float("nan")), torch.ones(()), torch.ones(2**10)]
        if draw.random() < 0.7:
            tensors[draw.choice([*tensors, "more"])] = draw.choice(odd)
        save_file(tensors, path, names if draw.random() < 0.8 else None)
    else:
        path.write_bytes(scarred(draw, path.read_bytes()))
    return out


def _read_routed(path: Path) -> None:
    from mergestream import RoutedModel

    routed = RoutedModel.from_pretrained(path)
    routed.route(["the cat", "dog ran"])


SURFACES = {
    "recipe": Surface(_recipe, _run_recipe),
    "samples": Surface(_samples, _read_samples),
    "vocabulary": Surface(_vocabulary, _merge_vocabularies),
    "lora": Surface(_lora_file, _read_lora_file),
    "routed": Surface(_routed_export, _read_routed),
    "bucket": Surface(servers.seeded, servers.read_bucket),
    "hub": Surface(servers.seeded, servers.read_hub),
}
