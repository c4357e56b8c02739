"""All that is done with this repository, as sessions: `nox -l` lists them, `nox -s demo` runs one.

The packages are found in `packages/`; nothing about them is repeated here. Sessions that need torch share one
environment, since torch takes 20 s and 0.9 GB to install. The isolated environments, one per package, share
another one that has torch and nothing else, through a `.pth` file.
"""

import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
WORK = ROOT / ".nox"
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
SHARED = WORK / "shared"
TORCH_ONLY = WORK / "torch-only"


@nox.session(venv_location=str(SHARED), reuse_venv=True)
def demo(session: nox.Session) -> None:
    """Train the tiny model with ep = 1 and ep = 2, then validate, save, resume, export and generate."""
    _install_all(session)
    one, two = "runs/demo-ep1", "runs/demo"
    for folder in (one, two):
        shutil.rmtree(ROOT / folder, ignore_errors=True)
    train = ("nemotron-nano", "train", "configs/demo.toml", "--nproc", "2")
    session.run(*train, "mesh.ep=1", "run.name=demo-ep1")
    session.run(*train)
    session.run(*train, "run.steps=125", "--resume")
    session.run("nemotron-nano", "export", two)
    session.run("nemotron-nano", "generate", two, "--prompt", "def ", "--max-new-tokens", "80")
    session.run("nemotron-nano", "report", two, one)


@nox.session(venv_location=str(SHARED), reuse_venv=True)
def tests(session: nox.Session) -> None:
    """Every test there is that needs no GPU; arguments go to pytest and leave out the isolated packages."""
    _install_all(session)
    if session.posargs:
        session.run("pytest", *session.posargs)
        return
    session.run("pytest", "packages", "integration_tests")
    _check_isolated(session)


@nox.session(venv_location=str(SHARED), reuse_venv=True)
def integration(session: nox.Session) -> None:
    """The packages together, on gloo."""
    _install_all(session)
    session.run("pytest", "integration_tests", *session.posargs)


@nox.session(venv_location=str(SHARED), reuse_venv=True)
def gpu_integration(session: nox.Session) -> None:
    """The same files on NCCL; needs two GPUs, and fails where there are fewer."""
    _install_all(session)
    session.run("python", "integration_tests/require_gpus.py", "2")
    session.run("pytest", "integration_tests", *session.posargs, env={"MOE_TEST_DEVICE": "cuda"})


@nox.session(venv_location=str(SHARED), reuse_venv=True)
def isolation(session: nox.Session) -> None:
    """Each package's wheel alone, with only what it declares: imports every module, runs its README."""
    session.install(*CONSTRAINTS, "hatchling")
    _check_isolated(session)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    session.install(*CONSTRAINTS, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_location=str(SHARED), reuse_venv=True)
def types(session: nox.Session) -> None:
    """Mypy, strict, on every package."""
    _install_all(session)
    session.install(*CONSTRAINTS, "mypy")
    for package in PACKAGES:
        session.run("mypy", str(package / "src"))


@nox.session(venv_location=str(SHARED), reuse_venv=True)
def bench(session: nox.Session) -> None:
    """Benchmarks: all, or those whose path contains the argument."""
    _install_all(session)
    scripts = [*ROOT.glob("packages/*/benchmarks/*.py"), *ROOT.glob("integration_tests/benchmarks/*.py")]
    chosen = [s for s in sorted(scripts) if all(word in str(s.relative_to(ROOT)) for word in session.posargs)]
    if not chosen:
        session.error(f"no benchmark matches {session.posargs}; there are: {[str(s) for s in sorted(scripts)]}")
    for script in chosen:
        session.run("python", str(script))


def _install_all(session: nox.Session) -> None:
    """All packages, editable, with what their tests need."""
    session.install(*CONSTRAINTS, "hatchling", "editables")
    editable = [word for package in PACKAGES for word in ("-e", f"{package}[test]")]
    session.install(*CONSTRAINTS, "--no-build-isolation", *editable)


def _check_isolated(session: nox.Session) -> None:
    base = _torch_only_base(session)
    wheels = WORK / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    sources = [str(package) for package in PACKAGES]
    session.run("pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), *sources)
    for package in PACKAGES:
        python = _isolated(session, package.name, base, wheels)
        session.run(python, "-I", "integration_tests/isolation/check_package.py", str(package), external=True)


def _torch_only_base(session: nox.Session) -> Path:
    """The site-packages of an environment that has torch and what torch needs."""
    python = TORCH_ONLY / "bin" / "python"
    if not python.exists():
        session.run(sys.executable, "-m", "venv", str(TORCH_ONLY), external=True)
    session.run(str(python), "-m", "pip", "install", "-q", *CONSTRAINTS, "torch", external=True)
    (site,) = TORCH_ONLY.glob("lib/python*/site-packages")
    return site


def _isolated(session: nox.Session, name: str, base: Path, wheels: Path) -> str:
    """An environment with the wheel of one package and its declared needs over the torch-only base."""
    folder = WORK / "isolated" / name
    shutil.rmtree(folder, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", "--without-pip", str(folder), external=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch_only_base.pth").write_text(f"{base}\n")
    python = str(folder / "bin" / "python")
    install = ("pip", "--python", python, "install", "-q", *CONSTRAINTS, "--find-links", str(wheels))
    session.run(*install, name)
    return python
