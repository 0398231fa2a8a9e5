"""LoRAs in one file: what diffusers makes of them is what the store makes of them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mergestream import MergestreamWarning, Store
from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.single_file import open_lora_file
from tests.workshop import TEXT

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

UNET = {
    "sample_size": 8,
    "layers_per_block": 1,
    "block_out_channels": (4, 8),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "norm_num_groups": 2,
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
}
FLUX = {
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 8,
    "pooled_projection_dim": 8,
    "axes_dims_rope": (2, 2, 4),
}
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
CONVOLUTIONS = [*ATTENTION, "proj_in", "conv1", "conv2", "ff.net.0.proj"]


def make_base(directory: Path, kind: str = "unet") -> Path:
    torch.manual_seed(0)
    model = {
        "unet": lambda: diffusers.UNet2DConditionModel(**UNET),
        "transformer": lambda: diffusers.FluxTransformer2DModel(**FLUX),
        "text_encoder": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT)),
    }[kind]()
    model.save_pretrained(directory / kind)
    return directory / kind


def load(base: Path) -> Any:
    if (base / "config.json").exists() and "_class_name" not in json.loads((base / "config.json").read_text()):
        return transformers.CLIPTextModel.from_pretrained(base)
    cls = diffusers.UNet2DConditionModel if base.name == "unet" else diffusers.FluxTransformer2DModel
    return cls.from_pretrained(base)


def factors(base: Path, seed: int = 1, **fields: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The factors of a random LoRA of a component, by PEFT's names, and its configuration."""
    model = load(base)
    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 3, "init_lora_weights": False, **fields})
    model.add_adapter(config)
    tensors = {name: 0.3 * torch.randn_like(t) for name, t in peft.get_peft_model_state_dict(model).items()}
    return tensors, config.to_dict()


def torch_factors() -> dict[str, Tensor]:
    module = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    return {f"{module}.lora_A.weight": torch.ones(2, 8), f"{module}.lora_B.weight": torch.ones(8, 2)}


def in_kohya(tensors: Mapping[str, Tensor], prefix: str, alphas: Callable[[int], float]) -> dict[str, Tensor]:
    """The same factors in a file by kohya's scripts; ``alphas`` gives the alpha of each module by its number."""
    written: dict[str, Tensor] = {}
    for number, key in enumerate(key for key in tensors if key.endswith(".lora_A.weight")):
        module = key.removesuffix(".lora_A.weight")
        name = prefix + module.replace(".", "_")
        written |= {f"{name}.lora_down.weight": tensors[key], f"{name}.alpha": torch.tensor(alphas(number))}
        written[f"{name}.lora_up.weight"] = tensors[f"{module}.lora_B.weight"]
    return written


def dense(tensors: Mapping[str, Tensor], scaling: Callable[[int], float]) -> dict[str, Tensor]:
    """The differences of the weights, by the formula."""
    changes = {}
    for number, key in enumerate(key for key in tensors if key.endswith(".lora_A.weight")):
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        change = (b.flatten(1).double() @ a.flatten(1).double()) * scaling(number)
        changes[key.replace("lora_A.", "")] = change.reshape(b.shape[0], *a.shape[1:])
    return changes


def weights_after_add(base: Path, expert: Path) -> dict[str, Tensor]:
    store = Store.create(base.parent / "store", base, method="task_arithmetic")
    store.add(expert)
    store.export(base.parent / "merged", scale=1)
    file = "model.safetensors" if base.name.startswith("text_encoder") else "diffusion_pytorch_model.safetensors"
    ours, theta = load_file(base.parent / "merged" / file), load_file(base / file)
    return {name: ours[name].double() - theta[name].double() for name in theta}


def assert_changes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    known = {name.removeprefix("text_model."): change for name, change in expected.items()}
    assert any(change.any() for change in known.values())
    for name, change in found.items():
        wanted = known.pop(name.removeprefix("text_model."), torch.zeros((), dtype=torch.float64))
        assert torch.allclose(change, wanted, atol=1e-6), name
    assert not known


