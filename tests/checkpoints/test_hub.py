"""Hub ids, against a server on this machine.

Every download runs in a process of its own, since huggingface_hub reads its endpoint and its cache's place
when it is imported.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.hub_server import COMMIT, OTHER, Files, environment, serve


def torch_bytes(tensors: dict[str, torch.Tensor], directory: Path) -> bytes:
    torch.save(tensors, directory / "t.bin")
    return (directory / "t.bin").read_bytes()


class Hub:
    """What the server of these tests has."""

    def __init__(self, scratch: Path) -> None:
        weights = {"a": torch.ones(2)}
        shards = {f"model-0000{i}-of-00002.safetensors": save({f"w{i}": torch.ones(i)}) for i in (1, 2)}
        index = {"weight_map": {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}}
        plain = {
            "config.json": b"{}",
            "tokenizer.json": b"{}",
            "source.spm": b"pieces",
            "evil.py": b"raise SystemExit",
            "logo.png": b"png",
        }
        self.repositories: dict[str, dict[str, Files]] = {
            "org/both": {
                COMMIT: {
                    **plain,
                    "model.safetensors": save(weights),
                    "pytorch_model.bin": b"never wanted",
                    "tf_model.h5.index.json": b"never wanted",
                    "onnx/model.safetensors": b"never wanted",
                },
                OTHER: {"model.safetensors": save({"a": torch.ones(5)})},
            },
            "org/sharded": {
                COMMIT: {
                    **plain,
                    **shards,
                    "model.safetensors.index.json": json.dumps(index).encode(),
                    "consolidated.safetensors": b"never wanted",
                }
            },
            "org/torch": {COMMIT: {**plain, "pytorch_model.bin": torch_bytes(weights, scratch)}},
            "org/gated": {COMMIT: {"model.safetensors": save(weights)}},
            "org/empty": {COMMIT: plain},
            "org/along": {
                COMMIT: {
                    "model.safetensors": save(weights),
                    "config.json": b'{"auto_map": {"AutoModel": "modeling.Model"}}',
                    "modeling.py": b"",
                    "kernels/fast.py": b"",
                    "README.md": b"---\nlibrary_name: timm\n---\n",
                    "modules.json": b'[{"path": "", "type": "x.Y"}, {"path": "1_Dense", "type": "x.Z"}]',
                    "1_Dense/config.json": b"{}",
                    "1_Dense/model.safetensors": save(weights),
                    "onnx/model.onnx": b"",
                    "data/1.json": b"{}",
                }
            },
            "org/pipeline": {COMMIT: {"model_index.json": b"{}", "unet/diffusion_pytorch_model.safetensors": b""}},
            "org/upwards": {COMMIT: {"model.safetensors": save(weights), "1_Dense/../../../up.json": b"{}"}},
            "org/evil": {
                COMMIT: {
                    "model.safetensors.index.json": b'{"weight_map": {"a": "../../x.safetensors"}}',
                    "model.safetensors": b"",
                }
            },
        }
        self.endpoint = ""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    hub = Hub(tmp_path_factory.mktemp("scratch"))
    with serve(hub.repositories, gated=("org/gated",)) as hub.endpoint:
        yield hub


PROGRAM = """
import json, sys
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError
for source in sys.argv[1:]:
    try:
        checkpoint = open_checkpoint(source)
    except MergestreamError as error:
        print(json.dumps({"error": str(error)}))
    else:
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        files = sorted(path.name for path in checkpoint.directory.iterdir())
        print(json.dumps({"source": checkpoint.source, "shapes": shapes, "files": files}))
