"""The state of this rank's random number generators."""

import random
from typing import Any

import torch


def capture_rng(device_type: str) -> dict[str, Any]:
    """Python's and torch's generators, and the current device's where it has one of its own."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device_type != "cpu":
        state[device_type] = torch.get_device_module(device_type).get_rng_state()
    return state


def restore_rng(state: dict[str, Any], device_type: str) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if device_type in state:
        torch.get_device_module(device_type).set_rng_state(state[device_type])