def test_a_file_by_kohya_has_an_alpha_for_every_module(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    tensors, _ = factors(base, target_modules=CONVOLUTIONS, rank_pattern={"to_q": 2})
    save_file(in_kohya(tensors, "lora_unet_", lambda number: 1.0 + number), tmp_path / "style.safetensors")
    ranks = [t.shape[0] for name, t in tensors.items() if name.endswith("lora_A.weight")]
    found = weights_after_add(base, tmp_path / "style.safetensors")
    assert_changes(found, dense(tensors, lambda number: (1.0 + number) / ranks[number]))


def test_a_folder_by_diffusers_is_scaled_by_the_metadata_in_its_header(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    tensors, config = factors(base, target_modules=ATTENTION, lora_alpha=6)
    diffusers.StableDiffusionPipeline.save_lora_weights(
        tmp_path / "plain", unet_lora_layers=tensors, unet_lora_adapter_metadata=config
    )
    assert_changes(weights_after_add(base, tmp_path / "plain"), dense(tensors, lambda _: 2.0))


def test_without_metadata_the_scaling_is_1(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    tensors, _ = factors(base, target_modules=ATTENTION, lora_alpha=6)
    diffusers.StableDiffusionPipeline.save_lora_weights(tmp_path / "plain", unet_lora_layers=tensors)
    assert_changes(weights_after_add(base, tmp_path / "plain"), dense(tensors, lambda _: 1.0))


def test_blocks_of_sdxl_are_numbered_as_in_the_original_model(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    tensors, _ = factors(base, target_modules=["down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"])
    written = {
        name.replace("down_blocks_0_attentions_0", "input_blocks_1_1"): tensor
        for name, tensor in in_kohya(tensors, "lora_unet_", lambda _: 3.0).items()
    }
    save_file(written, tmp_path / "xl.safetensors")
    assert any("input_blocks_1_1" in name for name in written)
    assert_changes(weights_after_add(base, tmp_path / "xl.safetensors"), dense(tensors, lambda _: 1.0))


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_the_text_encoder_takes_its_part_of_a_file(layout: str, tmp_path: Path) -> None:
    unet, base = make_base(tmp_path), make_base(tmp_path, "text_encoder")
    theirs, _ = factors(unet, target_modules=ATTENTION)
    tensors, _ = factors(base, target_modules=["q_proj", "out_proj", "fc1"])
    tensors = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in tensors.items()}
    if layout == "kohya":
        both = in_kohya(theirs, "lora_unet_", lambda _: 3.0) | in_kohya(tensors, "lora_te_", lambda _: 3.0)
        save_file(both, tmp_path / "both.safetensors")
    else:
        diffusers.StableDiffusionPipeline.save_lora_weights(
            tmp_path, unet_lora_layers=theirs, text_encoder_lora_layers=tensors, weight_name="both.safetensors"
        )
    with pytest.warns(MergestreamWarning, match="factors of unet are left out, because the base is the text_encoder"):
        found = weights_after_add(base, tmp_path / "both.safetensors")
    assert_changes(found, dense(tensors, lambda _: 1.0))


@pytest.mark.parametrize(("encoder", "prefix"), [("text_encoder", "lora_te1_"), ("text_encoder_2", "lora_te2_")])
def test_each_text_encoder_of_sdxl_takes_its_part_of_a_file(encoder: str, prefix: str, tmp_path: Path) -> None:
    made = make_base(tmp_path, "text_encoder")
    parts = [factors(made, seed, target_modules=["q_proj", "fc1"])[0] for seed in (1, 2)]
    parts = [{f"text_model.{name.removeprefix('text_model.')}": t for name, t in part.items()} for part in parts]
    both = {"lora_te1_": parts[0], "lora_te2_": parts[1]}
    written = [in_kohya(part, start, lambda _: 6.0) for start, part in both.items()]
    save_file(written[0] | written[1], tmp_path / "xl.safetensors")
    base = made.rename(tmp_path / encoder) if encoder != made.name else made
    with pytest.warns(MergestreamWarning, match="are left out, because the base is the " + encoder):
        found = weights_after_add(base, tmp_path / "xl.safetensors")
    assert_changes(found, dense(both[prefix], lambda _: 2.0))


def test_the_configuration_of_the_base_is_enough(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    store = Store.create(tmp_path / "store", base, config_only=True)
    weights = base / "diffusion_pytorch_model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    save_file(in_kohya(torch_factors(), "lora_unet_", lambda _: 2.0), tmp_path / "style.safetensors")
    store.add(tmp_path / "style.safetensors")
    assert not store.manifest.base.measured
    assert store.history[0].norm > 0


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_flux(layout: str, tmp_path: Path) -> None:
    base = make_base(tmp_path, "transformer")
    targets = ["attn.to_out.0", "ff.net.2"]
    tensors, _ = factors(base, target_modules=r"transformer_blocks\..*(attn\.to_out\.0|ff\.net\.2)")
    assert len(tensors) == 2 * 2 * len(targets)
    if layout == "kohya":
        original = {"attn_to_out_0": "img_attn_proj", "ff_net_2": "img_mlp_2"}
        written = in_kohya(tensors, "lora_unet_", lambda _: 6.0)
        for ours, theirs in original.items():
            written = {name.replace(ours, theirs): tensor for name, tensor in written.items()}
        written = {name.replace("transformer_blocks", "double_blocks"): tensor for name, tensor in written.items()}
    else:
        written = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    save_file(written, tmp_path / "flux.safetensors")
    scaling = 2.0 if layout == "kohya" else 1.0
    assert_changes(weights_after_add(base, tmp_path / "flux.safetensors"), dense(tensors, lambda _: scaling))


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        ("hada_w1_a", "LoHa"),
        ("lokr_w1", "LoKr"),
        ("lora_mid.weight", "LoCon with a Tucker decomposition"),
        ("dora_scale", "DoRA"),
        ("oft_blocks", "OFT"),
        ("on_input", "IA³"),
        ("a1.weight", "GLoRA"),
        ("diff", "full differences"),
    ],
)
def test_other_kinds_are_refused_by_name(suffix: str, kind: str, tmp_path: Path) -> None:
    base = make_base(tmp_path)
    tensors, _ = factors(base, target_modules=["to_q"])
    written = in_kohya(tensors, "lora_unet_", lambda _: 3.0)
    written[f"lora_unet_conv_in.{suffix}"] = torch.ones(3, 3)
    save_file(written, tmp_path / "other.safetensors")
    store = Store.create(tmp_path / "store", base)
    with pytest.raises(MergestreamError, match=rf"is no plain LoRA, but holds {kind} \(lora_unet_conv_in"):
        store.add(tmp_path / "other.safetensors")


def test_a_factor_that_is_a_number_is_refused(tmp_path: Path) -> None:
    written = in_kohya(torch_factors(), "lora_unet_", lambda _: 2.0)
    written[next(key for key in written if key.endswith("lora_down.weight"))] = torch.tensor(1.0)
    save_file(written, tmp_path / "style.safetensors")
    store = Store.create(tmp_path / "store", make_base(tmp_path))
    with pytest.raises(MergestreamError, match="alpha belongs to no factors"):
        store.add(tmp_path / "style.safetensors")


def test_a_lora_is_no_base(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    tensors, _ = factors(base, target_modules=["to_q"])
    diffusers.StableDiffusionPipeline.save_lora_weights(tmp_path / "lora", unet_lora_layers=tensors)
    with pytest.raises(MergestreamError, match=r"is an adapter \(LoRA\), which is no base"):
        Store.create(tmp_path / "store", tmp_path / "lora")


def test_of_another_model_it_is_refused(tmp_path: Path) -> None:
    base, other = make_base(tmp_path), make_base(tmp_path, "transformer")
    tensors, _ = factors(other, target_modules=["to_q"])
    save_file({f"transformer.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "flux.safetensors")
    store = Store.create(tmp_path / "store", base)
    with pytest.raises(MergestreamError, match="it was made for another model"):
        store.add(tmp_path / "flux.safetensors")


def test_kohya_s_file_for_a_unet_is_refused_by_flux(tmp_path: Path) -> None:
    save_file(in_kohya(torch_factors(), "lora_unet_", lambda _: 2.0), tmp_path / "style.safetensors")
    store = Store.create(tmp_path / "store", make_base(tmp_path, "transformer"))
    with pytest.raises(MergestreamError, match=r"made for another model|diffusers cannot convert"):
        store.add(tmp_path / "style.safetensors")


def test_factors_by_peft_without_their_configuration_are_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path, "text_encoder")
    tensors, _ = factors(base, target_modules=["q_proj"])
    save_file({f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
    store = Store.create(tmp_path / "store", base)
    with pytest.raises(MergestreamError, match=r"adapter_config\.json, which says how they are scaled, is not beside"):
        store.add(tmp_path / "a.safetensors")


def test_names_that_no_converter_knows_are_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    tensors = {"lora_unet_x.lora_down.weight": torch.ones(1, 4)}  # its other factor is missing
    save_file(tensors, tmp_path / "a.safetensors")
    store = Store.create(tmp_path / "store", base)
    with pytest.raises(MergestreamError, match=r"that diffusers cannot convert"):
        store.add(tmp_path / "a.safetensors")


def test_converted_factors_reach_the_workers_of_a_cluster(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    save_file(in_kohya(torch_factors(), "lora_unet_", lambda _: 2.0), tmp_path / "style.safetensors")
    with open_checkpoint(base) as opened, open_checkpoint(tmp_path / "style.safetensors") as file:
        weights = open_lora_file(file, BaseModel.examine(opened, measure=False), base).weights
    again = pickle.loads(pickle.dumps(weights))
    assert again.source == weights.source and again.fingerprint == weights.fingerprint
    assert all(torch.equal(again.read(name), weights.read(name)) for name in weights.tensors)
