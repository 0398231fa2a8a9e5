"""GGUF files: dequantised, under the names that transformers has, with the config and tokenizer that are in them."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mergestream import Average, MergestreamWarning, Store, merge
from mergestream.checkpoints import open_checkpoint
from mergestream.errors import MergestreamError
from tests.gguf_files import SHAPES, VOCABULARY, WIDTH, write_gguf

NOTE = r"is quantised \(Q8_0\): its task vector contains the rounding errors"


def refused(path: Path, message: str) -> None:
    with pytest.raises(MergestreamError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


EXPERTS = {
    **{name: shape for name, shape in SHAPES.items() if "ffn_" not in name},
    **{
        "blk.0.ffn_norm.weight": (WIDTH,),
        "output.weight": (VOCABULARY, WIDTH),
        "blk.0.ffn_gate_inp.weight": (2, WIDTH),
    },
    **{f"blk.0.ffn_{name}_exps.weight": (2, 768, WIDTH) for name in ("gate", "up")},
    **{
        "blk.0.ffn_down_exps.weight": (2, WIDTH, 768),
        "blk.0.attn_q_norm.weight": (16,),
        "blk.0.attn_k_norm.weight": (16,),
    },
}
OF_EXPERTS = {
    f"qwen3moe.{name}": number
    for name, number in {"expert_count": 2, "expert_used_count": 1, "attention.key_length": 16}.items()
}
MODELS = {
    "llama": {},  # whose queries and keys llama.cpp turns around
    "qwen3moe": {
        "architecture": "qwen3moe",
        "shapes": EXPERTS,
        "header": OF_EXPERTS,
        "kind": "F16",
    },  # gate and up are one
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_it_is_what_transformers_makes_of_it(tmp_path: Path, options: Any) -> None:
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "tiny.gguf", **options)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    with open_checkpoint(tmp_path / "tiny.gguf") as checkpoint:
        assert set(checkpoint.tensors) | {"lm_head.weight"} == set(expected), "which may be tied"
        for name, info in checkpoint.tensors.items():
            assert torch.equal(checkpoint.read(name), expected[name]) and info.shape == tuple(expected[name].shape)
        directory = checkpoint.directory
        assert checkpoint.fingerprint and directory is not None and (directory / "config.json").is_file()
    assert checkpoint.directory == directory and not directory.exists()


def test_the_only_one_of_a_directory_is_taken(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    assert open_checkpoint(tmp_path).tensors["model.norm.weight"].shape == (WIDTH,)
    write_gguf(tmp_path / "other.gguf")
    refused(tmp_path, r"2 \.gguf files; name one of them \(other\.gguf, tiny\.gguf\)")


def test_quantised_models_are_merged_with_a_note_and_transformers_loads_the_result(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, expert = tmp_path / "base.gguf", tmp_path / "expert.gguf"
    write_gguf(base)
    kept = write_gguf(expert, 1)
    with pytest.warns(MergestreamWarning, match=rf"base\.gguf {NOTE}"):
        store = Store.create(tmp_path / "store", base=base, method=Average())
    with pytest.warns(MergestreamWarning, match=rf"expert\.gguf {NOTE}"):
        entry = store.add(expert)
    assert entry.name == "expert" and any("quantised" in note for note in entry.notes)
    out = AutoModelForCausalLM.from_pretrained(store.export(tmp_path / "out"))
    torch.testing.assert_close(out.model.norm.weight.data, kept["output_norm.weight"])
    assert out.lm_head.weight is out.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("ab") == 3
    with pytest.warns(MergestreamWarning, match=NOTE):
        merge(base, [expert], tmp_path / "merged", Average())
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(
        torch.equal(tensor, merged[name]) for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()
    )


def test_one_that_is_not_quantised_needs_no_note(tmp_path: Path) -> None:
    kept = write_gguf(tmp_path / "tiny.gguf", kind="F16")
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    assert checkpoint.note is None
    assert torch.equal(checkpoint.read("model.layers.0.mlp.up_proj.weight"), kept["blk.0.ffn_up.weight"])


def test_what_cannot_be_read_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, architecture="flux")
    refused(path, "of the architecture flux: transformers cannot name its tensors .*; give the model that it was made")
    write_gguf(path, shapes={name: shape for name, shape in SHAPES.items() if "ffn_up" not in name})
    refused(path, r"lacks model\.layers\.0\.mlp\.up_proj\.weight of LlamaForCausalLM")
    write_gguf(path, header={"split.count": 3})
    refused(path, "one of 3 parts: `llama-gguf-split --merge FIRST WHOLE` joins them")
    write_gguf(path, blocks=10**6)
    refused(path, "TooLargeError")
    write_gguf(path, shapes={**SHAPES, "blk.0.ffn_up.weight": (16, WIDTH)})
    with (
        open_checkpoint(path) as narrow,
        pytest.raises(MergestreamError, match="in another shape than its header implies"),
    ):
        narrow.read("model.layers.0.mlp.up_proj.weight")
    path.write_bytes(b"GGUF")
    refused(path, "is corrupt or no GGUF file; download it again")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(path, r"a GGUF file, needs the package gguf: pip install 'mergestream\[gguf\]'")


def test_an_array_longer_than_the_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path)
    data, key = bytearray(path.read_bytes()), b"tokenizer.ggml.token_type"
    length = data.index(key) + len(key) + 8  # behind the type of the field and that of the elements
    data[length : length + 8] = (2**60).to_bytes(8, "little")
    path.write_bytes(data)
    refused(path, "is corrupt or no GGUF file; download it again")


def test_damage_is_a_sentence_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path)
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(40):
        damaged = bytearray(whole[: rng.choice((len(whole), rng.randrange(8, len(whole))))])
        for _ in range(rng.randint(0, 6)):
            damaged[rng.randrange(min(3000, len(damaged)))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            with open_checkpoint(path) as checkpoint:
                for name, info in checkpoint.tensors.items():
                    assert tuple(checkpoint.read(name).shape) == info.shape
        except MergestreamError as error:
            assert "\n" not in str(error)
