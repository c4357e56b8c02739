"""One thing that is wrong with a config, with all that is needed to mend it."""

import attrs


@attrs.frozen
class Problem:
    """What is wrong where: file, key path, value, the rule that it breaks, and a way out."""

    key: str
    """Dotted path, e.g. `mesh.ep`; the tables of an array are named by their type: `transform.fsdp.x`."""
    rule: str
    """What holds for this key, as a sentence without its subject: "must be at least 1"."""
    value: object = attrs.field(factory=lambda: attrs.NOTHING)
    """What stands there; `attrs.NOTHING` where there is nothing to show."""
    hint: str = ""
    """The nearest valid name, or the fix."""
    source: str = ""
    """The file, or the command-line word, that set the value. Filled by the loader where left empty."""

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        value = "" if self.value is attrs.NOTHING else f" = {self.value!r}"
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.key}{value}: {self.rule}{hint}"
