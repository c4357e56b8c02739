"""Import every module of an installed package, and run the examples of its README.

Run by the Python of an environment that has the package alone: `python -I check_package.py packages/NAME`.
Nothing but the standard library is imported here.
"""

import importlib
import importlib.util
import pkgutil
import re
import sys
from pathlib import Path


def main(package: Path) -> None:
    module = package.name.replace("-", "_")
    root = importlib.import_module(module)
    assert root.__file__ is not None
    assert "site-packages" in root.__file__, f"{module} comes from {root.__file__}, not from a wheel"
    assert importlib.util.find_spec("pytest") is None, "pytest is here: the environment is not isolated"
    for found in pkgutil.walk_packages(root.__path__, f"{module}."):
        if _needs_what_is_not_declared(found.name):
            continue
        importlib.import_module(found.name)
    blocks = re.findall(r"^```python\n(.*?)^```", (package / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert blocks, f"{package}/README.md has no example"
    for block in blocks:
        exec(compile(block, f"{package.name}/README.md", "exec"), {"__name__": "__main__"})
    print(f"{package.name}: every module imported, {len(blocks)} README example(s) run")


def _needs_what_is_not_declared(name: str) -> bool:
    """The plugin of a leaf is loaded by the host only, and `__main__` runs a command."""
    host_is_here = importlib.util.find_spec("moe_core") is not None
    cloudpickle_is_here = importlib.util.find_spec("cloudpickle") is not None
    if name.endswith("._plugin"):
        return not host_is_here
    if name.startswith("moe_core.testing"):
        return not cloudpickle_is_here
    return name.endswith("__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
