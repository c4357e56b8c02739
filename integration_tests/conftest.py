"""The device under test: gloo on the CPU, or what `MOE_TEST_DEVICE` says, with one device a rank."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_core.testing import run_ranks


@pytest.fixture(scope="session")
def device_type() -> str:
    return os.environ.get("MOE_TEST_DEVICE", "cpu")


@pytest.fixture(scope="session")
def on_ranks(device_type: str) -> Callable[..., list[Any]]:
    """`run_ranks` on the device under test; a test that needs more devices than there are is skipped."""

    def on_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300) -> list[Any]:
        if device_type != "cpu" and world_size > (found := torch.accelerator.device_count()):
            # on the CPU any number of ranks runs, so nothing is skipped there
            pytest.skip(f"needs {world_size} devices, and there are {found}")
        return run_ranks(fn, world_size, *args, timeout=timeout, device_type=device_type)

    return on_ranks
