"""Common architectures are known without transformers, and described as transformers describes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from mergestream.base.architecture import find_architecture, load_architecture
from mergestream.base.model import open_base
from mergestream.base.roles import find_roles, model_names, tied_names
from tests.base.known_architectures import CLASSES, FILE, SMALL, describe_all

transformers = pytest.importorskip("transformers")


def test_the_list_is_what_transformers_says() -> None:
    """If it is not, run ``python -m tests.base.known_architectures`` and look at the difference."""
    assert json.loads(FILE.read_text("utf-8")) == json.loads(json.dumps(describe_all()))


@pytest.mark.parametrize("tied", [False, True, None], ids=["untied", "tied", "default"])
@pytest.mark.parametrize("name", CLASSES)
def test_roles_are_those_of_transformers(name: str, tied: bool | None, tmp_path: Path) -> None:
    model_type = getattr(transformers, name).config_class.model_type
    ties = {} if tied is None else {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [name], "model_type": model_type, **SMALL, **ties})
    )
    base, theirs = open_base(tmp_path, config_only=True), load_architecture(tmp_path)
    ours = find_architecture(base)
    assert ours.name == theirs.name == name
    assert all(slot.spec is None for slot in ours.slots.values()), "this is transformers' description"
    pairs = [(architecture, find_roles(base, architecture)) for architecture in (ours, theirs)]
    assert pairs[0][1] == pairs[1][1]
    assert tied_names(*pairs[0]) == tied_names(*pairs[1])
    assert model_names(base, ours) == model_names(base, theirs) == {}


def test_init_of_a_known_architecture_does_not_import_transformers(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=40
        )
    )
    model.save_pretrained(tmp_path / "base")
    script = (
        "import sys; from mergestream.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert 'transformers' not in sys.modules"
    )
    words = ["init", str(tmp_path / "store"), "--base", str(tmp_path / "base")]
    subprocess.run([sys.executable, "-c", script, *words], check=True)


def test_an_unknown_tensor_leaves_the_description_to_transformers(tmp_path: Path) -> None:
    model = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=40
        )
    )
    model.save_pretrained(tmp_path)
    known = find_architecture(open_base(tmp_path, config_only=False))
    weights = {**model.state_dict(), "extra.weight": model.state_dict()["embeddings.word_embeddings.weight"].clone()}
    save_file(weights, tmp_path / "model.safetensors")
    found = find_architecture(open_base(tmp_path, config_only=False))
    assert known.name == found.name == "BertModel"
    assert all(slot.spec is None for slot in known.slots.values())
    assert any(slot.spec is not None for slot in found.slots.values())
