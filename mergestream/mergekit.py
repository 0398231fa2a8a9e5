"""Read mergekit recipes: base, models, weights and method.

mergekit ignores keys that it does not know. This module refuses them, and every setting that it cannot reproduce.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import asdict, replace

from mergestream import SLERP, Method, ModelStock, Weighted
from mergestream.commands import NUMBER
from mergestream.errors import UsageError, did_you_mean, package_needed
from mergestream.escaping import one_line

_SUMS = ("task_arithmetic", "ties", "dare_linear", "dare_ties")
_DROPS_AT_RANDOM = ("dare_linear", "dare_ties")
_ELECTS_SIGNS = ("ties", "dare_ties")
PARAMETERS: dict[str, tuple[str, ...]] = {
    "linear": ("weight", "normalize"),
    **dict.fromkeys(_SUMS, ("weight", "density", "normalize", "rescale", "lambda", "int8_mask")),
    "model_stock": ("filter_wise",),
    "slerp": ("t",),
}
"""The methods that are supported, each with its parameters"""
_MAX_BYTES, _MAX_ALIASES, _MAX_DEPTH, _MAX_TEXT = 1 << 17, 16, 16, 1000
"""Bounds of a recipe, so that none takes long to read; the last one is the length of one value"""
_NUMBER = re.compile(NUMBER, re.ASCII)
_UNSUPPORTED_KEYS = {
    "modules": "has a recipe for every module (modules); write one for the whole model",
    "chat_template": "sets a chat_template; remove it, and set it in the tokenizer of the merged model",
    "experts": "builds a mixture of experts (mergekit-moe), which does not merge weights",
    "genome": "searches for weights (mergekit-evolve); write a recipe with the weights it found",
}
STACKS = "layers of models can be stacked by mergekit only; here, slices must cover all layers of the same models"
_Finite = Annotated[float, Meta(ge=-1e150, le=1e150)]
_Name = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\ud800-\udfff]+\Z")]
"""Of a model: what a path or a hub id can be"""


@dataclass(frozen=True)
class Input:
    """A model that is merged into the base."""

    source: str
    weight: float
    density: float


@dataclass(frozen=True)
class Recipe:
    """A mergekit recipe as a base, experts and a method of this package."""

    merge_method: str
    method: Method
    base: str
    inputs: Sequence[Input]
    dtype: str | None
    notes: Sequence[str]
    """Where the result differs from mergekit's"""
    layers: int | None = None
    """How many layers its slices cover; None for a recipe without slices"""


