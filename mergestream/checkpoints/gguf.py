"""GGUF files of llama.cpp: dequantised tensor by tensor, under the names of transformers.

The gguf package reads and dequantises. transformers knows the model's class, the name of each tensor in it, and which
tensors llama.cpp has permuted. Config and tokenizer are in the file and are written to a temporary directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints.checkpoint import Shard, TensorInfo
from mergestream.checkpoints.meta_model import build_on_meta, check_config_numbers, quiet_and_offline
from mergestream.errors import MergestreamError, package_needed
from mergestream.sizes import shorten_list

if TYPE_CHECKING:
    from torch import Tensor

_UNQUANTISED = {"F64", "F32", "F16", "BF16"}
_DROPPED_FIELDS = ("quantization_config", "_name_or_path", "_model_name_or_path")
_REMEDY = "give the model that it was made from"


class GgufFile(Shard):
    """A GGUF file; every tensor becomes float32 when it is read."""

    copies = 2
    path: Path

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._processor: Any
        with package_needed(f"{path}, a GGUF file,", "gguf"):
            import gguf
            import transformers
            from transformers import modeling_gguf_pytorch_utils

            utils: Any = modeling_gguf_pytorch_utils
        try:
            reader = _bounded_reader(gguf)(path)
            fields = [reader.get_field(name) for name in ("general.architecture", "split.count")]
            architecture, parts = (field.contents() if field else None for field in fields)
            self._stored = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # a damaged header raises anything
            raise MergestreamError(f"{path} is corrupt or no GGUF file; download it again") from error
        if parts not in (None, 0, 1):
            raise MergestreamError(f"{path} is one of {parts} parts: `llama-gguf-split --merge FIRST WHOLE` joins them")
        try:
            with quiet_and_offline(transformers):
                self._parsed = utils.load_gguf_checkpoint(path)
                model = _build_model(self._parsed["config"])
                processor = utils.TENSOR_PROCESSORS.get(architecture, utils.TensorProcessor)
                self._processor = processor(config=self._parsed["config"])
                self._names = utils.get_gguf_hf_weights_map(model, self._processor)
        except Exception as error:  # an unknown architecture, or impossible numbers
            reason = f"transformers cannot name its tensors ({type(error).__name__})"
            raise MergestreamError(f"{path} is of the architecture {architecture}: {reason}; {_REMEDY}") from error
        self._parts: dict[str, list[str]] = {}  # a tensor of a mixture of experts is stored in several parts
        for stored in self._stored:
            if name := self._names.get(stored) or self._names.get(stored.removesuffix(".weight")):
                self._parts.setdefault(name, []).append(stored)
        if missing := [name for name, _ in model.named_parameters() if name not in self._parts]:
            raise MergestreamError(f"{path} lacks {shorten_list(missing)} of {type(model).__name__}; {_REMEDY}")
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name in self._parts}
        self.tensors = {name: TensorInfo("F32", shape, path.name) for name, shape in shapes.items()}
        if quantised := sorted({tensor.tensor_type.name for tensor in self._stored.values()} - _UNQUANTISED):
            self.note = f"is quantised ({', '.join(quantised)}): its task vector contains the rounding errors of that"
        self._temporary = TemporaryDirectory(prefix="mergestream-")
        self.directory = Path(self._temporary.name)
        config = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
        config = {key: value for key, value in config.items() if key not in _DROPPED_FIELDS}
        (self.directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    def read(self, name: str) -> Tensor:
        import numpy
        import torch
        from gguf import dequantize

        result: dict[str, Any] = {"tensors": {}, "config": self._parsed["config"]}
        for stored in self._parts[name]:
            part = self._stored[stored]
            found = self._processor.process(
                weights=dequantize(part.data, part.tensor_type),
                name=stored,
                tensor_key_mapping=self._names,
                parsed_parameters=result,
            )
            if found.name is not None:  # otherwise transformers has put the part into ``result``
                result["tensors"][name] = torch.from_numpy(numpy.array(found.weights, dtype=numpy.float32))
        tensor: Tensor | None = result["tensors"].get(name)
        if tensor is None or tuple(tensor.shape) != self.tensors[name].shape:
            raise MergestreamError(f"{self.path} holds {name} in another shape than its header implies; {_REMEDY}")
        return tensor

    def companions(self) -> Iterator[Path]:
        """Config and tokenizer; without the latter if the file has none or transformers does not know it."""
        import transformers

        with suppress(Exception), quiet_and_offline(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True, trust_remote_code=False
            )
            tokenizer.save_pretrained(self._temporary.name)
        return super().companions()

    def close(self) -> None:
        self._stored = {}
        self._temporary.cleanup()


def _bounded_reader(gguf: Any) -> Any:
    """gguf's reader, which stops at the end of the file; else a forged length of an array fills the memory."""

    class Reader(gguf.GGUFReader):  # type: ignore[misc]  # the base is known at run time only
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **options)
            if len(found) < count:
                raise ValueError("it ends early")
            return found

    return Reader


def _build_model(raw: dict[str, Any]) -> Any:
    """Build the model that the header describes, without weights."""
    import transformers

    check_config_numbers(raw)
    config = transformers.AutoConfig.for_model(**raw)
    model_class = getattr(transformers, (config.architectures or [""])[0], None)
    auto = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    return build_on_meta(model_class or getattr(transformers, auto).from_config, config)
