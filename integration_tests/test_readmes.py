"""The examples of every README run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/*.md"))]


def _examples():
    for path in READMES:
        text = path.read_text(encoding="utf-8")
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S), start=1):
            name = str(path.relative_to(ROOT))
            yield pytest.param(name, block, id=f"{name}-{number}")


@pytest.mark.parametrize(("name", "block"), [*_examples()])
def test_the_example_runs(name, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, name, "exec"), {"__name__": "__main__"})


def test_every_package_has_an_example():
    documented = {param.values[0] for param in _examples()}
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/README.md")} <= documented


def test_ci_runs_the_command_that_the_readme_names():
    commands = re.findall(r"^python -m pip install .*nox -s \w+$", (ROOT / "README.md").read_text(), re.M)
    assert [command.rsplit(maxsplit=1)[-1] for command in commands] == ["demo", "tests"]
    assert commands[1] in (ROOT / ".ci" / "run").read_text()
