"""Merge an adapter by PEFT's own layers, one module at a time: DoRA, LoHa, LoKr, IA³, VeRA, OFT and many others.

A module is built alone, from the base's tensors. PEFT injects its layer, loads the adapter's tensors and merges them;
then the module is dropped. So one module is in memory, and the model is never built.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from mergestream.checkpoints import Checkpoint
from mergestream.checkpoints.meta_model import quiet_and_offline
from mergestream.errors import MergestreamError
from mergestream.escaping import one_line
from mergestream.experts.adapters.config import WAY_OUT, LoraConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from mergestream.base.model import BaseModel, BaseTensor
    from mergestream.experts.adapters.adapter import Adapter

COPIES = 6
"""Copies of a weight in memory while PEFT merges it"""
MAX_NUMBER = 1 << 17
"""Largest rank or size of a block in a configuration"""
_WITH_BIAS = ("BEFT", "GLORA", "IA3", "LN_TUNING", "ROAD")
"""The types that change biases; PEFT merges all others into weights alone"""
_WHOLE_MODEL = ("FROD", "TINYLORA", "UNILORA")
"""The types whose tensors belong to no module and depend on all modules at once"""
_LOCK = threading.Lock()  # PEFT draws random numbers, which `torch.manual_seed` makes the same every time


def key_pattern(config: LoraConfig) -> re.Pattern[str]:
    """The pattern of the names of an adapter's tensors: the module, then the name in PEFT's layer."""
    try:
        mapping = import_module("peft").mapping
    except ImportError as error:
        raise MergestreamError(
            f"{config.path}: to merge {config.reason}, mergestream needs PEFT: pip install 'mergestream[peft]'"
        ) from error
    if config.kind not in mapping.PEFT_TYPE_TO_PREFIX_MAPPING:
        raise MergestreamError(f"{config.path}: the installed PEFT does not know peft_type={config.kind}; update it")
    if config.kind in _WHOLE_MODEL:
        raise MergestreamError(
            f"{config.path}: the modules of peft_type={config.kind} cannot be merged one by one; {WAY_OUT}"
        )
    known = mapping.PEFT_TYPE_TO_CONFIG_MAPPING[config.kind].__dataclass_fields__
    for name, value in config.peft_fields.items():
        is_too_large = type(value) is int and value > MAX_NUMBER and not re.search("seed|key", name)
        if is_too_large or (value and name not in known):
            reason = "is too large" if is_too_large else "cannot be honoured: the installed PEFT does not know it"
            raise MergestreamError(f"{config.path}: {name}={str(value)[:40]} {reason}; {WAY_OUT}")
    prefix = mapping.PEFT_TYPE_TO_PREFIX_MAPPING[config.kind]
    return re.compile(rf"(?P<module>.+?)\.(token_adapter\.|{re.escape(prefix)}).+")


class Module(NamedTuple):
    """A module that PEFT merges."""

    keys: tuple[str, ...]
    """Its tensors in the adapter's file"""
    parameters: Mapping[str, str]
    """Its parameters (``weight``, ``bias``, ``gate_up_proj``), and their names in the base"""
    changed: tuple[str, ...]
    """The parameters that the adapter changes"""


def bind_module(
    config: LoraConfig, module: str, keys: tuple[str, ...], translate: Callable[[str], str | None]
) -> Module:
    """Match a module to the base; ``translate`` gives the base's name of a parameter."""
    own = config.parameters_of(module)
    found = {leaf: name for leaf in own or ("weight", "bias") if (name := translate(f"{module}.{leaf}"))}
    if not found.keys() - {"bias"}:
        lost = f"{config.path}: the adapter changes {module}.{(own or ['weight'])[0]}, which the base does not have"
        if own:
            raise MergestreamError(
                f"{lost}; if it holds every expert of the mixture in tensors of its own, make the store from a copy "
                "that has stacks: model.save_pretrained(DIR, save_original_format=False)"
            )
        raise MergestreamError(f"{lost}: it was made for another model")
    has_bias = own or config.kind in _WITH_BIAS or config.peft_fields.get("lora_bias")
    return Module(keys, found, tuple(leaf for leaf in found if has_bias or leaf != "bias"))


