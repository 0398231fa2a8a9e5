"""GGUF files, as llama.cpp has them: dequantised tensor by tensor, under the names that transformers has for them.

The gguf package reads and dequantises; transformers knows which of its models it is, what each tensor is called there,
and what llama.cpp has turned around in it. Config and tokenizer are in the file, and are written out of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints.checkpoint import FileCheckpoint, Shard, TensorInfo
from mergestream.checkpoints.meta_model import few_modules, quiet_and_offline, refuse_large_numbers
from mergestream.errors import MergestreamError

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = {"F64", "F32", "F16", "BF16"}
_FORGOTTEN = ("quantization_config", "_name_or_path", "_model_name_or_path")
"""Of a config: where it was read from, and that it was quantised"""


class GgufFile(Shard):
    """Every tensor becomes float32 as it is read; no other is in memory."""

    path: Path
    copies = 2

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import gguf
            import transformers
            from transformers import modeling_gguf_pytorch_utils as of_transformers
        except ImportError as error:
            raise MergestreamError(
                f"{path} is a GGUF file, for which the packages gguf and transformers are needed: "
                "pip install 'mergestream[gguf]'"
            ) from error
        try:
            reader = gguf.GGUFReader(path)
            architecture = _field(reader, "general.architecture")
            self._stored = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # whatever a damaged header makes it stumble over
            raise MergestreamError(f"{path} is corrupt or no GGUF file; download it again") from error
        if (parts := _field(reader, "split.count")) not in (None, 0, 1):
            raise MergestreamError(
                f"{path} is one of {parts} parts of a GGUF file: run `llama-gguf-split --merge` with the first and the "
                "name of the whole, and give that"
            )
        try:
            with quiet_and_offline(transformers):
                self._parsed = of_transformers.load_gguf_checkpoint(path)
                model = _build(self._parsed["config"])
                processor = of_transformers.TENSOR_PROCESSORS.get(architecture, of_transformers.TensorProcessor)
                self._processor = processor(config=self._parsed["config"])
                self._names = of_transformers.get_gguf_hf_weights_map(model, self._processor)
        except Exception as error:  # an architecture that it does not know, or numbers that no model has
            raise MergestreamError(
                f"{path} is a GGUF file of the architecture {architecture}, whose tensors transformers cannot name "
                f"({type(error).__name__}); give the model that it was made from"
            ) from error
        self._parts = self._sources()
        if missing := [name for name, _ in model.named_parameters() if name not in self._parts]:
            raise MergestreamError(
                f"{path} has nothing for {missing[0]} of {type(model).__name__}, and for {len(missing) - 1} other "
                "tensors; give the model that it was made from"
            )
        forms = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name in self._parts}
        self.tensors = MappingProxyType({name: TensorInfo("F32", shape, path.name) for name, shape in forms.items()})
        config = {**model.config.to_diff_dict(), "architectures": [type(model).__name__]}
        self.config = {key: value for key, value in config.items() if key not in _FORGOTTEN}

    def _sources(self) -> dict[str, list[str]]:
        """What each tensor of the model is stored as: experts of a mixture are several."""
        parts: dict[str, list[str]] = {}
        for stored in self._stored:
            if name := self._names.get(stored) or self._names.get(stored.removesuffix(".weight")):
                parts.setdefault(name, []).append(stored)
        return parts

    @property
    def types(self) -> set[str]:
        """In which the tensors are stored."""
        return {tensor.tensor_type.name for tensor in self._stored.values()}

    def read(self, name: str) -> Tensor:
        import numpy
        import torch
        from gguf import dequantize

        made: dict[str, Any] = {"tensors": {}, "config": self._parsed["config"]}
        for stored in self._parts[name]:
            tensor = self._stored[stored]
            values = dequantize(tensor.data, tensor.tensor_type)
            found = self._processor.process(
                weights=values, name=stored, tensor_key_mapping=self._names, parsed_parameters=made
            )
            if found.name is not None:  # else it is a part of a tensor, and put into its place
                made["tensors"][name] = torch.from_numpy(numpy.array(found.weights, dtype=numpy.float32))
        whole: Tensor | None = made["tensors"].get(name)
        if whole is None or tuple(whole.shape) != self.tensors[name].shape:
            raise MergestreamError(
                f"{self.path} holds {name} in another form than transformers expects by its header; give the model "
                "that it was made from"
            )
        return whole

    def close(self) -> None:
        self._stored = {}


class GgufCheckpoint(FileCheckpoint):
    """Its directory is a temporary one, with the config that is in the file, and the tokenizer once it is asked for."""

    def __init__(self, source: str, path: Path) -> None:
        file = GgufFile(path)
        self._made = TemporaryDirectory(prefix="mergestream-")
        super().__init__(source, Path(self._made.name), [file])
        self._file = file
        (Path(self._made.name) / "config.json").write_text(json.dumps(file.config, indent=1) + "\n", encoding="utf-8")
        if quantised := sorted(file.types - _PLAIN):
            self.note = (
                f"{source} is quantised ({', '.join(quantised)}) and was dequantised to float32: differences contain "
                "what its rounding has changed"
            )

    def companions(self) -> Iterator[Path]:
        import transformers

        place = {"pretrained_model_name_or_path": self._file.path.parent, "gguf_file": self._file.path.name}
        # A file without a tokenizer, or with one that transformers does not know: the model goes without it.
        with suppress(Exception), quiet_and_offline(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                **place, local_files_only=True, trust_remote_code=False
            )
            tokenizer.save_pretrained(self._made.name)
        return super().companions()

    def _arguments(self) -> tuple[Any, ...]:
        return self.source, self._file.path

    def close(self) -> None:
        super().close()
        self._made.cleanup()


def _field(reader: Any, name: str) -> Any:
    """What the header says; None where it says nothing."""
    field = reader.get_field(name)
    return field.contents() if field else None


def _build(config: dict[str, Any]) -> Any:
    """The model without its weights."""
    import torch
    import transformers

    refuse_large_numbers(config)
    described = transformers.AutoConfig.for_model(**config)
    named = getattr(transformers, (described.architectures or [""])[0], None)
    with torch.device("meta"), few_modules():
        if named is not None:
            model = named(described)
        elif described.is_encoder_decoder:
            model = transformers.AutoModelForSeq2SeqLM.from_config(described)
        else:
            model = transformers.AutoModelForCausalLM.from_config(described)
        model.tie_weights()
    return model
