from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mergestream.base.architecture import find_architecture, load_architecture
from mergestream.base.roles import TensorRole, find_roles, tied_names
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import UsageError

transformers = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "bos_token_id": 0,
}
EXPERTS = 4


def clip() -> Any:
    config = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    return transformers.CLIPVisionModel(config)


def llama(tied: bool = False) -> Any:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def tied_llama() -> Any:
    return llama(tied=True)


def gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    config = transformers.T5Config(d_model=16, d_ff=32, num_layers=2, num_heads=2, d_kv=8, vocab_size=64)
    return transformers.T5ForConditionalGeneration(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))


def mixtral() -> Any:
    config = transformers.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=EXPERTS)
    return transformers.MixtralForCausalLM(config)


MODELS = [clip, llama, tied_llama, gpt2, t5, bert, mixtral]


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def examine(source: Any, **options: Any) -> dict[str, TensorRole]:
    with open_checkpoint(source) as base:
        return find_roles(base, load_architecture(base.directory), **options)


def linear_layers(model: nn.Module) -> int:
    """The linear layers whose weight is no embedding's; a mixture's experts have three each, and a router."""
    from transformers.pytorch_utils import Conv1D

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
    count = sum(id(layer.weight) not in embeddings for layer in layers)
    stacked = [m for m in model.modules() if type(m).__name__ == "MixtralExperts" and not isinstance(m, nn.ModuleList)]
    return count + len(stacked) * (3 * EXPERTS + 1)