class PeftMerger:
    """Merges the modules of one adapter into a base."""

    def __init__(self, adapter: Adapter, modules: Mapping[str, Module], model: BaseModel, base: Checkpoint) -> None:
        self.config, self.weights, self.shared = adapter.config, adapter.weights, adapter.shared
        self.modules, self.base = modules, base
        self.tensors, self.input_first = model.tensors, model.input_first

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor of the base with the adapter merged into it; tied modules are merged one after the other."""
        tensor = self.base.read(name).to(dtype)
        for path, module in self.modules.items():
            for leaf in module.changed:
                if module.parameters[leaf] == name:
                    before = {
                        leaf: self.base.read(other).to(dtype) if other != name else tensor
                        for leaf, other in module.parameters.items()
                    }
                    tensor = self._merge(path, before)[leaf]
        return tensor

    def _merge(self, path: str, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of a module after PEFT has merged the adapter into it."""
        import torch

        module, dtype = self.modules[path], next(iter(before.values())).dtype
        rows = next((key for key in module.keys if ".token_adapter." in key), None)
        if rows and len(module.keys) == 1:
            return {"weight": self._replace_rows(path, before["weight"], self.weights.read(rows).to(dtype))}
        peft, root, built = import_module("peft"), torch.nn.Module(), {path: module}
        if self.shared or "save_projection" in self.config.peft_fields:
            # Shared tensors have the sizes of the largest module: build one module of each shape, without memory.
            for other, same in self.modules.items():
                shapes = {self._shape(one) for one in built.values()}
                built |= {other: same} if self._shape(same) not in shapes else {}
        read = {key: self.weights.read(key) for one in built.values() for key in (*one.keys, *self.shared)}
        state = {key: value.to(dtype) if value.is_floating_point() else value for key, value in read.items()}
        root.config = {"model_type": "custom"}  # type: ignore[assignment]
        with _LOCK, _explained(self.weights.source, path), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for other, found in built.items():
                empty = torch.zeros(1, dtype=dtype)
                values = {leaf: empty.expand(self.tensors[name].shape) for leaf, name in found.parameters.items()}
                if other == path:
                    values = {leaf: before[leaf].clone() for leaf in self._in_order(module)}
                _place(root, other, _make_module(self.tensors[next(iter(found.parameters.values()))], values))
            root.get_submodule(path).is_transposed = self._is_input_first(module)  # type: ignore[assignment]
            model = peft.PeftModel(root, self._peft_config(built)).eval()
            result = peft.set_peft_model_state_dict(model, state)
            everywhere = {key.split(".")[1] for key in self.shared}
            missing = [key for key in result.missing_keys if everywhere.isdisjoint(key.split("."))]
            if wrong := result.unexpected_keys + [key for key in missing if model.base_model.prefix in key]:
                raise ValueError(f"{wrong[0]} is missing or superfluous")
            for other in built.keys() - {path}:
                _place(root, other, torch.nn.Module())
            merged = model.merge_and_unload().get_submodule(path)
            after = {leaf: getattr(merged, leaf).detach() for leaf in before}
        for leaf, value in before.items():
            if leaf not in module.changed and not torch.equal(value, after[leaf]):
                raise MergestreamError(f"{self.weights.source}: PEFT changes {path}.{leaf} unexpectedly; {WAY_OUT}")
        return after

    def _in_order(self, module: Module) -> list[str]:
        """The parameters of a module in the order of its class, in which PEFT wraps them: the first one innermost."""
        depth = dict.fromkeys(module.parameters, 0)
        for key in module.keys if len(depth) > 1 else ():
            other = key.replace("lora_A", "lora_B")
            sides = {self.weights.tensors[key].shape[-1], self.weights.tensors[other].shape[0]} if other != key else {}
            for leaf, name in module.parameters.items():
                if sides == set(self.tensors[name].shape[1:]):
                    depth[leaf] = key.count(".base_layer.")
        return sorted(depth, key=depth.__getitem__, reverse=True)

    def _is_input_first(self, module: Module) -> bool:
        """Whether PEFT took a stack of experts for input × output when it made the factors A; their widths show it."""
        shapes = [self.tensors[name].shape for name in module.parameters.values()]
        widths = {self.weights.tensors[key].shape[-1] for key in module.keys if "lora_A" in key}
        plain, turned = ({shape[at] for shape in shapes if len(shape) == 3} for at in (2, 1))
        if widths <= plain & turned:  # square
            return not self.input_first.isdisjoint(module.parameters.values())
        return widths <= turned

    def _shape(self, module: Module) -> tuple[int, ...]:
        return self.tensors[next(iter(module.parameters.values()))].shape

    def _replace_rows(self, path: str, weight: Tensor, rows: Tensor) -> Tensor:
        """An embedding with the trained rows (``trainable_token_indices``) in place of its own."""
        import torch

        found: Any = self.config.peft_fields["trainable_token_indices"]
        if isinstance(found, Mapping):
            found = next((found[name] for name in found if f".{path}".endswith(f".{name}")), ())
        if len(found) != len(rows) or not all(type(row) is int and 0 <= row < len(weight) for row in found):
            raise MergestreamError(
                f"{self.config.path}: trainable_token_indices are not the rows of {path} in {self.weights.source}"
            )
        return weight.index_copy(0, torch.tensor(found), rows)

    def _peft_config(self, built: Mapping[str, Module]) -> Any:
        """PEFT's configuration for some modules, selected by their full names."""
        config, fields = self.config, dict(self.config.peft_fields)
        fields.pop("trainable_token_indices", None)
        if config.kind == "ADALORA":
            ranks = fields.get("rank_pattern") or {}
            fields["rank_pattern"] = {key: one for key, one in ranks.items() if any(f"{p}." in key for p in built)}
        else:
            for name, table in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
                values = {path: table.get(path, None) for path in built} if fields.pop(name, None) else {}
                if exact := {re.escape(path): value for path, value in values.items() if value is not None}:
                    fields[name] = exact
        if config.kind == "IA3":  # its vector scales the inputs of these modules
            shapes = self.weights.tensors
            fields["feedforward_modules"] = [path for path, one in built.items() if shapes[one.keys[0]].shape[0] == 1]
        if any(config.parameters_of(path) for path in built):  # PEFT sorts them, and wraps one after the other
            fields |= {"target_parameters": list(config.fields.target_parameters or ()), "target_modules": []}
        else:
            fields["target_modules"] = list(built)
        return import_module("peft").mapping.PEFT_TYPE_TO_CONFIG_MAPPING[config.kind](**fields, inference_mode=True)


