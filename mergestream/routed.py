"""`RoutedModel`: one copy of the base, an adapter per expert, and a router that chooses the adapter of each input.

It loads what ``export --format routed`` has written, by transformers, without remote code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from mergestream.checkpoints import open_checkpoint
from mergestream.checkpoints.layout import MARKER
from mergestream.checkpoints.location import Location
from mergestream.digest import combined_digest, tensor_digest
from mergestream.errors import MergestreamError
from mergestream.experts.adapters.adapter import open_adapter
from mergestream.export.routed import EXPERTS, MERGED, ROUTER, base_of, read_router
from mergestream.files import read_json
from mergestream.inputs.loading import load_model, load_processor, read_weights
from mergestream.inputs.reading import Sample, explained
from mergestream.inputs.running import Runner

if TYPE_CHECKING:
    from mergestream.ledger.routing import Router

FALLBACK = 0.05
"""The share of inputs like those of the experts that the merged adapter answers, because the router is unsure"""


class Route(NamedTuple):
    """Where an input goes."""

    expert: str
    """The expert that the input looks most like"""
    confidence: float
    """The probability of that expert, by the router"""
    adapter: str
    """The adapter that answers: the expert's, or ``merged`` below the threshold"""


class RoutedModel:
    """One copy of the base in memory, an adapter per expert, a merged adapter, and a router.

    One forward pass of the base decides for each input of a batch which adapter answers it. It serves one call at a
    time: threads have to take turns.
    """

    def __init__(self, adapters: Adapters, runner: Runner, experts: Sequence[str], router: Router | None) -> None:
        """`from_pretrained` makes one."""
        self._adapters, self._runner, self._router = adapters, runner, router
        self._directions = {} if router else adapters.directions(experts)
        self.experts = tuple(experts)
        self.threshold = 0.0
        """Below this confidence the merged adapter answers"""

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        base: str | Path | None = None,
        device: str = "cpu",
        fallback: float = FALLBACK,
    ) -> RoutedModel:
        """Load what ``export --format routed`` has written: a directory, or ``[hf://]org/name[@revision]`` on the hub.

        ``base`` is where the base is, if it is neither in the directory nor where it was. The merged adapter answers
        where the router is less confident than on all but this share (``fallback``) of inputs like the experts' own;
        a router that was made without inputs does not know that, and never uses it unless ``threshold`` is set.
        """
        directory = _locate(directory)
        if not (directory / ROUTER).is_file():
            raise MergestreamError(f"{directory} has no {ROUTER}; write one with mergestream export --format routed")
        if not 0 <= fallback <= 1:
            raise MergestreamError(f"fallback is a share from 0 to 1, not {fallback:g}")
        experts, router, quantiles = read_router(directory / ROUTER)
        with open_checkpoint(base or base_of(directory)) as opened:
            weights = read_weights(opened)
            _check_base(directory, opened.source, weights)
            model = load_model(opened.directory, opened.source, weights, device, attention="sdpa")
            runner = Runner(model, load_processor(opened.directory), device=device)
        adapters = Adapters(model)
        for name in experts:
            adapters.load(name, directory / EXPERTS / name)
        adapters.load(MERGED, directory / MERGED)
        routed = cls(adapters, runner, experts, router)
        if quantiles is not None and fallback:
            routed.threshold = float(quantiles[round(fallback * (len(quantiles) - 1))])
        return routed

    def __repr__(self) -> str:
        return f"<RoutedModel: {', '.join(self.experts)}, threshold {self.threshold:.3g}>"

    @property
    def processor(self) -> Any:
        """The base's tokenizer or processor; None where it has none."""
        return self._runner.processor

    # --- routing

    def route(self, inputs: Mapping[str, Any] | Sequence[Any]) -> list[Route]:
        """Find the expert of each input: named tensors that the model takes, or texts, images and conversations
        (``{"messages": […]}``), which the base's processor reads."""
        with torch.no_grad(), self._adapters.active(None):
            scores = self._by_features(inputs) if self._router else self._by_directions(inputs)
        confidences, best = scores.max(1)
        found = []
        for number, confidence in zip(best.tolist(), confidences.tolist(), strict=True):
            expert = self.experts[number]
            found.append(Route(expert, confidence, MERGED if confidence < self.threshold else expert))
        return found

    def _by_features(self, inputs: Mapping[str, Any] | Sequence[Any]) -> Tensor:
        """The probability of each expert for each input, by the base's pooled features."""
        assert self._router is not None
        rows = []
        for sample in _samples(inputs, by_row=False):
            features = self._runner.features(sample)
            if features is None or features.shape[1] != self._router.weights.shape[1]:
                raise MergestreamError(
                    f"{sample.where} has not the features that the router was made of; calibrate the experts with "
                    "inputs that transformers runs, and export again"
                )
            rows.append(features)
        return self._router.scores(torch.cat(rows)).softmax(1)

    def _by_directions(self, inputs: Mapping[str, Any] | Sequence[Any]) -> Tensor:
        """The share of each expert in the energy of the layers' inputs along all experts' input directions."""
        energies: list[Tensor] = []
        with ExitStack() as hooks:
            for layer, directions in self._directions.items():

                def measure(_: nn.Module, args: Any, directions: Sequence[Tensor] = directions) -> None:
                    energies.append(_energy(args[0], directions))

                hooks.callback(layer.register_forward_pre_hook(measure).remove)
            rows = []
            for sample in _samples(inputs, by_row=True):
                energies.clear()
                self._runner.features(sample)
                rows.append(torch.stack(energies).mean(0))
        found = torch.stack(rows)
        return found / found.sum(1, keepdim=True)

    # --- answers

    def generate(self, *, routes: Sequence[Route] | None = None, **arguments: Any) -> Tensor:
        """Like ``generate`` of transformers, in the order of the inputs; shorter answers are padded at their end.

        ``routes`` are those of `route`, if they are known already.
        """
        rows, outputs = self._run(self._adapters.model.generate, arguments, routes)
        if len(outputs) == 1:
            whole: Tensor = outputs[0]
            return whole
        if not all(isinstance(output, Tensor) for output in outputs):
            raise MergestreamError("return_dict_in_generate needs inputs of one expert: call generate for each route")
        longest = max(output.shape[1] for output in outputs)
        return _in_order(rows, [pad(output, (0, longest - output.shape[1]), value=self._padding) for output in outputs])

    def forward(self, *, routes: Sequence[Route] | None = None, **arguments: Any) -> Any:
        """The model's output, in the order of the inputs, without gradients.

        If several adapters answer, it has only what is one row per input: no loss and no cache.
        """
        with torch.no_grad():
            rows, outputs = self._run(self._adapters.model, arguments, routes)
        return outputs[0] if len(outputs) == 1 else _joined(rows, outputs)

    __call__ = forward

    def _run(
        self, call: Any, arguments: Mapping[str, Any], routes: Sequence[Route] | None
    ) -> tuple[list[list[int]], list[Any]]:
        """Call the model once for each adapter; returns for each call the rows of the batch and their output."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.ndim}
        if not tensors:
            raise MergestreamError("there is no tensor among the arguments; pass them by name, as to the model itself")
        count = len(tensors.get(self._adapters.model.main_input_name, next(iter(tensors.values()))))
        batch = {name: value for name, value in tensors.items() if len(value) == count}
        if routes is None:
            routes = self.route({name: value for name, value in batch.items() if name != "labels"})
        if len(routes) != count:
            raise MergestreamError(f"there are {count} inputs, but {len(routes)} routes")
        groups: dict[str, list[int]] = {}
        for row, route in enumerate(routes):
            groups.setdefault(route.adapter, []).append(row)
        outputs = []
        for adapter, rows in groups.items():
            with self._adapters.active(adapter):
                part = {name: value[rows].to(self._runner.device) for name, value in batch.items()}
                outputs.append(call(**{**arguments, **part}))
        return list(groups.values()), outputs

    @property
    def _padding(self) -> int:
        config = self._adapters.model.generation_config
        found = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
        return int((found[0] if isinstance(found, list) else found) or 0)


class Adapters:
    """A model of transformers with LoRA adapters, one of which is active at a time, or none.

    Hooks add x·(B·A)ᵀ to the outputs of layers. Parameters that an adapter holds whole (biases, norms) are exchanged.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._factors: dict[str, dict[nn.Module, tuple[Tensor, Tensor]]] = {}
        """By adapter and layer: A and B"""
        self._whole: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
        self._layers: dict[Any, list[nn.Module]] = defaultdict(list)
        """By weight: the layers that use it, such as an embedding and the head that is tied to it"""
        for layer in model.modules():
            self._layers[getattr(layer, "weight", None)].append(layer)

    def load(self, name: str, directory: Path) -> None:
        """Load an adapter from its directory."""
        factors, whole = self._factors.setdefault(name, {}), self._whole.setdefault(name, [])
        adapter = open_adapter(Location(directory, str(directory)))
        with closing(adapter), explained(f"{directory} does not fit the base"):
            for path, keys in adapter.factors.items():
                weight = self.model.get_submodule(path).weight
                placed = weight.device, torch.promote_types(weight.dtype, torch.float32)
                a, b = (adapter.weights.read(key).to(*placed) for key in (keys.a, keys.b))
                b *= adapter.config.scaling(path)
                if weight.shape not in ((len(b), *a.shape[1:]), (a.shape[1], len(b))):
                    raise ValueError(f"{path}.weight has another shape there")
                for layer in self._layers[weight]:
                    is_turned = isinstance(layer, nn.Embedding) != keys.is_embedding
                    factors[layer] = (b.T, a.T) if is_turned else (a, b)
            for path, key in adapter.whole.items():
                parameter, value = self.model.get_parameter(path), adapter.weights.read(key)
                if parameter.shape != value.shape:
                    raise ValueError(f"{path} has another shape there")
                whole.append((parameter, value.to(parameter)))

    @contextmanager
    def active(self, name: str | None) -> Iterator[None]:
        """Use one adapter, or the base alone, for a block."""
        with ExitStack() as undo:
            for layer, (a, b) in self._factors.get(name or "", {}).items():
                undo.callback(layer.register_forward_hook(partial(_add_change, a, b)).remove)
            for parameter, value in self._whole.get(name or "", []):
                undo.callback(setattr, parameter, "data", parameter.data)
                parameter.data = value
            yield

    def directions(self, names: Sequence[str]) -> dict[nn.Module, list[Tensor]]:
        """The linear layers that all of these adapters change, with their input directions, one per row."""
        first, *others = (self._factors[name] for name in names)
        common = [layer for layer in first if all(layer in factors for factors in others)]
        return {
            layer: [_unit_rows(factors[layer][0]) for factors in (first, *others)]
            for layer in common
            if not isinstance(layer, nn.Embedding) and first[layer][0].ndim == 2  # a convolution has more
        }


