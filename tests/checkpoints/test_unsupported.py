"""What people have that is no checkpoint we read: the sentence says what it is, and what to type or to run."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergestream import Store
from mergestream.base.model import open_base
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError
from mergestream.experts import open_expert


def refused(source: Path) -> str:
    """The sentence, which is the same for a base and for an expert."""
    sentences = []
    for opening in (open_checkpoint, open_expert, lambda source: open_base(source, config_only=False)):
        with pytest.raises(MergestreamError) as error:
            opening(source)
        sentences.append(str(error.value))
    assert len(set(sentences)) == 1 and "\n" not in sentences[0]
    assert str(source) in sentences[0] or f"{source.parent} holds {source.name}" in sentences[0]
    return sentences[0]


def put(directory: Path, *names: str, content: bytes = b"") -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


# --- what training leaves behind -----------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The output of a Trainer, its model config included, that was not saved at the end."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for step in (500, 1000, 1500):
        directory = tmp_path / f"checkpoint-{step}"
        directory.mkdir()
        save_file({"w": torch.full((2, 2), step / 1e6)}, directory / "model.safetensors")
        put(directory, "optimizer.pt", "rng_state.pth", "training_args.bin")
    return tmp_path


def test_of_a_trainers_checkpoints_the_last_is_named(trained: Path) -> None:
    sentence = refused(trained)
    assert "checkpoint-500, checkpoint-1000, checkpoint-1500" in sentence
    assert f"give one of them, such as {trained}/checkpoint-1500" in sentence
    assert open_checkpoint(trained / "checkpoint-1500").read("w").sum().item() == pytest.approx(0.006)


def test_a_trainers_model_that_was_saved_at_the_end_is_taken(trained: Path) -> None:
    save_file({"w": torch.ones(2, 2)}, trained / "model.safetensors")
    assert open_checkpoint(trained).read("w").sum() == 4


def test_a_checkpoint_that_was_named_is_an_expert(tmp_path: Path, trained: Path) -> None:
    save_file({"w": torch.full((2, 2), 1e-3)}, tmp_path / "base.safetensors")
    store = Store.create(tmp_path / "store", base=tmp_path / "base.safetensors")
    assert store.add(trained / "checkpoint-1500").name == "checkpoint-1500"


def test_deepspeeds_conversion_is_named(tmp_path: Path) -> None:
    put(tmp_path, "latest", "config.json", content=b"{}")
    put(tmp_path / "global_step7", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt")
    for directory in (tmp_path, tmp_path / "global_step7"):
        assert "`python -m deepspeed.utils.zero_to_fp32 DIR OUT --safe_serialization`" in refused(directory)


def test_a_lightning_checkpoint_is_read_and_its_optimizer_is_not(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {
        "epoch": 1,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {f"model.{name}": tensor for name, tensor in module.state_dict().items()},
        "optimizer_states": [optimizer.state_dict()],
        "hyper_parameters": {"lr": 0.1},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": None}},
    }
    torch.save(content, tmp_path / "last.ckpt")
    with open_checkpoint(tmp_path / "last.ckpt") as checkpoint:
        assert set(checkpoint.tensors) == {"model.weight", "model.bias"}
        assert torch.equal(checkpoint.read("model.weight"), module.weight)
    assert "holds last.ckpt; name the file you mean" in refused(tmp_path)


def test_an_optimizer_is_no_model(tmp_path: Path) -> None:
    torch.save(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).state_dict(), tmp_path / "optimizer.pt")
    put(tmp_path, "scheduler.pt", "rng_state.pth")
    assert "holds the state of an optimizer, not a model" in refused(tmp_path / "optimizer.pt")
    assert "the state to resume a training run from (optimizer.pt, rng_state.pth, scheduler.pt)" in refused(tmp_path)


def test_distributed_checkpoints_below_are_named(tmp_path: Path) -> None:
    put(tmp_path / "model", ".metadata")
    put(tmp_path / "optim", ".metadata")
    assert f"in its folders only: model; give one of them, such as {tmp_path}/model" in refused(tmp_path)


# --- what belongs together -----------------------------------------------------------------------------------


def test_the_models_of_a_pipeline_are_named(tmp_path: Path) -> None:
    put(tmp_path, "model_index.json", content=b"{}")
    assert "none of them has weights here" in refused(tmp_path)
    put(
        tmp_path, "unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.bin", "scheduler/config.json"
    )
    put(tmp_path, "text_encoder/model.safetensors")
    sentence = refused(tmp_path)
    assert (
        f"in its folders only: vae, unet, text_encoder; give one of them, such as {tmp_path}/text_encoder" in sentence
    )


def test_the_first_module_of_an_old_sentence_transformer_is_named(tmp_path: Path) -> None:
    put(tmp_path, "modules.json", "0_Transformer/model.safetensors", "1_Pooling/config.json")
    assert f"such as {tmp_path}/0_Transformer" in refused(tmp_path)


# --- other formats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.onnx", "a file of another framework: give the PyTorch model"),
        ("tf_model.h5", "a file of another framework"),
        ("model.ckpt.data-00000-of-00001", "a file of another framework"),
        ("flax_model.msgpack", "a file of another framework"),
        ("weights.npz", "a file of another framework: .* write its tensors as safetensors"),
        ("model.pkl", "a pickle, which was not executed"),
        ("model.tar.gz", "an archive: unpack"),
    ],
)
def test_other_formats_are_called_by_their_name(tmp_path: Path, name: str, said: str) -> None:
    put(tmp_path, name, "config.json", content=b"{}")
    assert (
        re.search(said, refused(tmp_path / name)) and re.search(said, refused(tmp_path)) and name in refused(tmp_path)
    )


def test_the_numpy_command_of_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    page = (Path(__file__).parents[2] / "docs" / "reference" / "inputs.md").read_text("utf-8")
    numpy.savez(tmp_path / "IN.npz", a=numpy.ones(3))
    monkeypatch.chdir(tmp_path)
    exec(page.partition("numpy or MLX")[2].partition('python -c "')[2].partition('"`')[0])
    assert open_checkpoint(tmp_path / "OUT.safetensors").read("a").sum() == 3


@pytest.mark.parametrize(
    ("fill", "said"),
    [
        (lambda directory: None, "holds no checkpoint"),
        (lambda directory: put(directory, "tokenizer.json", "tokenizer_config.json"), "holds no checkpoint"),
        (lambda directory: put(directory, "notes.md"), "holds no checkpoint"),
    ],
)
def test_a_directory_without_a_model_is_told(tmp_path: Path, fill: Callable[[Path], object], said: str) -> None:
    fill(tmp_path)
    assert said in refused(tmp_path)
