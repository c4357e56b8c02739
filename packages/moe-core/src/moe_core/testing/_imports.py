"""What a package's imports must not be: a circle, a package that it may not know, somebody else's private name."""

import ast
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class _Import(NamedTuple):
    """`from module import name`, or `import module` with no name."""

    line: int
    module: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def import_faults(package: str, *, may_import: Collection[str] = (), tests: Path | None = None) -> list[str]:
    """A line for each fault in the imports of an installed package, read from its source: nothing is imported.

    Imports inside functions and those under `TYPE_CHECKING` count like any other. A lazy `__init__` (one that looks its
    names up on first use) is on no circle. Another package of the project is one that offers plugins to the host.

    Args:
        package: its import name.
        may_import: other packages of the project that it may import. `_plugin.py` may import the host's
            `moe_core.plugins` and `moe_core.config` besides.
        tests: a folder whose files are searched too, for private names of other packages.
    """
    spec = find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.submodule_search_locations, f"{package} is a module, not a package"
    (root,) = map(Path, spec.submodule_search_locations)
    others = {point.value.partition(".")[0] for point in entry_points(group="moe_core")} - {package}
    files = {_module(package, path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}
    imports = {module: [*_imports(module, path)] for module, path in files.items()}
    faults = _circles(files, imports)
    for module, found in imports.items():
        of_host = ("moe_core.plugins", "moe_core.config") if files[module].name == "_plugin.py" else ()
        for one in found:
            if one.module.partition(".")[0] in others - set(may_import) and not str(one).startswith(of_host or ("-",)):
                faults.append(f"{files[module]}:{one.line}: {module} imports {one}, another package")
    searched = {**files, **{f"tests.{path.stem}": path for path in sorted(tests.rglob("*.py") if tests else ())}}
    return faults + [fault for module, path in searched.items() for fault in _private(module, path, others)]


def _module(package: str, relative: Path) -> str:
    parts = [package, *relative.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(module: str, path: Path) -> Iterator[_Import]:
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (_Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (_Import(node.lineno, source, alias.name) for alias in node.names)


def _circles(files: Mapping[str, Path], imports: Mapping[str, Collection[_Import]]) -> list[str]:
    ties: dict[str, dict[str, list[str]]] = {module: {} for module, path in files.items() if not _is_lazy(path)}
    for module in ties:
        for one in imports[module]:
            target, name = (str(one), "") if str(one) in files else (one.module, one.name)
            if target in ties and target != module:
                ties[module].setdefault(target, []).append(name or "the module")
    reached: dict[str, set[str]] = {}
    for module in ties:
        reached[module], ahead = set(), [*ties[module]]
        while ahead:
            if (target := ahead.pop()) not in reached[module]:
                reached[module].add(target)
                ahead += ties[target]
    circles = {frozenset(m for m in reached[module] if module in reached[m]) for module in ties}
    return [
        "circle: " + "; ".join(
            f"{module} -> {target} ({', '.join(names)})"
            for module in sorted(circle) for target, names in sorted(ties[module].items()) if target in circle
        )
        for circle in sorted(circles - {frozenset()}, key=sorted)
    ]  # fmt: skip


def _is_lazy(path: Path) -> bool:
    """An `__init__` that looks its names up on first use (PEP 562), and repeats them for type checkers."""
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.name == "__init__.py" else []
    return any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in body)


def _private(module: str, path: Path, others: Collection[str]) -> Iterator[str]:
    bound = set()
    for one in _imports(module, path):
        if one.module.partition(".")[0] in others:
            bound.add(one.name or one.module)
            if any(map(_is_private, str(one).split("."))):
                yield f"{path}:{one.line}: {module} imports {one}, a private name of another package"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Attribute) or not _is_private(node.attr):
            continue
        if (holder := ast.unparse(node.value)) in bound:
            yield f"{path}:{node.lineno}: {module} uses {holder}.{node.attr}, a private name of another package"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