def _make_module(tensor: BaseTensor, values: Mapping[str, Tensor]) -> nn.Module:
    """A module with these parameters, of the class that the model has there."""
    import torch
    from torch import nn

    module: nn.Module
    shape, convolution = tensor.shape, re.fullmatch(r"torch\.nn\.(Conv[123]d)", tensor.module or "")
    with torch.device("meta"):
        if tensor.module == "Conv1D":
            module = import_module("transformers.pytorch_utils").Conv1D(shape[1], shape[0])
        elif convolution:
            module = getattr(nn, convolution[1])(shape[1], shape[0], shape[2:])
        elif tensor.role == "embedding" and "weight" in values:
            module = nn.Embedding(shape[0], shape[1])
        elif tensor.role == "linear" and len(shape) == 2:
            module = nn.Linear(shape[1], shape[0])
        elif len(shape) == 4 and tensor.module is None:
            module = nn.Conv2d(shape[1], shape[0], shape[2:])
        else:  # a norm, or a module with parameters of its own
            module = nn.Module()
    for leaf in [leaf for leaf, _ in module.named_parameters()]:
        setattr(module, leaf, None)
    for leaf, value in values.items():
        setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    return module


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at its path, in modules that hold nothing else."""
    from torch import nn

    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)


@contextmanager
def _explained(file: str, path: str) -> Iterator[None]:
    """PEFT raises anything for a file that does not fit its configuration."""
    try:
        with quiet_and_offline(import_module("transformers")):
            yield
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(str(error), 200)}"
        raise MergestreamError(
            f"{file}: PEFT cannot merge its change of {path} ({reason}); serve the adapter with PEFT, or repair it"
        ) from error
