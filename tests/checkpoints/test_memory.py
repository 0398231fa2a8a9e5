"""A state dict in memory as a checkpoint, and a package that is imported without torch."""

import subprocess
import sys

import pytest
import torch

from mergestream.checkpoints import dtype_name, open_checkpoint, torch_dtype
from mergestream.errors import MergestreamError


def test_a_state_dict_is_a_checkpoint() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 3))
    checkpoint = open_checkpoint({"a": weight, "b": weight, "n": torch.tensor(3)})
    assert checkpoint.tensors["a"].shape == (2, 3) and checkpoint.tensors["n"].dtype == "I64"
    assert checkpoint.read("a").data_ptr() == weight.data_ptr() and not checkpoint.read("a").requires_grad
    assert dict(checkpoint.aliases) == {"b": "a"}
    assert (checkpoint.source, checkpoint.directory, checkpoint.fingerprint) == ("the state dict", None, None)


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(MergestreamError, match="'a' of type list, no tensor"):
        open_checkpoint({"a": [1.0]})  # type: ignore[dict-item]


def test_dtypes_have_names_both_ways() -> None:
    assert torch_dtype("BF16") is torch.bfloat16 and dtype_name(torch.bfloat16) == "BF16"
    with pytest.raises(KeyError):
        dtype_name(torch.float8_e4m3fn)


def test_importing_needs_no_torch() -> None:
    code = "import sys, mergestream.checkpoints; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
