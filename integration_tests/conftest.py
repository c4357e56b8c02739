"""The device under test: gloo on the CPU, or NCCL where `MOE_TEST_DEVICE=cuda` says so."""

import os

import pytest


@pytest.fixture(scope="session")
def device_type() -> str:
    return os.environ.get("MOE_TEST_DEVICE", "cpu")
