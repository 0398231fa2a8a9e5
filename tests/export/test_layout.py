"""Adapters in the layouts of diffusers and kohya: diffusers loads them, and the component answers as before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mergestream import Ledger, Store
from mergestream.errors import MergestreamWarning, UsageError
from tests.conftest import RunCommand
from tests.experts.adapters.test_single_file import (
    CONVOLUTIONS,
    diffusers,
    factors,
    in_kohya,
    load,
    make_base,
    transformers,
)
from tests.workshop import TEXT

LAYOUTS = ["kohya", "diffusers"]
PIPELINES = {
    "unet": diffusers.StableDiffusionPipeline,
    "text_encoder": diffusers.StableDiffusionPipeline,
    "transformer": diffusers.FluxPipeline,
}


def with_lora(base: Path, lora: Path) -> Any:
    """The component with a LoRA, loaded and merged by diffusers."""
    model, pipeline = load(base), PIPELINES[base.name]
    directory, file = (lora, None) if lora.is_dir() else (lora.parent, lora.name)
    options = {"unet_config": model.config} if base.name == "unet" else {}
    if base.name == "transformer":
        pipeline.load_lora_into_transformer(pipeline.lora_state_dict(directory, weight_name=file), None, model)
    else:
        state, alphas = pipeline.lora_state_dict(directory, weight_name=file, **options)
        getattr(pipeline, f"load_lora_into_{base.name}")(state, alphas, model)
    return model


def answer(model: Any) -> Tensor:
    torch.manual_seed(0)
    text = torch.randn(1, 3, 8)
    with torch.inference_mode():
        if isinstance(model, transformers.CLIPTextModel):
            return model(torch.tensor([[0, 5, 9, 1]]))[0]  # type: ignore[no-any-return]
        if isinstance(model, diffusers.UNet2DConditionModel):
            return model(torch.randn(1, 4, 8, 8), 3, text)[0]  # type: ignore[no-any-return]
        places = {"img_ids": torch.zeros(6, 3), "txt_ids": torch.zeros(3, 3)}
        pooled, when = torch.randn(1, 8), torch.tensor([3.0])
        return model(torch.randn(1, 6, 4), text, pooled, when, **places)[0]  # type: ignore[no-any-return]


def export_style(base: Path, style: Path, layout: str) -> Path:
    store = Store.create(base.parent / "store", base, method="task_arithmetic")
    store.add(style)
    store.export_adapter(base.parent / "out", layout=layout, scale=1, rank=8)  # the tiny weights are kept dense
    return base.parent / "out"


def check(base: Path, style: Path, layout: str) -> dict[str, Tensor]:
    out = export_style(base, style, layout)
    expected = answer(with_lora(base, style))
    assert not torch.allclose(expected, answer(load(base)), atol=1e-2)
    torch.testing.assert_close(answer(with_lora(base, out)), expected, atol=1e-5, rtol=1e-4)
    assert not list(out.glob("adapter_*"))
    return load_file(out / "pytorch_lora_weights.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_unet_with_its_convolutions(layout: str, tmp_path: Path) -> None:
    base = make_base(tmp_path)
    tensors, _ = factors(base, target_modules=CONVOLUTIONS, rank_pattern={"to_q": 2, "conv1": 4})
    save_file({f"unet.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "style.safetensors")
    written = check(base, tmp_path / "style.safetensors", layout)
    assert all(name.startswith("lora_unet_" if layout == "kohya" else "unet.") for name in written)
    card = (tmp_path / "out/README.md").read_text()
    assert "library_name: diffusers" in card


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_came_from_kohya_goes_back(layout: str, tmp_path: Path) -> None:
    base = make_base(tmp_path)
    tensors, _ = factors(base, target_modules=["to_q", "to_out.0"])
    save_file(in_kohya(tensors, "lora_unet_", lambda _: 6.0), tmp_path / "style.safetensors")
    written = check(base, tmp_path / "style.safetensors", layout)
    if layout == "kohya":
        assert written.keys() == {n for n in load_file(tmp_path / "style.safetensors") if not n.endswith(".alpha")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_text_encoder(layout: str, tmp_path: Path) -> None:
    base = make_base(tmp_path, "text_encoder")
    tensors, _ = factors(base, target_modules=["q_proj", "out_proj", "fc1"])
    prefix = "text_encoder.text_model."
    tensors = {prefix + name.removeprefix("text_model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "style.safetensors")
    written = check(base, tmp_path / "style.safetensors", layout)
    start = "lora_te_text_model_encoder_" if layout == "kohya" else "text_encoder.text_model.encoder."
    assert all(name.startswith(start) for name in written)


def test_flux(tmp_path: Path) -> None:
    base = make_base(tmp_path, "transformer")
    tensors, _ = factors(base, target_modules=["to_q", "ff.net.2"])
    save_file({f"transformer.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "style.safetensors")
    check(base, tmp_path / "style.safetensors", "diffusers")
    with pytest.raises(UsageError, match="have other modules than diffusers' FluxTransformer2DModel"):
        Store(tmp_path / "store").export_adapter(tmp_path / "other", layout="kohya", scale=1)


def test_every_expert_in_a_folder_of_its_own(tmp_path: Path, done: Callable[..., str], mergestream: RunCommand) -> None:
    base = make_base(tmp_path)
    for seed in (1, 2):
        tensors, _ = factors(base, seed, target_modules=["to_q"])
        save_file(in_kohya(tensors, "lora_unet_", lambda _: 3.0), tmp_path / f"style-{seed}.safetensors")
    done("init", tmp_path / "store", "--base", base)
    done("add", tmp_path / "store", tmp_path / "style-1.safetensors", tmp_path / "style-2.safetensors")
    done("export", tmp_path / "store", tmp_path / "out", "--format", "loras", "--layout", "kohya")
    files = sorted(path.relative_to(tmp_path / "out") for path in tmp_path.glob("out/*/*.safetensors"))
    assert files == [Path(f"style-{seed}/pytorch_lora_weights.safetensors") for seed in (1, 2)]
    assert json.loads((tmp_path / "out/mergestream.json").read_text())["form"]["layout"] == "kohya"
    wrong = mergestream("export", tmp_path / "store", tmp_path / "other", "--layout", "kohya")
    assert wrong.code == 2 and "--layout is for --format lora or loras, without --for" in wrong.err


def test_the_notes_are_about_the_adapter_and_not_about_servers(tmp_path: Path) -> None:
    base = tmp_path / "text_encoder"
    config = transformers.CLIPTextConfig(**{**TEXT, "hidden_size": 64})
    transformers.CLIPTextModel(config).save_pretrained(base)
    tensors, _ = factors(base, target_modules=["q_proj"], r=32)
    tensors = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in tensors.items()}
    save_file(in_kohya(tensors, "lora_te_", lambda _: 32.0), tmp_path / "style.safetensors")
    store = Store.create(tmp_path / "store", base, Ledger(budget=0.25))
    with pytest.warns(MergestreamWarning, match="holds only a part of style"):
        store.add(tmp_path / "style.safetensors")
    with pytest.warns(MergestreamWarning) as warned:
        Store(tmp_path / "store").export_adapter(tmp_path / "out", layout="kohya")
    (note,) = {str(warning.message) for warning in warned}
    assert "holds only a part of style" in note and "vLLM" not in note


def test_only_components_of_pipelines_have_these_layouts(
    tmp_path: Path, done: Callable[..., str], mergestream: RunCommand
) -> None:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20
    )
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / "base")
    model.pooler.dense.weight.data += 1
    model.save_pretrained(tmp_path / "expert")
    done("init", tmp_path / "store", "--base", tmp_path / "base", "--method", "average")
    done("add", tmp_path / "store", tmp_path / "expert")
    words = ["--format", "lora", "--rank", "1", "--layout", "diffusers"]
    result = mergestream("export", tmp_path / "store", tmp_path / "out", *words)
    assert result.code == 2 and "is for a component of a diffusers pipeline, which" in result.err
