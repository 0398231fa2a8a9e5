"""Real architectures go in as checkpoints and come out as models that transformers loads."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mergestream.base.architecture import load_architecture
from mergestream.base.model import open_base
from mergestream.errors import MergestreamError
from tests.conftest import RunCommand

transformers = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TEXT_INPUT = {"input_ids": torch.tensor([[3, 7, 5]])}
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def clip() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=16))


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=1))


def tied_llama() -> Any:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=1, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    config = transformers.T5Config(d_model=16, d_ff=24, num_layers=2, num_heads=2, d_kv=8, vocab_size=40)
    return transformers.T5ForConditionalGeneration(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))


def mixtral() -> Any:
    config = transformers.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=3)
    return transformers.MixtralForCausalLM(config)


ARCHITECTURES = [clip, llama, tied_llama, gpt2, t5, bert, mixtral]
NOT_LINEAR = ("embed", "wte", "wpe", "shared", "norm", "ln_", "relative_attention_bias")
"""Parts of the names of matrices (and of tensors tied to them) that are not the weight of a linear layer."""


def make_models(architecture: Callable[[], Any], dtype: torch.dtype, experts: int) -> list[Any]:
    """A base with random weights and perturbed copies of it."""
    torch.manual_seed(0)
    base = architecture().to(dtype)
    models = [base]
    for _ in range(experts):
        expert = architecture().to(dtype)
        expert.load_state_dict(base.state_dict())
        with torch.no_grad():
            for parameter in expert.parameters():  # tied ones once
                parameter.add_((torch.randn(parameter.shape) * 0.01).to(dtype))
        models.append(expert)
    return models


def save_all(models: Sequence[Any], place: Path, save: Callable[[Any, Path], None]) -> list[Path]:
    directories = []
    for number, model in enumerate(models):
        directory = place / (f"expert-{number}" if number else "base")
        save(model, directory)
        directories.append(directory)
    (directories[0] / "tokenizer_config.json").write_text('{"model_max_length": 32}\n')
    (directories[0] / "vocab.txt").write_text("a\nb\n")
    return directories


def save_sharded(model: Any, directory: Path) -> None:
    model.save_pretrained(directory, max_shard_size="8KB")


def save_bin(model: Any, directory: Path) -> None:
    """As older versions of transformers did."""
    directory.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    torch.save(model.state_dict(), directory / "pytorch_model.bin")


def save_bin_shards(model: Any, directory: Path) -> None:
    save_bin(model, directory)
    (directory / "pytorch_model.bin").unlink()
    tensors = model.state_dict()
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensors[name].clone() for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load_weights(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    for file in sorted(directory.glob("*.bin")):
        tensors |= torch.load(file, weights_only=True)
    return tensors


# --- the formulas, plainly, in float64 ---------------------------------------------------------------------


def average(base: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    return base + sum(deltas) / len(deltas)


def project(S: Tensor, delta: Tensor, alpha: float = 0.5) -> Tensor:
    """Zero the leading q×q block and the diagonal of Δ in the basis of the full SVD of S."""
    U, sigma, Vh = torch.linalg.svd(S, full_matrices=True)
    q = int((sigma.cumsum(0) < alpha * sigma.sum()).sum())
    coordinates = U.T @ delta @ Vh.T
    coordinates[:q, :q] = 0
    coordinates.diagonal()[:] = 0
    result: Tensor = U @ coordinates @ Vh
    return result


def opcm_direction(deltas: Sequence[Tensor], linear: bool) -> Tensor:
    S = deltas[0]
    for delta in deltas[1:]:
        S = S + (project(S, delta) if linear else delta)
    return S


def merged_in_float64(method: str, base: dict[str, Tensor], experts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = [name for name in base if base[name].is_floating_point()]
    deltas = {name: [expert[name].double() - base[name].double() for expert in experts] for name in names}
    if method == "average":
        return {name: average(base[name].double(), deltas[name]) for name in names}
    embeddings = [base[name] for name in names if any(part in name for part in NOT_LINEAR)]
    linear = {
        name
        for name in names
        if base[name].ndim == 2
        and not any(part in name for part in NOT_LINEAR)
        and not any(torch.equal(base[name], embedding) for embedding in embeddings)
    }
    assert linear
    directions = {name: opcm_direction(deltas[name], name in linear) for name in names}
    tied = [
        name
        for i, name in enumerate(names)
        if any(base[name].ndim == 2 and torch.equal(base[name], base[first]) for first in names[:i])
    ]
    norms = [sum(float(deltas[n][t].norm()) ** 2 for n in names if n not in tied) ** 0.5 for t in range(len(experts))]
    total = sum(float(directions[n].norm()) ** 2 for n in names if n not in tied) ** 0.5
    scale = sum(norms) / len(norms) / total
    return {name: base[name].double() + scale * directions[name] for name in names}


# --- the proof ---------------------------------------------------------------------------------------------


def assert_equal_but_for_rounding(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() >= expected.keys()
    for name, value in expected.items():
        u = ROUNDING[found[name].dtype]
        # One rounding of the result, and those of a state in float32 whose entries are near 0.02.
        allowed = u * value.abs() + 1e-6
        assert bool(((found[name].double() - value).abs() <= allowed).all()), name


def through_a_store(done: Any, place: Path, base: Path, experts: list[Path], *options: str) -> Path:
    done("init", place / "store", "--base", base, *options)
    done("add", place / "store", *experts)
    done("verify", place / "store")
    done("export", place / "store", place / "merged", "--max-shard-size", "8KB")
    return place / "merged"


@pytest.mark.parametrize("method", ["opcm", "average"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sharded_bfloat16_checkpoints_merge_as_the_formula_says_and_load(
    architecture: Any, method: str, tmp_path: Path, done: Callable[..., str]
) -> None:
    models = make_models(architecture, torch.bfloat16, experts=3)
    base, *experts = save_all(models, tmp_path, save_sharded)
    merged = through_a_store(done, tmp_path, base, experts, "--method", method)

    expected = merged_in_float64(method, load_weights(base), [load_weights(expert) for expert in experts])
    found = load_weights(merged)
    assert found.keys() == load_weights(base).keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in load_weights(base).items())
    assert_equal_but_for_rounding(found, expected)

    model, info = type(models[0]).from_pretrained(merged, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    assert model.dtype == torch.bfloat16
    inputs = {"pixel_values": torch.ones(1, 3, 32, 32)} if architecture is clip else dict(TEXT_INPUT)
    if architecture is t5:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    output = model.float()(**inputs)[0]
    assert bool(output.isfinite().all())
    moved = models[0].float()(**inputs)[0]
    assert not torch.allclose(output, moved, atol=1e-4), "the merged model is not the base"


@pytest.mark.parametrize("save", [save_bin, save_bin_shards])
@pytest.mark.parametrize("architecture", [llama, tied_llama, gpt2])
def test_pickled_checkpoints_merge_as_well(
    architecture: Any, save: Any, tmp_path: Path, done: Callable[..., str]
) -> None:
    models = make_models(architecture, torch.float32, experts=2)
    base, *experts = save_all(models, tmp_path, save)
    merged = through_a_store(done, tmp_path, base, experts, "--method", "opcm")
    expected = merged_in_float64("opcm", load_weights(base), [load_weights(expert) for expert in experts])
    loaded = type(models[0]).from_pretrained(merged)
    assert_equal_but_for_rounding(loaded.state_dict(), expected)


@pytest.mark.parametrize("save", [save_sharded, save_bin, save_bin_shards])
@pytest.mark.parametrize("architecture", [tied_llama, gpt2, t5, bert])
def test_tied_weights_stay_tied(architecture: Any, save: Any, tmp_path: Path, done: Callable[..., str]) -> None:
    base, *experts = save_all(make_models(architecture, torch.float32, 2), tmp_path, save)
    merged = through_a_store(done, tmp_path, base, experts)
    loaded = getattr(transformers, type(architecture()).__name__).from_pretrained(merged)
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    status = json.loads(done("status", tmp_path / "store", "--json"))
    roles = {tensor["name"]: tensor["role"] for tensor in status["tensors"]}
    names = {name for name, value in load_weights(base).items() if torch.equal(value, _word_embedding(base))}
    assert sorted(roles[name] for name in names) == ["embedding", *["tied"] * (len(names) - 1)]
    stored = load_weights(merged)
    assert all(torch.equal(stored[name], stored[min(names)]) for name in names), "merged once, written alike"


def _word_embedding(directory: Path) -> Tensor:
    owners = ("embed_tokens", "wte", "word_embeddings", "shared")
    return next(tensor for name, tensor in load_weights(directory).items() if name.split(".")[-2] in owners)


def test_an_expert_that_unties_what_the_base_ties_is_refused(
    tmp_path: Path, mergestream: RunCommand, done: Callable[..., str]
) -> None:
    models = make_models(tied_llama, torch.float32, 1)
    base, expert = save_all(models, tmp_path, save_bin)
    tensors = load_weights(expert)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    torch.save(tensors, expert / "pytorch_model.bin")
    done("init", tmp_path / "store", "--base", base)
    result = mergestream("add", tmp_path / "store", expert)
    assert result.code == 1
    assert "lm_head.weight" in result.err and "model.embed_tokens.weight" in result.err and "tie them" in result.err


def test_companions_and_model_card_come_with_the_model(tmp_path: Path, done: Callable[..., str]) -> None:
    base, *experts = save_all(make_models(gpt2, torch.float32, 2), tmp_path, save_sharded)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"_name_or_path": "org/base-model"}))
    (base / "README.md").write_text("the base's own card")
    (base / "training_args.bin").write_bytes(b"not for others")
    merged = through_a_store(done, tmp_path, base, experts, "--alpha", "0.25")

    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "vocab.txt"):
        assert (merged / name).read_bytes() == (base / name).read_bytes(), name
    assert not (merged / "training_args.bin").exists()
    log = json.loads(done("log", tmp_path / "store", "--json"))
    card = (merged / "README.md").read_text()
    _, metadata, text = card.split("---\n", 2)
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers",
        "tags": ["merge", "mergestream"],
        "base_model": ["org/base-model"],
        "base_model_relation": "merge",
    }
    assert "`opcm`" in text and "alpha = 0.25" in text
    assert f"λ = {log[-1]['lambda']:.6g}" in text
    for entry in log:
        assert f"| {entry['name']} | " in text and f"| `{entry['digest']}` |" in text
    assert "mergestream" in text.split("Made with:")[1]


def test_the_output_dtype_can_be_chosen(tmp_path: Path, done: Callable[..., str]) -> None:
    base, *experts = save_all(make_models(llama, torch.bfloat16, 2), tmp_path, save_sharded)
    done("init", tmp_path / "store", "--base", base, "--method", "average")
    done("add", tmp_path / "store", *experts)
    done("export", tmp_path / "store", tmp_path / "merged", "--dtype", "float32")
    expected = merged_in_float64("average", load_weights(base), [load_weights(expert) for expert in experts])
    found = load_weights(tmp_path / "merged")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert_equal_but_for_rounding(found, expected)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert model.dtype == torch.float32


def test_a_disk_error_is_not_taken_for_an_unknown_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the same base would be another one the next time."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(MergestreamError, match=r"config\.json cannot be read: Input/output error"):
        load_architecture(tmp_path)


@pytest.mark.parametrize(
    "number",
    [{"num_hidden_layers": 10**6}, {"hidden_size": 10**12}, {"vocab_size": 10**18}, {"num_labels": 10**9}],
    ids=str,
)
def test_a_model_of_an_impossible_size_is_not_built(number: Any, tmp_path: Path) -> None:
    llama = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps({**llama, **number}))
    with pytest.raises(MergestreamError, match=r"config.json does not describe its tensors \(.*too large\)"):
        open_base(tmp_path, config_only=True)


def test_modules_are_counted_while_a_model_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergestream.checkpoints.meta_model.MAX_MODULES", 10)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 8}))
    assert load_architecture(tmp_path).unknown == "transformers cannot build the model of config.json: it is too large"


def test_the_reason_names_what_the_config_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("hidden_size")

    monkeypatch.setattr("mergestream.base.architecture._build", fail)
    (tmp_path / "config.json").write_text("{}")
    unknown = load_architecture(tmp_path).unknown
    assert unknown == "transformers cannot build the model of config.json: 'hidden_size' is missing or unknown"
