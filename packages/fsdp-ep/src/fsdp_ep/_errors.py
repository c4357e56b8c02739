"""The error of a model and meshes that do not go together."""


class ShardingError(ValueError):
    """A model cannot be sharded as asked: says which argument, its value, the rule and a way out.

    It follows from the model and the meshes alone, so every rank raises it, before any communication.
    """

    def __init__(self, key: str, value: object, rule: str, hint: str) -> None:
        super().__init__(f"{key} = {value}: {rule} ({hint})")
        self.key = key
        self.value = value
        self.rule = rule
        self.hint = hint

    def __reduce__(self) -> tuple[type["ShardingError"], tuple[str, object, str, str]]:
        return type(self), (self.key, self.value, self.rule, self.hint)
