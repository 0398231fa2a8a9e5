"""Load base and expert as torch modules: by transformers, or into a module of the user's own.

transformers builds the class that ``config.json`` names, never with remote code and never from the network. The
weights are read by `mergestream.checkpoints`, so every format and storage works, and an adapter is added to its base.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.algebra.lowrank import dense
from mergestream.base.architecture import find_model_class
from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.meta_model import check_config_numbers, quiet_and_offline
from mergestream.engine import Engine
from mergestream.errors import MergestreamError
from mergestream.files import read_json
from mergestream.inputs.reading import explained
from mergestream.sizes import format_size, shorten_list

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mergestream.experts.adapters.adapter import BoundAdapter

LOCAL = {"local_files_only": True, "trust_remote_code": False}
GENERATION = "generation_config.json"


def read_weights(checkpoint: Checkpoint, adapter: BoundAdapter | None = None, wrapper: str = "") -> dict[str, Tensor]:
    """All weights of a checkpoint, or of a base with an adapter added; ``wrapper`` is a prefix that no class expects.

    They may be views of files: nothing writes to them.
    """
    import torch

    while not all(name.startswith(wrapper) for name in checkpoint.tensors):  # ignored tensors have less in common
        wrapper = wrapper[: wrapper.rstrip(".").rfind(".") + 1]
    weights = {name.removeprefix(wrapper): checkpoint.read(name) for name in checkpoint.tensors}
    if adapter:
        for name in adapter.terms:
            change = dense(adapter.delta(name, torch.promote_types(weights[name].dtype, torch.float32)))
            weights[name] = (weights[name] + change).to(weights[name].dtype)
        for name in weights.keys() & adapter.tensors.keys() - adapter.terms.keys():
            weights[name] = adapter.read(name).to(weights[name].dtype)
    return weights


def load_model(
    directory: Path | None, source: str, weights: Mapping[str, Tensor], device: str, *, attention: str = "eager"
) -> nn.Module:
    """The model that ``config.json`` in a directory describes, with these weights.

    ``attention`` is ``sdpa`` for torch's own implementation, where the model has it; it takes less memory.
    """
    with _transformers(source) as transformers:
        if directory is None or not (directory / "config.json").is_file():
            raise MergestreamError(
                f"{source} has no config.json, by which transformers would load it; run it from Python: "
                "Store.add(…, inputs=…, model=a torch module)"
            )
        raw = read_json(directory / "config.json")
        check_config_numbers(raw)
        config: Any = transformers.AutoConfig.from_pretrained(directory, **LOCAL)
        model_class = find_model_class(raw, transformers)
        # Another implementation of attention may be one that is downloaded.
        attention = attention if getattr(model_class, f"_supports_{attention}", False) else "eager"
        options = {"attn_implementation": attention, "output_loading_info": True}
        model, found = model_class.from_pretrained(None, config=config, state_dict=dict(weights), **options)
        missing = sorted(found["missing_keys"])  # transformers has made random ones
        if model.can_generate():
            if missing:
                raise MergestreamError(f"{source} cannot be run: it lacks {shorten_list(missing)}")
            if (directory / GENERATION).is_file():
                model.generation_config = transformers.GenerationConfig.from_pretrained(directory, **LOCAL)
        elif any("pooler" in name for name in missing):
            model.base_model.pooler = None
        placed: nn.Module = model.to(device).eval()
    return placed


def load_processor(*directories: Path | None) -> Any | None:
    """The processor, tokenizer or image processor of the first directory that has one."""
    for directory in directories:
        names = ("processor_config.json", "tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")
        if directory is not None and any((directory / name).is_file() for name in names):
            with _transformers(f"the tokenizer or image processor in {directory}") as transformers:
                return transformers.AutoProcessor.from_pretrained(directory, **LOCAL)
    return None


def fill_module(module: nn.Module, weights: Mapping[str, Tensor], source: str, device: str) -> nn.Module:
    """A copy of the user's module with these weights, by the names of its parameters."""
    filled = copy.deepcopy(module).to(device).eval()
    known = filled.state_dict(keep_vars=True).keys()
    if not any(name in known for name in weights):
        raise MergestreamError(f"the module has none of the tensors of {source}; its names must be those of the base")
    filled.load_state_dict({name: value for name, value in weights.items() if name in known}, strict=False)
    return filled


def memory_beside(needed: int, engine: Engine, source: str) -> int:
    """The memory of the device, or ``--max-memory``, beside a model; refuses one that does not fit."""
    import torch

    if engine.device.startswith("cuda"):
        most = torch.cuda.mem_get_info(engine.device)[0]
    else:
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = min(most, getattr(engine, "max_memory", None) or most)
    if needed > most:
        raise MergestreamError(
            f"running {source} on inputs needs {format_size(needed)} of memory, more than the {format_size(most)} "
            "there are; use a larger machine, another --device, or --max-memory if that is set"
        )
    return most - needed


@contextmanager
def _transformers(source: object) -> Iterator[Any]:
    """The transformers package, quiet and offline; its errors become one sentence."""
    with explained(f"transformers cannot load {source}"):
        transformers = importlib.import_module("transformers")
        with quiet_and_offline(transformers):
            yield transformers
