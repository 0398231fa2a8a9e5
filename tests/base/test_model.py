import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mergestream.base.model import BaseModel
from mergestream.checkpoints import open_checkpoint
from tests.base.test_roles import clip, gpt2, save

pytest.importorskip("transformers")

ATTENTION = "transformer.h.0.attn.c_attn"


def examine(make: Any, directory: Any, **globs: Any) -> BaseModel:
    with open_checkpoint(save(make(), directory)) as base:
        return BaseModel.examine(base, **globs)


def in_format_1(model: BaseModel) -> dict[str, Any]:
    """What the first version of mergestream wrote into its manifests."""
    data = copy.deepcopy(model.to_json())
    del data["linear"], data["not_linear"]
    for tensor in data["tensors"].values():
        del tensor["module"]
    return data


def test_weights_keep_the_class_of_their_module_under_any_option(tmp_path: Path) -> None:
    model = examine(gpt2, tmp_path, linear=["*.c_attn.weight"], not_linear=["*.0.mlp.*"], heads=["*.1.mlp.c_fc.weight"])
    assert model.conv1d == {name for name in model.tensors if ".c_" in name and name.endswith(".weight")}
    assert model.tensors[f"{ATTENTION}.weight"].rule == "--linear *.c_attn.weight"
    assert model.tensors[f"{ATTENTION}.bias"].module is None
    assert model.tensors["transformer.h.0.ln_1.weight"].module == "torch.nn.LayerNorm"


def test_a_base_is_read_back_as_it_was(tmp_path: Path) -> None:
    model = examine(gpt2, tmp_path, linear=["*.c_attn.weight", "*.wpe.*"], not_linear=["*.mlp.*"], heads=["*.ln_f.*"])
    assert (model.linear, model.not_linear) == (("*.c_attn.weight", "*.wpe.*"), ("*.mlp.*",))
    assert BaseModel.from_json(json.loads(json.dumps(model.to_json())), Path("manifest.json")) == model


def test_format_1_has_the_globs_in_its_rules(tmp_path: Path) -> None:
    model = examine(gpt2, tmp_path, linear=["*.wpe.*", "*.c_attn.weight"], not_linear=["*.mlp.*"], heads=["*.ln_f.*"])
    old = BaseModel.from_json(in_format_1(model), Path("manifest.json"))
    assert set(old.linear) == set(model.linear) and old.not_linear == model.not_linear and old.heads == model.heads


@pytest.mark.parametrize("make", [gpt2, clip])
def test_format_1_has_the_modules_of_weights_in_its_rules(make: Any, tmp_path: Path) -> None:
    model = examine(make, tmp_path)
    old = BaseModel.from_json(in_format_1(model), Path("manifest.json"))
    assert old == model
    assert {tensor.module for tensor in model.tensors.values()} >= {
        gpt2: {"Conv1D", "torch.nn.Embedding", "torch.nn.LayerNorm", None},
        clip: {"torch.nn.Conv2d", "torch.nn.Linear", "torch.nn.Embedding", "torch.nn.LayerNorm", None},
    }[make]


@pytest.mark.parametrize(
    ("rule", "module"),
    [
        ("Conv1D in GPT2Model", "Conv1D"),
        ("torch.nn.Linear in Llama (Llama ties it, but the stored values differ)", "torch.nn.Linear"),
        ("bias of torch.nn.LayerNorm in GPT2Model", None),
        ("3-D, gate_up_proj of MixtralExperts in MixtralModel", None),
        ("2-D *.weight (not in LlamaModel)", None),
        ("--linear *in*", None),
        ("tied by Llama to embed_tokens.weight", None),
        ("integer tensor", None),
    ],
)
def test_rules_of_format_1_that_name_no_module_give_none(rule: str, module: str | None) -> None:
    tensor = {"dtype": "F32", "shape": [2, 2], "role": "other", "rule": rule, "tied_to": None, "digest": "", "norm": 0}
    data = {"source": "base", "digest": "", "heads": [], "tied_names": {}, "spellings": {}, "tensors": {"a": tensor}}
    assert BaseModel.from_json(data, Path("manifest.json")).tensors["a"].module == module
