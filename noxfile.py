"""All that is done with this repository, as sessions: `nox -l` lists them, `nox -s demo` runs one.

The packages are found in `packages/`; nothing about them is repeated here. Torch takes 20 s and 0.9 GB to install, so
the sessions that need it share one environment, and the isolated environments, one per package, share another one
that has torch and nothing else, through a `.pth` file.
"""

import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "venv"

ROOT = Path(__file__).parent
WORK = ROOT / ".nox"
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
TWO_AT_A_TIME = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
"""In the order that is given; xdist would begin with the files that have the most tests, not with the longest."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For each of the two: threads of one that wait at a barrier for a core spin on it, and took 20 times as long."""
SHARED = WORK / "shared"
TORCH_ONLY = WORK / "torch-only"


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train the tiny model with ep = 1 and ep = 2, then validate, save, resume, export and generate."""
    python = _all_packages(session)
    one, two = "runs/demo-ep1", "runs/demo"
    for folder in (one, two):
        shutil.rmtree(ROOT / folder, ignore_errors=True)

    def nemotron(*words: str) -> None:
        session.run(python, "-m", "nemotron_nano", *words, external=True)

    train = ("train", "configs/demo.toml", "--nproc", "2")
    nemotron(*train, "mesh.ep=1", "run.name=demo-ep1")
    nemotron(*train)
    nemotron(*train, "--resume", "run.steps=125")
    nemotron("export", two)
    nemotron("generate", two, "--prompt", "def ", "--max-new-tokens", "80")
    nemotron("report", two, one)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every test that needs no GPU; arguments go to pytest, and then the isolated packages are left out."""
    python = _all_packages(session)
    if session.posargs:
        session.run(python, "-m", "pytest", *session.posargs, external=True)
        return
    # the longest files first, so that neither of the two waits for the other at the end
    tests = (*TWO_AT_A_TIME, "integration_tests", "packages")
    session.run(python, "-m", "pytest", *tests, external=True, env=ONE_THREAD)
    _check_isolated(session, python)


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """The packages together, on gloo."""
    python = _all_packages(session)
    session.run(python, "-m", "pytest", "integration_tests", *session.posargs, external=True)


@nox.session(venv_backend="none")
def gpu_integration(session: nox.Session) -> None:
    """The same files on two or more GPUs; where there are fewer it fails."""
    python = _all_packages(session)
    session.run(python, "integration_tests/require_gpus.py", "2", external=True)
    device = {"MOE_TEST_DEVICE": "cuda"}
    session.run(python, "-m", "pytest", "integration_tests", *session.posargs, external=True, env=device)


@nox.session(venv_backend="none")
def isolation(session: nox.Session) -> None:
    """Each package's wheel alone, with only what it declares: imports every module, runs its README."""
    _check_isolated(session, _all_packages(session))


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    session.install("-q", *CONSTRAINTS, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy, strict, on every package."""
    python = _all_packages(session)
    sources = [str(package / "src") for package in PACKAGES]
    session.run(python, "-m", "mypy", *sources, external=True)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Benchmarks: all, or those whose path contains the arguments."""
    scripts = sorted([*ROOT.glob("packages/*/benchmarks/*.py"), *ROOT.glob("integration_tests/benchmarks/*.py")])
    names = [str(script.relative_to(ROOT)) for script in scripts]
    chosen = [name for name in names if all(word in name for word in session.posargs)]
    if not chosen:
        session.error(f"no benchmark matches {session.posargs}; there are: {', '.join(names) or 'none'}")
    python = _all_packages(session)
    for name in chosen:
        session.run(python, name, external=True)


def _all_packages(session: nox.Session) -> str:
    """The Python of the shared environment: all packages, editable, with what their tests and checks need."""
    python = _environment(session, SHARED)
    pip = (python, "-m", "pip", "install", "-q", *CONSTRAINTS)
    session.run(*pip, "hatchling", "editables", "mypy", "pytest-xdist", external=True)
    # pip finds moe-core[testing], which other extras ask for, only where moe-core itself is named without an extra
    named = [str(package) for package in PACKAGES] + [f"{package}[test]" for package in PACKAGES]
    editable = [word for path in named for word in ("-e", path)]
    session.run(*pip, "--no-build-isolation", *editable, external=True)
    return python


def _environment(session: nox.Session, folder: Path, *options: str) -> str:
    python = folder / "bin" / "python"
    if not python.exists():
        session.run(sys.executable, "-m", "venv", *options, str(folder), external=True)
    return str(python)


def _check_isolated(session: nox.Session, builder: str) -> None:
    """`builder` is a Python with pip and the build backend."""
    base = _environment(session, TORCH_ONLY)
    session.run(base, "-m", "pip", "install", "-q", *CONSTRAINTS, "torch", external=True)
    wheels = WORK / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    sources = [str(package) for package in PACKAGES]
    build = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels))
    session.run(builder, "-m", "pip", *build, *sources, external=True)
    for package in PACKAGES:
        python = _isolated(session, builder, package.name, wheels)
        session.run(python, "-I", "integration_tests/isolation/check_package.py", str(package), external=True)


def _isolated(session: nox.Session, builder: str, name: str, wheels: Path) -> str:
    """An environment with the wheel of one package and its declared needs over the torch-only base."""
    folder = WORK / "isolated" / name
    shutil.rmtree(folder, ignore_errors=True)
    python = _environment(session, folder, "--without-pip")
    (base,) = TORCH_ONLY.glob("lib/python*/site-packages")
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch_only_base.pth").write_text(f"{base}\n")
    install = ("install", "-q", *CONSTRAINTS, "--find-links", str(wheels), name)
    session.run(builder, "-m", "pip", "--python", python, *install, external=True)
    return python
