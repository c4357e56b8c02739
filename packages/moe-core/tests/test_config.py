"""The loader: layers, types without coercion, all problems at once, and a dump that loads again."""

import sys
import types
from importlib.metadata import EntryPoint
from typing import Literal

import attrs
import pytest
from attrs import validators

from moe_core.config import ConfigError, load_config, validate
from moe_core.plugins import Component, Problem, Run, Selected, component_field, hookimpl, load_registry
from moe_core.plugins.kinds import TABLES


@attrs.frozen
class Inner:
    width: int = 3


@attrs.frozen
class Everything:
    count: int = attrs.field(default=1, validator=validators.ge(1))
    rate: float = 0.5
    flag: bool = False
    word: str = "w"
    choice: Literal["none", "full", "half"] = "full"
    maybe: int | None = 4
    several: tuple[int, ...] = (1, 2)
    pair: tuple[float, float] = (0.9, 0.95)
    nested: Inner = Inner()
    wrapped: Selected | None = component_field("loss")


@attrs.frozen
class Empty:
    pass


@attrs.frozen
class Needy:
    must: int


@pytest.fixture
def registry(monkeypatch):
    module = types.ModuleType("plugin_for_config_tests")
    module.Everything, module.Empty, module.Needy = Everything, Empty, Needy

    def components():
        empty = [
            Component(kind, name, "plugin_for_config_tests:Empty", "x:y")
            for kind, name in [*TABLES.items(), ("tracker", "console"), ("tracker", "jsonl")]
        ]
        full = [("mesh", "full"), ("loss", "full"), ("transform", "a"), ("transform", "b")]
        needy = [Component("loss", "needy", "plugin_for_config_tests:Needy", "x:y")]
        return (
            empty + [Component(kind, name, "plugin_for_config_tests:Everything", "x:y") for kind, name in full] + needy
        )

    def check(config, world_size):
        count = config["mesh"].config.count if config["mesh"].name == "full" else 1
        return [] if world_size % count == 0 else [Problem("mesh.count", "must divide the ranks", count, "take 1")]

    module.moe_components = hookimpl(components, specname="moe_components")
    module.moe_validate = hookimpl(check, specname="moe_validate")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return load_registry([EntryPoint("tests", module.__name__, "moe_core")])


