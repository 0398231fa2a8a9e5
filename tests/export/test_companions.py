"""What goes out with the weights: the libraries load what we write of their models, and nothing is published that does
not belong to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file

from mergestream import Average, MergestreamError, Store, merge
from tests.conftest import save_model, toy_base, toy_expert

Model = TypeVar("Model", bound=torch.nn.Module)
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def moved(model: Model, seed: int) -> Model:
    """A little away from where it is."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def front(directory: Path) -> list[str]:
    return (directory / "README.md").read_text().split("---")[1].strip().splitlines()


# --- diffusers -----------------------------------------------------------------------------------------------


def tiny_unet() -> Any:
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    return UNet2DModel(  # type: ignore[no-untyped-call]
        sample_size=8,
        block_out_channels=(8, 8),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        add_attention=False,
    )


def tiny_vae() -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(  # type: ignore[no-untyped-call]
        block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8
    )


@pytest.mark.parametrize("make", [tiny_unet, tiny_vae])
def test_a_component_of_a_pipeline_is_merged_and_diffusers_loads_it(make: Any, tmp_path: Path) -> None:
    base = make()
    base.save_pretrained(tmp_path / "base")
    moved(base, 1).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    expert = moved(base, 2)
    expert.save_pretrained(tmp_path / "variant", variant="fp16")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    merge(
        tmp_path / "base",
        [tmp_path / "variant", tmp_path / "variant"],
        tmp_path / "out",
        Average(),
        allow_duplicate=True,
    )
    out = type(base).from_pretrained(tmp_path / "out")
    for name, tensor in expert.state_dict().items():
        torch.testing.assert_close(out.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors").is_file()
    assert front(tmp_path / "out")[0] == "library_name: diffusers"
    store = Store.create(tmp_path / "store", base=tmp_path / "sharded")
    store.add(tmp_path / "variant")
    store.export(tmp_path / "shards", max_shard_size=20_000)
    assert (tmp_path / "shards" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    type(base).from_pretrained(tmp_path / "shards")


def test_the_plain_weights_of_a_component_come_before_its_variants(tmp_path: Path) -> None:
    from mergestream.checkpoints import open_checkpoint

    base = tiny_unet()
    base.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    assert set(open_checkpoint(tmp_path).tensors) == set(base.state_dict()), "a variant alone, in shards"
    moved(base, 1).save_pretrained(tmp_path)
    found = open_checkpoint(tmp_path)
    assert torch.equal(found.read("conv_in.weight"), base.conv_in.weight)


# --- sentence-transformers -----------------------------------------------------------------------------------


@pytest.fixture
def sentences(tmp_path: Path) -> Any:
    """A tiny sentence-transformers model: a transformer, a pooling and a dense layer."""
    from sentence_transformers import SentenceTransformer, models  # type: ignore[attr-defined]
    from transformers import BertConfig, BertModel, BertTokenizerFast  # type: ignore[attr-defined]

    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "sentence", "of", "words"]
    inner = tmp_path / "inner"
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=16, **SIZES)).save_pretrained(inner)
    (inner / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(inner / "vocab.txt")).save_pretrained(inner)
    transformer = models.Transformer(str(inner), max_seq_length=16)
    dense = models.Dense(in_features=16, out_features=4)
    return SentenceTransformer(modules=[transformer, models.Pooling(16), dense], device="cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_sentence_transformer_comes_with_its_modules(sentences: Any, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    sentences.save_pretrained(str(tmp_path / "base"))
    moved(sentences[0], 1)
    sentences.save_pretrained(str(tmp_path / "expert"))
    (tmp_path / "base" / "2024_notes").mkdir()
    (tmp_path / "base" / "2024_notes" / "private.json").write_text("{}")
    merge(tmp_path / "base", [tmp_path / "expert"], tmp_path / "out", Average())
    merged = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    text = "a sentence of words"
    assert merged.encode(text).shape == (4,)
    torch.testing.assert_close(
        torch.tensor(merged.encode(text)), torch.tensor(sentences.encode(text)), rtol=1e-4, atol=1e-5
    )
    (dense,) = (path.name for path in (tmp_path / "base").glob("2_*"))
    weights = load_file(tmp_path / "out" / dense / "model.safetensors")
    assert all(
        torch.equal(tensor, weights[name])
        for name, tensor in load_file(tmp_path / "base" / dense / "model.safetensors").items()
    )
    assert not (tmp_path / "out" / "2024_notes").exists(), "only what modules.json names is published"
    assert front(tmp_path / "out")[0] == "library_name: sentence-transformers"


@pytest.mark.parametrize("folder", ["..", "../elsewhere", "/etc", "a/b", ".hidden"])
def test_modules_are_folders_beside_the_model(folder: str, tmp_path: Path) -> None:
    save_model(tmp_path / "base", toy_base())
    modules = [{"idx": 0, "name": "0", "path": folder, "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "base" / "modules.json").write_text(json.dumps(modules))
    save_model(tmp_path / "expert", toy_expert(1))
    with pytest.raises(MergestreamError, match=r"modules\.json names the folder .*, which is not beside it"):
        merge(tmp_path / "base", [tmp_path / "expert"], tmp_path / "out", Average())
    assert not (tmp_path / "out").exists()


# --- code, tokenizers, templates -------------------------------------------------------------------------------

CODE = {
    "configuration_tiny.py": """
from transformers import PretrainedConfig

class TinyConfig(PretrainedConfig):
    model_type = "tiny-of-ours"
""",
    "modeling_tiny.py": """
import torch
from transformers import PreTrainedModel
from .configuration_tiny import TinyConfig

class TinyModel(PreTrainedModel):
    config_class = TinyConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(4, 3)
        self.post_init()
""",
}


def test_custom_code_of_a_model_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModel

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = {
        "model_type": "tiny-of-ours",
        "architectures": ["TinyModel"],
        "auto_map": {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyModel"},
    }
    base, expert = tmp_path / "base", tmp_path / "expert"
    layer = torch.nn.Linear(4, 3)
    for seed, directory in enumerate((base, expert)):
        layer = moved(layer, seed)
        save_model(directory, {f"layer.{name}": value for name, value in layer.state_dict().items()})
    (base / "config.json").write_text(json.dumps(config))
    for name, text in CODE.items():
        (base / name).write_text(text)
    (base / "kernels").mkdir()
    (base / "kernels" / "fast.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')")
    merge(base, [expert], tmp_path / "out", Average())
    assert (tmp_path / "out" / "kernels" / "fast.py").is_file() and not (tmp_path / "proof").exists()
    out = AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)
    torch.testing.assert_close(out.layer.weight, load_file(expert / "model.safetensors")["layer.weight"])
    del config["auto_map"]
    (base / "config.json").write_text(json.dumps(config))
    merge(base, [expert], tmp_path / "plain", Average())
    assert not list((tmp_path / "plain").rglob("*.py")), "a script that no config asks for is not published"


def test_code_is_not_taken_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret.py").write_text("password = 1")
    base, expert = save_model(tmp_path / "base", toy_base()), save_model(tmp_path / "expert", toy_expert(1))
    (base / "config.json").write_text('{"auto_map": {"AutoModel": "modeling.Model"}}')
    (base / "modeling.py").symlink_to(tmp_path / "secret.py")
    with pytest.raises(MergestreamError, match=r"modeling\.py is a link that leads out of the model's directory"):
        merge(base, [expert], tmp_path / "out", Average())


def test_tokenizers_templates_and_settings_are_copied(tmp_path: Path) -> None:
    base, expert = save_model(tmp_path / "base", toy_base()), save_model(tmp_path / "expert", toy_expert(1))
    wanted = [
        *("source.spm", "spiece.model", "sentencepiece.bpe.model", "bpe.codes", "chat_template.jinja"),
        *("additional_chat_templates/tools.jinja", "generation_config.json", "preprocessor_config.json"),
        *("processor_config.json", "video_preprocessor_config.json", "vocab.txt", "qwen.tiktoken"),
    ]
    for name in (*wanted, "notes/private.json", "train.log", ".env.json/key.json", "optimizer.pt"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("{}")
    merge(base, [expert], tmp_path / "out", Average())
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {*wanted, "model.safetensors", "README.md", "mergestream.json"}