def _add_change(a: Tensor, b: Tensor, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output of a layer whose weight has changed by B·A."""
    x = inputs[0]
    if isinstance(layer, nn.Embedding):
        change = embedding(x, a.T) @ b.T * getattr(layer, "embed_scale", 1)
    elif a.ndim == 2:
        change = x.to(a.dtype) @ a.T @ b.T
    else:
        change = layer._conv_forward(x.to(a.dtype), (b.flatten(1) @ a.flatten(1)).view_as(layer.weight), None)
    return output + change.to(output.dtype)


def _locate(directory: str | Path) -> Path:
    """A directory on this machine, or the download of a repository on the hub."""
    path = Path(directory).expanduser()
    repository, _, revision = str(directory).removeprefix("hf://").partition("@")
    if path.exists() or repository.count("/") != 1:
        return path
    with explained(f"{directory} is no directory here, and cannot be downloaded from the hub"):
        from huggingface_hub import snapshot_download

        files = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=files))


def _check_base(directory: Path, source: str, weights: Mapping[str, Tensor]) -> None:
    """Refuse another base than the one that the adapters belong to, if the store has read that one."""
    known = read_json(directory / MARKER).get("base", {}).get("digest")
    if known and known != combined_digest({name: tensor_digest(value) for name, value in weights.items()}):
        raise MergestreamError(
            f"{source} is not the base of the adapters in {directory}, or was changed or converted since; pass base=… "
            "with the one they were made for"
        )


def _unit_rows(factor: Tensor) -> Tensor:
    """V_iᵀ: the rows of A = Σ^½ Vᵀ are orthogonal, and zero where they only pad its rank."""
    rows = factor.detach()
    norms: Tensor = rows.norm(dim=1)
    return rows[norms > 0] / norms[norms > 0, None]


def _energy(x: Tensor, directions: Sequence[Tensor]) -> Tensor:
    """n/k · ‖x V_i‖²/‖x‖² for each expert i with k directions: 1 for an input without any preference."""
    rows = x.detach().reshape(-1, x.shape[-1]).float()
    energies = [(rows @ v.float().T).square().sum() * v.shape[1] / max(1, len(v)) for v in directions]
    return torch.stack(energies).double().cpu() / max(float(rows.square().sum()), torch.finfo(torch.float32).tiny)


def _samples(inputs: Mapping[str, Any] | Sequence[Any], by_row: bool) -> Iterator[Sample]:
    """The inputs as samples: a batch of tensors is one of them, or one for each of its rows."""
    if isinstance(inputs, Mapping) and all(isinstance(value, Tensor) for value in inputs.values()):
        count = len(next(iter(inputs.values()))) if by_row else 1
        for row in range(count):
            value = {name: tensor[row : row + 1] if by_row else tensor for name, tensor in inputs.items()}
            yield Sample(value, f"input {row + 1}" if by_row else "the batch")
        return
    for number, item in enumerate([inputs] if isinstance(inputs, str | Mapping) else inputs, 1):
        if not isinstance(item, Mapping):
            item = {"text" if isinstance(item, str) else "image": item}
        yield Sample(item, f"input {number}")


def _joined(rows: Sequence[Sequence[int]], outputs: Sequence[Any]) -> Any:
    """Outputs of parts of a batch as one; None for what is not one row per input."""
    first = outputs[0]
    if isinstance(first, dict):
        return type(first)({name: _joined(rows, [output[name] for output in outputs]) for name in first})
    if isinstance(first, tuple | list):
        return tuple(_joined(rows, parts) for parts in zip(*outputs, strict=True))
    if not all(isinstance(output, Tensor) and output.ndim for output in outputs):
        return None
    fits = all(
        len(output) == len(part) and output.shape[1:] == first.shape[1:]
        for part, output in zip(rows, outputs, strict=True)
    )
    return _in_order(rows, outputs) if fits else None


def _in_order(rows: Sequence[Sequence[int]], parts: Sequence[Tensor]) -> Tensor:
    """Put rows back into the order of the batch; each input may have several, one after another."""
    several = len(parts[0]) // len(rows[0])
    places = torch.tensor([several * row + copy for part in rows for row in part for copy in range(several)])
    joined = torch.cat(list(parts))
    return torch.empty_like(joined).index_copy_(0, places.to(joined.device), joined)