@pytest.fixture
def write(tmp_path):
    def write(text, name="run.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def _problems(registry, paths=(), words=()):
    with pytest.raises(ConfigError) as caught:
        load_config(paths, words, registry=registry)
    return [str(problem) for problem in caught.value.problems]


def test_later_files_and_words_win_and_arrays_replace_whole(registry, write):
    first = write(
        '[mesh]\ntype = "full"\ncount = 2\nword = "first"\n[[transform]]\ntype = "a"\n[[transform]]\ntype = "b"\n'
    )
    second = write('[mesh]\ncount = 3\n[[transform]]\ntype = "b"\ncount = 7\n', "second.toml")
    config = load_config(
        [first, second], ["mesh.rate=2", "transform.b.flag=true", "run.name=bare-word"], registry=registry
    )
    mesh = config["mesh"].config
    assert (mesh.count, mesh.word, mesh.rate) == (3, "first", 2.0)
    assert isinstance(mesh.rate, float)
    assert [(t.name, t.config.count, t.config.flag) for t in config["transform"]] == [("b", 7, True)]
    assert config.run.name == "bare-word"
    assert config.run.output_dir == "runs/bare-word"


def test_none_switches_an_optional_value_off_and_only_that(registry):
    config = load_config(
        (), ["mesh.type=full", "mesh.maybe=none", "mesh.choice=none", "mesh.word=none"], registry=registry
    )
    mesh = config["mesh"].config
    assert (mesh.maybe, mesh.choice, mesh.word) == (None, "none", "none")
    assert _problems(registry, (), ["mesh.type=full", "mesh.count=none"]) == [
        "command line 'mesh.count=none': mesh.count = 'none': must be an integer, not a string"
    ]


def test_the_dump_loads_to_an_equal_config(registry, write):
    words = [
        *("mesh.type=full", "mesh.maybe=none", "mesh.several=[]", "mesh.pair=[1, 2.5]", "mesh.nested.width=9"),
        *("mesh.wrapped.type=full", "mesh.wrapped.count=8", "run.threads=none"),
        'mesh.word="with \\"quotes\\" and \\u00fc"',
        'transform=[{type="b", rate=1e-7}, {type="a"}]',
    ]
    config = load_config((), words, registry=registry)
    again = load_config(write(config.to_toml()), registry=registry)
    assert again == config
    assert again.to_toml() == config.to_toml()
    assert again["mesh"].config.wrapped.config.count == 8
    assert again["transform"][0].config.rate == 1e-7


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ('mesh.flag="false"', "must be true or false, not a string"),
        ("mesh.flag=1", "must be true or false, not an integer"),
        ("mesh.count=7.9", "must be an integer, not a number"),
        ('mesh.count="7"', "must be an integer, not a string"),
        ("mesh.count=true", "must be an integer, not true or false"),
        ("mesh.rate=true", "must be a number, not true or false"),
        ("mesh.word=7", "must be a string, not an integer"),
        ("mesh.count=0", "must be >= 1"),
        ("mesh.choice=ful", "did you mean 'full'?"),
        ("mesh.several=abc", "must be an array, not a string"),
        ("mesh.several=[1, 2.5]", "must be an integer, not a number"),
        ("mesh.pair=[1]", "must have 2 items, not 1"),
        ("mesh.nested=3", "must be a table, not an integer"),
        ("mesh.nested.widht=3", "did you mean 'width'?"),
        ("mesh.wrapped.type=ful", "did you mean 'full'?"),
        ("mesh.wrapped.count=1", "must name a loss component"),
        ("mesch.count=1", "did you mean 'mesh'?"),
        ("dispatcher.type=x", "it is a sub-table of the component that uses it"),
        ("transform.a.count=2", "no single table of this array has the type 'a'"),
        ("run.steps=0", "must be >= 1"),
        ("nonsense", 'is not "key.path=value"'),
        ("loss.type=needy", "loss.must: is required"),
    ],
)
def test_a_wrong_value_is_said_with_its_rule(registry, word, rule):
    (problem,) = _problems(registry, (), ["mesh.type=full", 'transform=[{type="b"}]', word])
    assert rule in problem
    assert word.partition("=")[0].split(".")[0] in problem


def test_all_problems_come_at_once_each_with_its_file(registry, write):
    path = write(
        '[mesh]\ntype = "full"\ncount = 0\ncuont = 3\n[loss]\ntype = "fulll"\n[[transform]]\ntype = "a"\nrate = "x"\n'
    )
    problems = _problems(registry, [path, "missing.toml"], ["run.steps=1.5"])
    assert len(problems) == 6
    for line, place in (
        (3, "mesh.count = 0"),
        (4, "mesh.cuont"),
        (6, "loss.type = 'fulll'"),
        (9, "transform.a.rate = 'x'"),
    ):
        assert any(problem.startswith(f"{path}:{line}:1: {place}") for problem in problems), place
    assert any("missing.toml" in problem and "No such file" in problem for problem in problems)
    assert any("run.steps=1.5" in problem for problem in problems)


def test_a_word_addresses_the_tables_that_stand_for_an_absent_array(registry):
    (problem,) = _problems(registry, (), ["tracker.console.evry=3"])
    assert "tracker.console.evry: is not a key of this table" in problem
    (problem,) = _problems(registry, (), ["transform.a.flag=true"])
    assert "no single table of this array has the type 'a' (types: none)" in problem


def test_a_file_that_is_not_toml_is_named(registry, write):
    path = write("[mesh\n")
    (problem,) = _problems(registry, path)
    assert problem.startswith(f"{path}:1:6: is not TOML: ")


TEXT = '[mesh]\ntype = "full"\nword = """one\ntwo"""\ncount = 5\n'


