"""Which tensors of a model training changes, and where they are."""

from __future__ import annotations

from torch import Tensor, nn

from mergestream.errors import UsageError

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Classes of torch around a model that hold it whole, and what they call it"""
_SHARDED = {"ds_id": "DeepSpeed ZeRO-3", "placements": "FSDP2 or tensor parallelism"}
"""By what a parameter has of which a process holds a part"""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, out of what DDP and torch.compile put around it."""
    while held := _WRAPPERS.get(type(model).__name__):
        model = getattr(model, held)
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All of them, tied ones once."""
    parameters, buffers = model.named_parameters(), model.named_buffers()
    return {name: tensor.detach() for found in (parameters, buffers) for name, tensor in found}


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that take a gradient, and floating-point buffers that are saved."""
    _refuse_sharded(model)
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not wanted:
        raise UsageError(f"no parameter of {type(model).__name__} takes a gradient; there is nothing to average")
    saved = model.state_dict().keys()
    wanted |= {name for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()}
    return {name: tensor for name, tensor in tensors(model).items() if name in wanted}


def _refuse_sharded(model: nn.Module) -> None:
    """Averaging parts would do as well, but nobody could evaluate or save them here."""
    by = next((who for p in model.parameters() for mark, who in _SHARDED.items() if hasattr(p, mark)), None)
    if by is None and any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        by = "FSDP"
    if by is not None:
        raise UsageError(
            f"the parameters are sharded by {by}, and only whole ones can be averaged while training; "
            "average the saved checkpoints instead: mergestream merge --method average"
        )
