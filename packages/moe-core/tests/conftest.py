"""Distributions that exist only for a test: real metadata and modules in a folder on `sys.path`."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

InstallPlugin = Callable[..., Path]


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallPlugin:
    """Returns a function that puts a distribution with one entry point of `moe_core` on `sys.path`."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def install(distribution: str, module: str, source: str, version: str = "1.0") -> Path:
        (site / f"{module}.py").write_text(source)
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[moe_core]\n{distribution} = {module}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        return info

    return install