class _Weight(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters that each model may have."""

    weight: _Finite | None = None
    density: Annotated[float, Meta(gt=0, le=1)] | None = None


class _Parameters(_Weight, frozen=True, forbid_unknown_fields=True, rename={"lambda_": "lambda"}):
    """The parameters for all models."""

    normalize: bool | None = None
    rescale: bool | None = None
    lambda_: _Finite = 1.0
    int8_mask: bool | None = None
    filter_wise: bool = False
    t: _Finite = 0.5


class _Model(Struct, frozen=True, forbid_unknown_fields=True):
    model: _Name
    parameters: _Weight = _Weight()
    layer_range: tuple[int, int] | None = None


class _Slice(Struct, frozen=True, forbid_unknown_fields=True):
    sources: list[_Model]


class _Tokenizer(Struct, frozen=True, forbid_unknown_fields=True):
    source: str = "union"


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    merge_method: str
    base_model: _Name | None = None
    models: list[_Model] | None = None
    slices: list[_Slice] | None = None
    parameters: _Parameters = _Parameters()
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer_source: str | None = None
    tokenizer: _Tokenizer | None = None


def read_recipe(path: Path, seed: int = 0) -> Recipe:
    """Read a YAML recipe; every error names the file."""
    try:
        return _make_recipe(_validate(_parse(path)), seed)
    except UsageError as error:
        raise UsageError(f"{path} {error}") from error
    except OSError as error:
        raise UsageError(f"{path} names a model that cannot be opened: {error.strerror}") from error


def _parse(path: Path) -> Any:
    with package_needed("a recipe", "mergekit"):
        import yaml

    def number(_: Any, node: Any) -> Any:  # YAML takes 12:30:45 and 1_0 for numbers too
        return float(node.value) if _NUMBER.fullmatch(node.value) else node.value

    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    for kind in ("int", "float", "timestamp"):
        loader.add_constructor(f"tag:yaml.org,2002:{kind}", number)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise UsageError(f"is no recipe: it is longer than {_MAX_BYTES} bytes")
        aliases = depth = 0
        for event in yaml.parse(content.decode(), Loader=loader):
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            is_long = isinstance(event, yaml.ScalarEvent) and len(event.value) > _MAX_TEXT
            if aliases > _MAX_ALIASES or depth > _MAX_DEPTH or is_long:
                what = f"a value of more than {_MAX_TEXT} characters" if is_long else "too many aliases or levels"
                raise UsageError(f"has {what} (line {event.start_mark.line + 1})")
        return loader(content.decode()).get_single_data()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise UsageError(f"is not the YAML of one recipe{where}; write each recipe to its own file") from error


def _validate(content: Any) -> _File:
    """Refuse what is no recipe, keys that are not supported, and other methods."""
    for key in (content if isinstance(content, dict) else {}).keys() & _UNSUPPORTED_KEYS.keys():
        raise UsageError(_UNSUPPORTED_KEYS[key])
    try:
        found = convert(content, _File, strict=False)
    except ValidationError as error:
        hint = "; give one number for all layers and tensors" if "Expected `float" in str(error) else ""
        raise UsageError(f"is no recipe that is supported: {one_line(str(error))}{hint}") from error
    name = found.merge_method
    if name not in PARAMETERS:
        raise UsageError(f"merges by {name}{did_you_mean(name, PARAMETERS)} (supported: {', '.join(PARAMETERS)})")
    return found


def _models(content: _File) -> tuple[list[_Model], int | None]:
    """The models; where they are given as slices of the same models, also how many layers they cover."""
    models, covered = content.models, None
    for part in content.slices or ():
        start, end = covered or 0, (part.sources[0].layer_range or (0, 0))[1] if part.sources else 0
        sources = [replace(source, layer_range=None) for source in part.sources]
        if models not in (None, sources) or any(each.layer_range != (start, end) for each in part.sources):
            raise UsageError(f"has slices that stack layers: {STACKS}")
        models, covered = sources, end
    if not models:
        raise UsageError("has no list of models")
    return models, covered


def _make_recipe(content: _File, seed: int) -> Recipe:
    name, shared = content.merge_method, content.parameters
    (listed, layers), models = _models(content), dict[str, _Weight]()
    for parameters in (shared, *(entry.parameters for entry in listed)):
        default = asdict(_Parameters())
        given = {key.rstrip("_") for key, value in asdict(parameters).items() if value != default[key]}
        if unknown := given.difference(PARAMETERS[name]):
            raise UsageError(f"has the parameter {min(unknown)}, which {name} does not take")
    for entry in listed:
        if entry.model in models:
            raise UsageError(f"lists {entry.model} twice")
        models[entry.model] = entry.parameters
    base = _base(content, list(models))
    tokenizer = content.tokenizer.source if content.tokenizer else content.tokenizer_source
    if tokenizer not in (None, "base", base):
        raise UsageError(f"takes the tokenizer of {tokenizer}; only the base's is supported: tokenizer_source: base")
    own_of_base = models.pop(base, None)
    if not models:
        raise UsageError("merges nothing into its base; list other models under models")
    if name == "slerp" or (name == "linear" and (own_of_base is not None or content.base_model is not None)):
        models = {base: own_of_base or _Weight(), **models}
    inputs = []
    for model, own in models.items():
        weight = shared.weight if own.weight is None else own.weight
        if weight is None and "weight" in PARAMETERS[name]:
            raise UsageError(f"has no weight for {model}, which {name} needs")
        inputs.append(Input(_source(model, base), weight or 0.0, own.density or shared.density or 1.0))
    dtype = (content.out_dtype or content.dtype or "").removeprefix("torch.") or None
    return Recipe(
        name, _make_method(name, inputs, shared, seed), base, inputs, dtype, _notes(name, inputs, shared), layers
    )


def _base(content: _File, models: Sequence[str]) -> str:
    """The base_model; linear may take any model instead, because a mean is the same from every starting point."""
    if (base := content.base_model) is not None:
        if len(_split_adapter(base)) > 1:
            raise UsageError(f"has an adapter in its base_model {base}; merge it into the model first")
        return base
    if content.merge_method != "linear":
        raise UsageError(f"has no base_model, which {content.merge_method} needs")
    return _split_adapter(models[0])[0]


def _source(model: str, base: str) -> str:
    """The model, or the adapter of MODEL+ADAPTER, whose MODEL must be the base."""
    whole, *adapter = _split_adapter(model)
    if not adapter:
        return model
    if len(adapter) > 1:
        raise UsageError(f"lists {model}, with more than one adapter")
    if whole != base and not (Path(whole).exists() and Path(whole).resolve() == Path(base).resolve()):
        raise UsageError(f"has an adapter of {whole} in {model}, but the base is {base}; merge it into {whole} first")
    return adapter[0]


def _split_adapter(model: str) -> list[str]:
    return [model] if Path(model).exists() else model.split("+")


def _make_method(name: str, inputs: Sequence[Input], shared: _Parameters, seed: int) -> Method:
    if name == "slerp":
        if len(inputs) != 2:
            raise UsageError(f"merges {len(inputs)} models by slerp, which is for two: the base_model and another one")
        return SLERP(shared.t)
    if name == "model_stock":
        if shared.filter_wise:
            raise UsageError("has filter_wise: true, but model_stock works on whole tensors here")
        return ModelStock()
    weights = [given.weight for given in inputs]
    normalize = name in ("linear", "ties") if shared.normalize is None else shared.normalize
    if name == "linear":
        total = math.fsum(weights)
        if normalize and abs(total) < 1e-8:
            raise UsageError("has weights whose sum is 0, which cannot be normalized")
        if not normalize and abs(total - 1) > 1e-6:
            raise UsageError(f"has normalize: false and weights whose sum is {total:g}; the sum must be 1")
        return Weighted(_comma_separated([weight / total for weight in weights]))
    if shared.rescale and name == "ties":
        raise UsageError("has rescale: true, but ties does not rescale a trimmed task vector here")
    is_random = name in _DROPS_AT_RANDOM
    return Weighted(
        _comma_separated(weights),
        _comma_separated([given.density for given in inputs]) if name != "task_arithmetic" else "1",
        "random" if is_random else "largest",
        elect=name in _ELECTS_SIGNS,
        normalize=normalize,
        rescale=is_random and shared.rescale is not False,
        scale=shared.lambda_,
        seed=seed if is_random else 0,
    )


def _comma_separated(numbers: Sequence[float]) -> str:
    """Numbers as `Weighted` parses them, without rounding."""
    return ",".join(map(repr, numbers))


def _notes(name: str, inputs: Sequence[Input], shared: _Parameters) -> list[str]:
    notes = []
    is_sparse = any(given.density < 1 for given in inputs)
    if shared.int8_mask is not None:
        notes.append("int8_mask has no effect: no mask is kept in memory")
    if name == "task_arithmetic" and is_sparse:
        notes.append("density has no effect on task_arithmetic, as in mergekit")
    if name in _DROPS_AT_RANDOM and is_sparse:
        notes.append("--seed chooses which elements are dropped, and mergekit would choose others")
    return notes
