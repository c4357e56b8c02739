"""The error of what cannot be planned."""


class PlanError(ValueError):
    """A value that no plan can be made of: says which, and the rule that it breaks."""

    def __init__(self, key: str, value: object, rule: str) -> None:
        super().__init__(f"{key} = {value!r}: {rule}")
        self.key = key
        self.value = value
        self.rule = rule

    def __reduce__(self) -> tuple[type["PlanError"], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.rule)
