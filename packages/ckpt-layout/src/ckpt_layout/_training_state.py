"""What training has beside the model, taken and put back as it is: the optimizer's state, the random generators.

Going through the optimizer's state itself, and not through `torch.distributed.checkpoint.state_dict`, avoids that
module's hidden optimizer step: parameters that never had a gradient have no state and get none, a step
count of 0 stays 0, and gradients that are still there change nothing.
"""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from ckpt_layout._dcp import OPTIMIZER, stored_tensors
from ckpt_layout._errors import LayoutError


def optimizer_tensors(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Every state tensor as "optimizer/<parameter>/<key>"; `names` has parameters' names by `id`."""
    return {
        f"{OPTIMIZER}{_name(parameter, names)}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def optimizer_settings(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The parameter groups with names for parameters, and the state that is not tensors."""
    groups = [
        {**group, "params": [_name(parameter, names) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    others = {
        _name(parameter, names): {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for parameter, state in optimizer.state.items()
    }
    return {"groups": groups, "others": {name: values for name, values in others.items() if values}}


def check_groups(optimizer: Optimizer, names: Mapping[int, str], settings: Mapping[str, Any]) -> None:
    """The saved groups must have the parameters of these.

    Raises:
        LayoutError: they do not.
    """
    groups, saved = optimizer.param_groups, settings["groups"]
    if len(groups) != len(saved):
        raise LayoutError(f"the checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}")
    for index, (group, old) in enumerate(zip(groups, saved, strict=True)):
        mine, theirs = {_name(parameter, names) for parameter in group["params"]}, set(old["params"])
        if mine != theirs:
            raise LayoutError(
                f"parameter group {index} differs: only in the optimizer: {sorted(mine - theirs)}; "
                f"only in the checkpoint: {sorted(theirs - mine)}"
            )


def room_for_state(optimizer: Optimizer, names: Mapping[int, str], metadata: Metadata) -> dict[str, Tensor]:
    """A tensor for each state tensor that the checkpoint has, on the layout and device it will have here."""
    room = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            prefix = f"{OPTIMIZER}{_name(parameter, names)}/"
            for key, stored in stored_tensors(metadata, prefix).items():
                room[key] = _empty(stored, parameter, key.removeprefix(prefix), group)
    return room


def _empty(stored: TensorStorageMetadata, parameter: Tensor, key: str, group: Mapping[str, Any]) -> Tensor:
    dtype = stored.properties.dtype
    if stored.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # torch's optimizers count steps on the host unless a kernel reads the count
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.empty(stored.size, dtype=dtype, device="cpu" if on_host else parameter.device)


def restore_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> None:
    """Replace the optimizer's state and settings; a parameter without stored state has none afterwards."""
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, settings["groups"], strict=True):
        for key, value in saved.items():
            if key != "params":
                group[key] = _as_before(group.get(key), value)
        for parameter in group["params"]:
            name = _name(parameter, names)
            prefix = f"{OPTIMIZER}{name}/"
            state = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
            state |= settings["others"].get(name, {})
            if state:
                optimizer.state[parameter] = state


def _as_before(current: Any, saved: Any) -> Any:
    """A setting that is a tensor here stays that tensor, as a compiled step may hold on to it."""
    if isinstance(current, Tensor):
        return current.fill_(float(saved))
    return saved


def _name(parameter: Tensor, names: Mapping[int, str]) -> str:
    try:
        return names[id(parameter)]
    except KeyError:
        raise LayoutError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model: build the "
            "optimizer after the model is sharded"
        ) from None


def capture_rng(device_type: str) -> dict[str, Any]:
    """The state of this rank's generators: Python's, torch's, and the current device's where it has its own."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device_type != "cpu":
        state[device_type] = torch.get_device_module(device_type).get_rng_state()
    return state


def restore_rng(state: dict[str, Any], device_type: str) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if device_type in state:
        torch.get_device_module(device_type).set_rng_state(state[device_type])