"""


def run(
    sources: list[str], endpoint: str, home: Path, program: str = PROGRAM, **variables: str
) -> list[dict[str, Any]]:
    """What opening each of the sources gives, in a process that knows the hub by ``endpoint``."""
    result = subprocess.run(
        [sys.executable, "-c", program, *sources],
        env=environment(endpoint, home) | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def unused_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_what_is_needed_is_fetched_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    both, sharded, pickled = run(["org/both", "org/sharded", "org/torch"], hub.endpoint, tmp_path)
    assert both["source"] == f"org/both@{COMMIT}" and both["shapes"] == {"a": [2]}
    assert both["files"] == ["config.json", "model.safetensors", "source.spm", "tokenizer.json"]
    assert sharded["shapes"] == {"w1": [1], "w2": [2]} and "consolidated.safetensors" not in sharded["files"]
    assert "model.safetensors.index.json" in sharded["files"]
    assert pickled["shapes"] == {"a": [2]} and "pytorch_model.bin" in pickled["files"]


def test_what_goes_along_is_fetched_too(hub: Hub, tmp_path: Path) -> None:
    (answer,) = run(["org/along"], hub.endpoint, tmp_path, PROGRAM.replace(".iterdir()", ".rglob('*.*')"))
    along = ["README.md", "config.json", "config.json", "fast.py", "model.safetensors", "model.safetensors"]
    assert answer["files"] == [*along, "modeling.py", "modules.json"]


def test_a_model_may_be_named_with_its_scheme(hub: Hub, tmp_path: Path) -> None:
    sources = ["hf://org/both", "org/both", "hf://org/both@other", "hf://org/both/config.json"]
    url, plain, other, file = run(sources, hub.endpoint, tmp_path)
    assert url == plain and url["source"] == f"org/both@{COMMIT}"
    assert other["source"] == f"org/both@{OTHER}" and other["shapes"] == {"a": [5]}
    assert "is not a model on the hub: give hf://org/name" in file["error"]
    assert run(["hf://org/both"], unused_endpoint(), tmp_path) == [plain]


def test_a_revision_is_a_branch_or_a_commit(hub: Hub, tmp_path: Path) -> None:
    for answer in run(["org/both@other", f"org/both@{OTHER}"], hub.endpoint, tmp_path):
        assert answer["source"] == f"org/both@{OTHER}" and answer["shapes"] == {"a": [5]}


def test_what_was_fetched_once_is_there_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    (online,) = run(["org/sharded"], hub.endpoint, tmp_path)
    sources = ["org/sharded", online["source"]]
    assert run(sources, unused_endpoint(), tmp_path) == [online, online]
    assert run(sources, unused_endpoint(), tmp_path, HF_HUB_OFFLINE="1") == [online, online]


def test_what_cannot_be_had_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    sentences = {
        "org/absent": "no local path, and the hub does not show it",
        "org/a--b": "no local path, and the hub does not show it",
        "org/both@absent": "the hub knows org/both, but not the revision absent",
        "org/gated": "gated: accept its terms",
        "org/empty": "holds no checkpoint",
        "org/pipeline": "`hf download ORG/NAME --local-dir DIR` and give one of them, such as DIR/unet",
        "org/evil": "'../../x.safetensors', which is no weight file beside it",
        "org/name/more": "does not exist",
        "./org/both": "does not exist",
        "org/model.safetensors": "does not exist",
    }
    answers = run(list(sentences), hub.endpoint, tmp_path)
    for sentence, answer in zip(sentences.values(), answers, strict=True):
        assert sentence in answer["error"] and "\n" not in answer["error"]


def test_an_unreachable_hub_is_one_sentence(tmp_path: Path) -> None:
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        (answer,) = run(["org/both"], unused_endpoint(), tmp_path, **variables)
        assert "org/both is no local path" in answer["error"] and "cannot be downloaded" in answer["error"]
        assert "\n" not in answer["error"]


def test_a_missing_package_is_one_sentence(tmp_path: Path) -> None:
    program = "import sys; sys.modules['huggingface_hub'] = None\n" + PROGRAM
    (answer,) = run(["org/both"], unused_endpoint(), tmp_path, program)
    assert "pip install 'mergestream[hub]'" in answer["error"]