@pytest.mark.parametrize(
    "data",
    [TEXT.encode(), TEXT.encode("utf-8-sig"), TEXT.replace("\n", "\r\n").encode("utf-8-sig"), TEXT[:-1].encode()],
    ids=["plain", "byte order mark", "CRLF", "no line end"],
)
def test_a_byte_order_mark_and_line_ends_change_nothing(registry, tmp_path, data):
    path = tmp_path / "run.toml"
    path.write_bytes(data)
    mesh = load_config(path, registry=registry)["mesh"].config
    assert (mesh.word, mesh.count) == ("one\ntwo", 5)
    path.write_bytes(data.replace(b"5", b"0"))
    (problem,) = _problems(registry, path)
    assert problem.startswith(f"{path}:5:1: mesh.count = 0")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_another_encoding_is_refused_by_its_name(registry, tmp_path, encoding):
    path = tmp_path / "run.toml"
    path.write_bytes(TEXT.encode(encoding))
    word = encoding[:6].upper()
    assert _problems(registry, path) == [f"{path}: is in {word}, and TOML is UTF-8 (save the file as UTF-8)"]


def test_what_is_no_text_is_said_with_its_place(registry, tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes("[run]\nname = 'é'\n".encode("latin-1"))
    assert _problems(registry, path) == [f"{path}:2:9: is not UTF-8: byte 0xe9 (save the file as UTF-8)"]
    path.write_bytes(b"\xef\xbb\xbf[run]\nsteps = 3\n\xe9 = 1\n")  # behind a byte order mark too
    assert _problems(registry, path) == [f"{path}:3:1: is not UTF-8: byte 0xe9 (save the file as UTF-8)"]
    path.write_bytes(b"[run]\nname = 'a\0'\n")
    (problem,) = _problems(registry, path)
    assert problem.startswith(f"{path}:2:10: is not TOML: ")
    (problem,) = _problems(registry, tmp_path)
    assert "Is a directory" in problem
    (problem,) = _problems(registry, "a\0b")
    assert "can't be read: embedded null byte" in problem
    path.write_bytes(b"")
    load_config(path, registry=registry)


def test_a_word_is_one_value(registry):
    (problem,) = _problems(registry, (), ["run.steps=5\nrun = 6"])
    assert "run.steps = '5\\nrun = 6': must be an integer, not a string" in problem
    for text in ("[" * 5000 + "]" * 5000, "[" * 200 + "]" * 200, "9" * 5000):
        (problem,) = _problems(registry, (), [f"run.steps={text}"])
        assert "must be an integer, not a string" in problem
    assert load_config((), [f"run.name={'1' * 4400}"], registry=registry).run.name == "1" * 4400


@pytest.mark.parametrize(
    "text",
    [
        "run = " + "[" * 5000 + "]" * 5000,
        "run = " + "[" * 200 + "]" * 200,
        "run." + ".".join("a" * 3000) + " = 1",
        "[run." + ".".join("a" * 3000) + "]",
    ],
    ids=["arrays", "fewer arrays", "a key", "a header"],
)
def test_a_file_that_is_nested_too_deeply_is_named(registry, write, text):
    path = write(f"{text}\n")
    assert _problems(registry, path) == [f"{path}: is nested too deeply to be read"]


def test_a_number_of_thousands_of_digits_is_said_with_its_file(registry, write):
    path = write(f"[run]\nsteps = {'9' * 5000}\n")
    (problem,) = _problems(registry, path)
    assert problem.startswith(f"{path}: is not TOML: Exceeds the limit")
    (problem,) = _problems(registry, (), [".".join("a" * 3000) + "=1"])
    assert 'is not "key.path=value"' in problem


def test_a_word_that_names_no_table_is_shown(registry):
    for word, start in (
        ("modl.preset=tiny", "modl: is not a table of a config (did you mean 'model'?)"),
        ("run.foo.bar=3", "run.foo: is not a key of this table"),
    ):
        (problem,) = _problems(registry, (), [word])
        assert problem.startswith(f"command line {word!r}: {start}")


def test_keys_with_dots_and_items_of_arrays_of_several_lines_have_their_places(registry, write):
    path = write(
        '"a.b" = 0\ntracker = [\n {type="console", evry=1}, # 1\n {type="jsonl", evry=2},\n]\n[run]\n"c.d" = 1\n'
    )
    problems = _problems(registry, path)
    for start in (
        ':1:1: "a.b": is not a table',
        ":3:19: tracker.console.evry: is not",
        ":4:17: tracker.jsonl.evry: is not",
        ':7:1: run."c.d": is not a key',
    ):
        assert any(problem.startswith(f"{path}{start}") for problem in problems), (start, problems)


def test_a_problem_points_at_the_file_that_set_the_value_last(registry, write):
    first = write('[mesh]\ntype = "full"\ncount = 0\nrate = "x"\n')
    second = write("\n\n  [mesh]\n  count = -1\n[los]\n", "second.toml")
    problems = _problems(registry, [first, second], ["mesh.flag=3"])
    for start in (f"{first}:4:1: mesh.rate", f"{second}:4:3: mesh.count = -1", f"{second}:5:1: los:",
                  "command line 'mesh.flag=3': mesh.flag"):  # fmt: skip
        assert any(problem.startswith(start) for problem in problems), (start, problems)


def test_a_missing_key_points_at_its_table_and_a_key_of_an_inline_table_at_itself(registry, write):
    path = write('mesh = { type = "full", wrapped = { type = "full", cuont = 1 } }\n\n  [loss]\ntype = "needy"\n')
    problems = _problems(registry, path)
    assert any(problem.startswith(f"{path}:1:52: mesh.wrapped.cuont") for problem in problems), problems
    assert any(problem.startswith(f"{path}:3:3: loss.must: is required") for problem in problems), problems


def test_rules_between_tables_are_asked_before_anything_starts(registry, write):
    path = write('[mesh]\ntype = "full"\ncount = 3\n')
    config = load_config(path, registry=registry)
    validate(config, 6)
    with pytest.raises(ConfigError, match="must divide the ranks") as caught:
        validate(config, 4)
    (problem,) = caught.value.problems
    assert (problem.source, problem.value, problem.hint) == (f"{path}:3:1", 3, "take 1")


def test_a_name_that_no_plugin_offers_lists_those_there_are(registry):
    (problem,) = _problems(registry, (), ["loss.type=zzz"])
    assert "chunked_clm_cross_entropy" in problem


@attrs.frozen
class LayerConfig:
    """A model that leaves the experts' product to the config, as anybody's may."""

    grouped_gemm: Selected | None = component_field("grouped_gemm")


def build_layer(config, run):
    from moe_core import MoE

    gemm = config.grouped_gemm.build(run) if config.grouped_gemm else "auto"
    return MoE(dim=8, num_experts=3, top_k=2, hidden_dim=8, grouped_gemm=gemm)


def build_counting(config, run):
    calls = []

    def product(rows, weight, tokens_per_expert):
        from moe_core._grouped_gemm import loop

        calls.append(tuple(weight.shape))
        return loop(rows, weight, tokens_per_expert)

    product.calls = calls
    return product


@pytest.mark.parametrize("name", ["grouped_mm", "loop", "counting", None])
def test_a_grouped_gemm_that_a_file_names_is_the_one_that_the_experts_use(monkeypatch, write, name):
    import torch

    from moe_core import _grouped_gemm

    module = types.ModuleType("plugin_with_a_layer")
    parts = {"Layer": LayerConfig, "build_layer": build_layer, "Empty": Empty, "build_counting": build_counting}
    vars(module).update(parts)
    here = module.__name__
    components = [Component(kind, other, f"{here}:Empty", "x:y") for kind, other in TABLES.items() if kind != "model"]
    components += [Component("tracker", other, f"{here}:Empty", "x:y") for other in ("console", "jsonl")]
    components += [
        Component("model", "layer", f"{here}:Layer", f"{here}:build_layer"),
        Component("grouped_gemm", "counting", f"{here}:Empty", f"{here}:build_counting"),
    ]
    module.moe_components = hookimpl(lambda: components, specname="moe_components")
    monkeypatch.setitem(sys.modules, here, module)
    points = [EntryPoint("tests", here, "moe_core"), EntryPoint("moe-core", "moe_core._plugin", "moe_core")]
    table = f'[model.grouped_gemm]\ntype = "{name}"\n' if name else ""
    config = load_config(write(f'[model]\ntype = "layer"\n{table}'), registry=load_registry(points))

    layer = config["model"].build(Run(config))
    chosen = layer.experts.grouped_gemm
    layer(torch.randn(5, 8)).square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())
    if name == "counting":
        assert chosen.calls == [(3, 8, 8)] * 2
    else:
        assert chosen is (getattr(_grouped_gemm, name) if name else None)
    with pytest.raises(ConfigError, match="did you mean 'grouped_mm'"):
        load_config((), ["model.type=layer", "model.grouped_gemm.type=grouped_nn"], registry=load_registry(points))
