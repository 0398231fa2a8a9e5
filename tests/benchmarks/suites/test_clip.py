"""The clip suite end to end: a tiny CLIP, two experts and two data sets, served as the hub serves them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.paper import paper_results
from benchmarks.suites.clip_suite import TASKS, preprocess
from mergestream.errors import UsageError
from mergestream.evaluation.suites import open_suite
from tests.hub_server import COMMIT, Files, environment, serve

CLASSES = ("red", "green", "dark_blue")
COLOURS = ((250, 20, 20), (20, 250, 20), (10, 10, 120))


def folder(directory: Path) -> Files:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def tokenizer() -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = "<|startoftext|> <|endoftext|> a picture photo of the close up low resolution red green dark blue . -"
    vocabulary = {word: index for index, word in enumerate(words.split())}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = [(word, vocabulary[word]) for word in ("<|startoftext|>", "<|endoftext|>")]
    made.post_processor = processors.TemplateProcessing("<|startoftext|> $A <|endoftext|>", special_tokens=specials)
    return made.to_str().encode()


def models(scratch: Path) -> dict[str, Files]:
    """A whole CLIP as the base; experts are vision towers alone, as the paper's are on the hub."""
    from transformers import CLIPConfig, CLIPModel, CLIPVisionModel

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**small, "vocab_size": 20, "max_position_embeddings": 77, "eos_token_id": 1, "bos_token_id": 0},
        vision_config={**small, "image_size": 32, "patch_size": 16},
        projection_dim=8,
    )
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(scratch / "base")
    base = folder(scratch / "base") | {"tokenizer.json": tokenizer(), "README.md": b"hello", "code.py": b"raise"}
    found = {"openai/clip-vit-base-patch32": base}
    for key in ("sun397", "stanford-cars"):
        tower = CLIPVisionModel.from_pretrained(scratch / "base")
        with torch.no_grad():
            for parameter in tower.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        tower.save_pretrained(scratch / key)
        found[f"tanganke/clip-vit-base-patch32_{key}"] = folder(scratch / key)
    return found


def data_set(seed: int) -> Files:
    """Parquet in the hub's layout: images as bytes and path, labels with their names in the schema's metadata."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    rows = []
    for label in torch.randint(3, (24,), generator=generator).tolist():
        stream = io.BytesIO()
        Image.new("RGB", (40, 30 + label), COLOURS[label]).save(stream, "PNG")
        rows.append({"image": {"bytes": stream.getvalue(), "path": "x.png"}, "label": label})
    features = {"image": {"_type": "Image"}, "label": {"names": list(CLASSES), "_type": "ClassLabel"}}
    table = pyarrow.Table.from_pylist(rows)
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    output = io.BytesIO()
    pyarrow.parquet.write_table(table, output)
    return {"default/test/0000.parquet": output.getvalue(), "default/train/0000.parquet": b"never wanted"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    repositories = models(tmp_path)
    repositories |= {"datasets/tanganke/sun397": data_set(1), "datasets/tanganke/stanford_cars": data_set(2)}
    with serve({name: {COMMIT: files} for name, files in repositories.items()}) as endpoint:
        yield endpoint


def bench(endpoint: str, home: Path, output: Path, tasks: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mergestream", "bench", "clip", "--tasks", str(tasks), "-o", str(output)]
    command += ["--methods", "opcm,average", "--orders", "1", "--workers", "1"]
    return subprocess.run(command, env=environment(endpoint, home), capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_papers_suite_runs_from_a_hub(hub: str, tmp_path: Path) -> None:
    done = bench(hub, tmp_path / "home", tmp_path / "out", 2)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["model"] == "ViT-B/32" and results["tasks"] == ["SUN397", "Cars"]
    assert all(0 <= value <= 1 for value in results["pretrained"].values())
    assert {run["method"] for run in results["runs"]} == {"opcm", "average"}
    assert "never wanted" not in str(list((tmp_path / "home").rglob("*")))
    assert not list((tmp_path / "home").rglob("*.py")) and not list((tmp_path / "home").rglob("train"))
    # the score is that of a plain computation with the whole model
    assert results["pretrained"]["SUN397"] == pytest.approx(zero_shot(tmp_path / "base", data_set(1)))

    missing = bench(hub, tmp_path / "home", tmp_path / "more", 3)
    assert missing.returncode == 1
    assert missing.stderr.strip().splitlines()[-1].startswith("error: tanganke/clip-vit-base-patch32_resisc45")


def zero_shot(base: Path, files: Files) -> float:
    import pyarrow.parquet
    from tokenizers import Tokenizer
    from transformers import CLIPModel

    from benchmarks.suites.clip_suite import PHOTO

    model, words = CLIPModel.from_pretrained(base), Tokenizer.from_str(tokenizer().decode())
    model.eval()
    rows = pyarrow.parquet.read_table(io.BytesIO(files["default/test/0000.parquet"])).to_pylist()
    right = 0
    with torch.no_grad():
        classes = []
        for name in ("red", "green", "dark blue"):
            ids = [words.encode(prompt.format(name)).ids for prompt in PHOTO]
            embeds = [model.text_projection(model.text_model(torch.tensor([each])).pooler_output) for each in ids]
            classes.append(torch.nn.functional.normalize(torch.cat(embeds), dim=1).mean(0))
        heads = torch.nn.functional.normalize(torch.stack(classes), dim=1)
        for row in rows:
            pixels = preprocess(row["image"]["bytes"], 32)[None]
            image = model.visual_projection(model.vision_model(pixels).pooler_output)
            right += int((image @ heads.T).argmax()) == row["label"]
    return right / len(rows)


def test_the_task_groups_are_the_papers() -> None:
    groups = paper_results()["task_groups"]
    for count in (8, 14, 20):
        assert list(open_suite("clip", tasks=count).tasks) == groups[str(count)]
    assert len(TASKS) == 20
    with pytest.raises(UsageError):
        open_suite("clip", tasks=21)


def test_images_are_prepared_as_clip_does() -> None:
    from PIL import Image

    picture = Image.new("RGB", (60, 30), (255, 0, 0))
    picture.paste((0, 0, 255), (0, 0, 10, 30))  # cut off by the crop to the middle
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    pixels = preprocess(stream.getvalue(), 30)
    assert pixels.shape == (3, 30, 30)
    assert torch.allclose(pixels[0], torch.full((30, 30), (1 - 0.48145466) / 0.26862954), atol=1e-5)
