"""Where keys stand in a TOML text, against texts that are written key by key with their places noted."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.config._positions import _Scanner, dotted, key_positions, undotted

BARE = st.text("abz_-09", min_size=1, max_size=4)
QUOTED = st.text("ab.= #[]", min_size=1, max_size=4).map(lambda key: (f'"{key}"', key))
KEYS = st.one_of(BARE.map(lambda key: (key, key)), QUOTED)
VALUES = st.sampled_from([
    "1", "-2.5", "true", '"a = 1"', "'[x]'", '"""\na = 1\n[b]\n"""', "[1, 2]", "[\n  # a = 1\n  [3],\n]", "[]", "{}",
    "1979-05-27", '"""x"""', "\'\'\'\n\'\'\'",
])  # fmt: skip
FILLER = st.sampled_from(["", "\n", "# [c] = 1\n", "  \n\t\n"])


@st.composite
def documents(draw):
    """A text, and the place of each header and of each key under it."""
    text, places = draw(FILLER), {}

    def here(indent):
        return text.count("\n") + 1, len(indent) + 1

    def statements(path):
        nonlocal text
        for written, key in draw(st.lists(KEYS, max_size=4, unique_by=lambda pair: pair[1])):
            indent = draw(st.sampled_from(["", "  "]))
            places[(*path, key)] = here(indent)
            text += f"{indent}{written}{draw(st.sampled_from(['', ' ']))}= {draw(VALUES)} {draw(FILLER) or chr(10)}"
            text = text if text.endswith("\n") else text + "\n"

    statements(())
    top = {path[0] for path in places}
    for number, arrays in enumerate(draw(st.lists(st.integers(0, 2), max_size=3))):
        name = f"table{number}"
        assert name not in top
        if arrays == 0:
            places[(name,)] = here("")
            text += f"[{name}]\n"
            statements((name,))
        for item in range(arrays):
            places.setdefault((name,), here(""))
            places[(name, str(item))] = here("")
            text += f"[[{name}]] # {item}\n"
            statements((name, str(item)))
            places[(name, str(item), "sub table")] = here(" ")
            text += f' [{name}."sub table"]\n'
            statements((name, str(item), "sub table"))
    return text, places


def every_key(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, str(key))
        yield from every_key(item, (*path, str(key)))


@given(documents())
def test_every_key_has_the_place_where_it_was_written(document):
    text, places = document
    found = key_positions(text)
    assert set(found) == set(every_key(tomllib.loads(text)))  # none is missing, whatever the text
    assert {path: found[path] for path in places} == places
    assert key_positions(text.replace("\n", "\r\n")) == found


@pytest.mark.parametrize(
    ("text", "path", "place"),
    [
        ("a.b.c = 1", "a.b.c", (1, 5)),
        ("a . b = 1", "a.b", (1, 5)),
        ("[x.y]\nz = 1", "x", (1, 1)),
        ("[x.y]\nz = 1", "x.y.z", (2, 1)),
        ("t = { one = 1, two = 2 }", "t.two", (1, 16)),
        ("t = [\n  { one = 1 },\n  { two = 2 },\n]", "t.1.two", (3, 5)),
        ("t = [{ one = 1 }, { one = 2 }]", "t.1.one", (1, 21)),
        ("t = [\n  1, # ]\n  [2,\n 3],\n]", "t.1.1", (4, 2)),
        ("a = 0 # b = 1\nb = 2", "b", (2, 1)),
        ('"s\\u0074" = 0 # was st = 5', "st", (1, 1)),
        ("[[a]]\n[[a.b]]\n[[a.b]]\nk = 1\n[[a]]\n[[a.b]]\nk = 2", "a.1.b.0.k", (7, 1)),
        ("[[a]]\n[[a.b]]\n[[a.b]]\nk = 1", "a.0.b.1.k", (4, 1)),
    ],
)
def test_dotted_inline_and_nested_keys(text, path, place):
    assert key_positions(text)[tuple(path.split("."))] == place


@pytest.mark.parametrize("line", ["  1,\n", "  [1, 2],\n", "  { a = 1 },\n"])
def test_the_work_grows_with_the_length_of_a_text_and_no_faster(line, monkeypatch):
    steps = []
    skip = _Scanner._skip
    monkeypatch.setattr(_Scanner, "_skip", lambda self, *what: steps.append(1) or skip(self, *what))
    counts = []
    for lines in (1000, 2000):
        steps.clear()
        assert key_positions("a = [\n" + line * lines + "]\nb = 2\n")[("b",)] == (lines + 3, 1)
        counts.append(len(steps))
    assert counts[1] < 2.01 * counts[0]


@pytest.mark.parametrize("path", [("run",), ("run", "a.b", "c"), ("a b", "0"), ("x", "")])
def test_a_dotted_path_is_read_back(path):
    assert undotted(dotted(path)) == path