@pytest.mark.parametrize("make", MODELS)
def test_linear_weights_are_those_of_the_model_s_linear_layers(make: Any, tmp_path: Path) -> None:
    model = make()
    parts = examine(save(model, tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    assert set(parts) == set(stored)
    linear = [name for name, part in parts.items() if part.role == "linear"]
    assert len(linear) == linear_layers(model)
    assert all(stored[name].ndim == 2 for name in linear)
    assert all(type(model).__name__ in part.rule for part in parts.values())


@pytest.mark.parametrize("make", MODELS)
def test_the_rule_agrees_with_the_architecture(make: Any, tmp_path: Path) -> None:
    directory = save(make(), tmp_path)
    by_architecture = examine(directory)
    (directory / "config.json").unlink()
    by_rule = examine(directory)
    assert {n: p.role for n, p in by_rule.items()} == {n: p.role for n, p in by_architecture.items()}
    assert list(by_rule) == list(by_architecture) == list(open_checkpoint(directory).tensors)


@pytest.mark.parametrize("make", MODELS)
def test_the_rule_decides_and_says_so_without_transformers(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(make(), tmp_path)
    expected = examine(directory)
    monkeypatch.setitem(sys.modules, "transformers", None)
    parts = examine(directory)
    assert {n: p.role for n, p in parts.items()} == {n: p.role for n, p in expected.items()}
    assert all("transformers not installed" in part.rule for part in parts.values())


def test_rules_read_well(tmp_path: Path) -> None:
    parts = examine(save(gpt2(), tmp_path))
    conv1d, embedding = parts["transformer.h.0.attn.c_attn.weight"], parts["transformer.wte.weight"]
    assert conv1d == TensorRole("linear", "Conv1D in GPT2LMHeadModel", module="Conv1D")
    assert embedding == TensorRole("embedding", "torch.nn.Embedding in GPT2LMHeadModel", module="torch.nn.Embedding")
    assert parts["transformer.h.0.ln_1.bias"] == TensorRole("other", "bias of torch.nn.LayerNorm in GPT2LMHeadModel")
    assert examine({"fc.weight": torch.ones(2, 2)}) == {"fc.weight": TensorRole("linear", "2-D *.weight")}


def test_a_config_that_transformers_does_not_know_leaves_it_to_the_rule(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    remote = {"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoModel": "evil--code.Mine"}}
    for config in (
        remote,
        {},
        {"architectures": ["pipeline"]},
        {"architectures": 3},
        {"model_type": "llama", "hidden_size": "x"},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (part,) = examine(tmp_path).values()
        assert part.role == "linear"
        assert part.rule.startswith("2-D *.weight (transformers cannot build the model of config.json: ")


def test_code_beside_the_config_is_never_run(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: ...\n")
    auto_map = {"AutoConfig": "code.Mine", "AutoModel": "code.Mine"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": auto_map}))
    examine(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DetrForObjectDetection", "org/name"])
def test_the_network_is_never_asked(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def getaddrinfo(*address: Any, **_: Any) -> list[Any]:
        asked.append(address)
        return []

    monkeypatch.setattr("socket.socket.connect", lambda _, address: asked.append(address))
    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    save_file({"fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    pretrained = {"use_pretrained_backbone": True, "use_timm_backbone": True, "backbone": "resnet50"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "x"} | pretrained))
    assert examine(tmp_path)["fc.weight"].role == "linear"
    assert asked == []


def test_a_model_class_of_somebody_else_falls_back_to_the_model_type(tmp_path: Path) -> None:
    directory = save(tied_llama(), tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["MyLlamaWithAHead"]}))
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["my_head.weight"] = torch.randn(3, 16)
    save_file(tensors, directory / "model.safetensors")
    parts = examine(directory)
    assert parts["model.layers.0.mlp.up_proj.weight"].rule == "torch.nn.Linear in LlamaModel"
    assert parts["my_head.weight"] == TensorRole("linear", "2-D *.weight (not in LlamaModel)")
    assert parts["lm_head.weight"].tied_to == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("make", "rename"),
    [
        (gpt2, lambda name: name.removeprefix("transformer.")),
        (llama, lambda name: name.removeprefix("model.")),
        (
            bert,
            lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ),
        ),
        (clip, lambda name: f"vision_model.{name.removeprefix('vision_model.')}"),
    ],
)
def test_old_names_and_other_prefixes_are_recognised(make: Any, rename: Any, tmp_path: Path) -> None:
    directory = save(make(), tmp_path)
    expected = {rename(name): part.role for name, part in examine(directory).items()}
    tensors = {rename(name): tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    parts = examine(directory)
    assert {name: part.role for name, part in parts.items()} == expected
    assert not [part for part in parts.values() if "not in" in part.rule]


def test_stacked_experts_are_linear_slice_by_slice(tmp_path: Path) -> None:
    model = mixtral()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stacked = [name for name, tensor in tensors.items() if tensor.ndim == 3]
    if not stacked:
        pytest.skip("this version of transformers keeps the experts apart")
    by_rule = examine(tensors)
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MixtralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    by_architecture = examine(tmp_path)
    for name in stacked:
        assert by_rule[name] == TensorRole("linear", "3-D, stacked experts")
        assert by_architecture[name].role == "linear"
        assert "MixtralExperts in MixtralForCausalLM" in by_architecture[name].rule


def test_convolutions_attention_and_lone_parameters_are_other() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embedding = nn.Conv2d(3, 8, 4)
            self.conv = nn.Conv1d(8, 8, 3)
            self.attention = nn.MultiheadAttention(8, 2)
            self.norm = nn.BatchNorm1d(8)
            self.class_embedding = nn.Parameter(torch.randn(8))
            self.positional_embedding = nn.Parameter(torch.randn(5, 8))
            self.head = nn.Linear(8, 3)

    parts = examine(Net().state_dict())
    roles = Counter(part.role for part in parts.values())
    linear = {name for name, part in parts.items() if part.role == "linear"}
    assert linear == {"attention.out_proj.weight", "head.weight"}
    assert parts["norm.num_batches_tracked"] == TensorRole("copied", "integer tensor")
    assert parts["attention.in_proj_weight"].role == parts["conv.weight"].role == "other"
    assert roles["embedding"] == roles["tied"] == 0


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "bert.embeddings.word_embeddings.weight",
        "wte.weight",
        "h.wpe.weight",
        "shared.weight",
        "clip.token_embedding.weight",
        "x.relative_attention_bias.weight",
        "embed_positions.weight",
        "gpt_neox.embed_in.weight",
        "tok_embeddings.weight",
        "emb.weight",
    ],
)
def test_embeddings_by_name(name: str) -> None:
    assert examine({name: torch.randn(4, 2)})[name].role == "embedding"


@pytest.mark.parametrize(
    "name",
    ["embed_out.weight", "embeddings_project.weight", "patch_embed.proj.weight", "weight", "layers.0.weight"],
)
def test_linear_layers_with_misleading_names(name: str) -> None:
    assert examine({name: torch.randn(4, 2)})[name].role == "linear"


# --- what the user says


def small() -> dict[str, torch.Tensor]:
    return {
        "fc.weight": torch.randn(4, 4),
        "fc.bias": torch.randn(4),
        "raw": torch.randn(4, 4),
        "steps": torch.tensor(3),
        "mask": torch.tensor([True]),
    }


def test_overrides() -> None:
    parts = examine(small(), linear=["r*"], not_linear=["fc.*"], heads=["fc.bias", "only.in.experts"])
    assert parts == {
        "fc.weight": TensorRole("other", "--not-linear fc.*"),
        "fc.bias": TensorRole("head", "--heads fc.bias"),
        "raw": TensorRole("linear", "--linear r*"),
        "steps": TensorRole("copied", "integer tensor"),
        "mask": TensorRole("copied", "boolean tensor"),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear": ["nope.*"]}, r"--linear nope\.\* matches no tensor"),
        ({"not_linear": ["FC.*"]}, r"--not-linear FC\.\* matches no tensor"),
        ({"linear": ["fc.*"]}, r"--linear fc\.\* matches fc\.bias \(F32, shape \[4\]\)"),
        ({"linear": ["steps"]}, r"--linear steps matches steps \(I64, shape \[\]\)"),
        (
            {"linear": ["raw"], "not_linear": ["*"]},
            r"raw is matched by both --linear raw and --not-linear \*",
        ),
    ],
)
def test_mistaken_overrides_are_named(options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        examine(small(), **options)


# --- tied tensors


def test_shared_storage_is_one_tensor_and_the_embedding_has_the_role() -> None:
    table = torch.randn(8, 4)
    parts = examine(
        {"lm_head.weight": table, "embed_tokens.weight": table, "a.weight": table[:4], "b.weight": table[:4]}
    )
    assert parts["embed_tokens.weight"].role == "embedding"
    assert parts["lm_head.weight"] == TensorRole(
        "tied", "shares storage with embed_tokens.weight", "embed_tokens.weight"
    )
    assert parts["a.weight"].role == "linear"
    assert parts["b.weight"] == TensorRole("tied", "shares storage with a.weight", "a.weight")


def test_equal_bytes_tie_only_with_an_embedding() -> None:
    table, matrix = torch.randn(8, 4), torch.randn(4, 4)
    parts = examine(
        {
            "embed_tokens.weight": table,
            "lm_head.weight": table.clone(),
            "other_head.weight": table + 1,
            "layers.0.weight": matrix,
            "layers.1.weight": matrix.clone(),
            "norm.weight": torch.ones(4),
            "norm2.weight": torch.ones(4),
            "zero_embed.weight": torch.zeros(5, 4),
            "zero_embedding.weight": torch.zeros(5, 4),
            "half_embed.weight": table.half(),
        }
    )
    tied = {name: part.tied_to for name, part in parts.items() if part.role == "tied"}
    assert tied == {"lm_head.weight": "embed_tokens.weight"}
    assert parts["lm_head.weight"].rule == "same bytes as embed_tokens.weight"


@pytest.mark.parametrize("stored_as", ["safetensors", "bin"])
def test_t5_with_every_name_stored_is_tied_by_the_architecture(stored_as: str, tmp_path: Path) -> None:
    model = t5()
    save(model, tmp_path)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if stored_as == "safetensors":
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    parts = examine(tmp_path)
    group = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    (canonical,) = [name for name in group if parts[name].role == "embedding"]
    assert canonical != "lm_head.weight"
    assert {parts[name].tied_to for name in group - {canonical}} == {canonical}
    assert {name for name, part in parts.items() if part.role == "tied"} == group - {canonical}


def test_what_the_config_ties_but_the_file_does_not_is_independent(tmp_path: Path) -> None:
    directory = save(tied_llama(), tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, directory / "model.safetensors")
    with open_checkpoint(directory) as base:
        parts = find_roles(base, architecture := load_architecture(base.directory))
        assert tied_names(architecture, parts) == {}
    assert (parts["lm_head.weight"].role, parts["model.embed_tokens.weight"].role) == ("linear", "embedding")
    assert "ties it, but the stored values differ" in parts["lm_head.weight"].rule


def test_an_untied_head_leaves_the_embeddings_tied(tmp_path: Path) -> None:
    directory = save(t5(), tmp_path)  # stored as Flan-T5 is: a head of its own, one embedding for both halves
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, directory / "model.safetensors")
    with open_checkpoint(directory) as base:
        parts = find_roles(base, architecture := load_architecture(base.directory))
        names = tied_names(architecture, parts)
    assert parts["lm_head.weight"].role == "linear"
    assert names == dict.fromkeys(["decoder.embed_tokens.weight", "encoder.embed_tokens.weight"], "shared.weight")


def test_integers_are_copied_even_if_they_share_storage() -> None:
    ids = torch.arange(4)
    assert {part.role for part in examine({"a.position_ids": ids, "b.position_ids": ids}).values()} == {"copied"}


def test_equal_bytes_are_no_tie_if_the_architecture_has_none(tmp_path: Path) -> None:
    model = llama()
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    assert examine(save(model, tmp_path))["lm_head.weight"].role == "linear"


def test_a_head_stored_in_place_of_its_embedding_counts_as_the_embedding(tmp_path: Path) -> None:
    directory = save(tied_llama(), tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, directory / "model.safetensors")
    with open_checkpoint(directory) as base:
        parts = find_roles(base, architecture := load_architecture(base.directory))
        assert parts["lm_head.weight"].role == "embedding"
        assert tied_names(architecture, parts)["model.embed_tokens.weight"] == "lm_head.weight"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (tied_llama, {"lm_head.weight": "model.embed_tokens.weight"}),
        (gpt2, {"lm_head.weight": "transformer.wte.weight"}),
        (
            t5,
            dict.fromkeys(
                ["lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
                "shared.weight",
            ),
        ),
        (bert, {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}),
        (llama, {}),
        (clip, {}),
    ],
)
@pytest.mark.parametrize("installed", [True, False])
def test_names_that_only_an_expert_may_store(
    make: Any, expected: Any, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(make(), tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": bool(expected)}))
    if not installed:
        monkeypatch.setitem(sys.modules, "transformers", None)
    with open_checkpoint(directory) as base:
        architecture = find_architecture(base)
        names = tied_names(architecture, find_roles(base, architecture))
    assert expected.items() <= names.items()
    assert bool(names) == bool(expected)


def test_overrides_and_heads_hold_for_a_tied_tensor_as_a_whole() -> None:
    table = torch.randn(8, 4)
    tensors = {"embed_tokens.weight": table, "lm_head.weight": table}
    parts = examine(tensors, linear=["lm_head*"])
    assert parts["embed_tokens.weight"] == TensorRole("linear", "--linear lm_head*")
    assert parts["lm_head.weight"].tied_to == "embed_tokens.weight"
    assert {part.role for part in examine(tensors, heads=["*.weight"]).values()} == {"head"}
    with pytest.raises(UsageError, match=r"lm_head\.weight is matched by --heads lm_head\*, but they are tied"):
        examine(tensors, heads=["lm_head*"])
    with pytest.raises(UsageError, match="but they are tied"):
        examine(tensors, linear=["lm_head*"], not_linear=["embed*"])


def test_a_large_model_is_examined_at_once(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"])  # the shape of the 7B model
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    # Expanded zeros: the real shapes without the memory.
    tensors = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in model.state_dict().items()}
    base = open_checkpoint(tensors)
    base.directory = tmp_path
    start = time.process_time()
    parts = find_roles(base, load_architecture(base.directory))
    assert time.process_time() - start < 2
    assert Counter(part.role for part in parts.values())["linear"] == 7 * 32 + 1
    assert all("LlamaForCausalLM" in part.rule for part in parts.values())


def test_importing_roles_imports_neither_torch_nor_transformers() -> None:
    import subprocess

    code = "import sys, mergestream.base.roles; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
