"""The components that nemotron-nano registers with the plugin host."""

from typing import TYPE_CHECKING

from moe_core.plugins import Component, Problem, hookimpl

if TYPE_CHECKING:
    from moe_core.config import Config

_COMPONENTS = (
    ("model", "nemotron_nano", "components:NemotronNanoModelConfig", "components:build_model"),
    ("transform", "compiled", "components:CompiledConfig", "components:build_compiled"),
    ("optimizer", "adamw", "train.components:AdamWConfig", "train.components:build_adamw"),
    ("scheduler", "warmup_cosine", "train.components:WarmupCosineConfig", "train.components:build_warmup_cosine"),
    ("trainer", "pretrain", "train.components:PretrainConfig", "train.pretrain:build_pretrain"),
    ("data", "python_stdlib", "data.components:PythonStdlibConfig", "data.components:build_python_stdlib"),
    ("data", "text_files", "data.components:TextFilesConfig", "data.components:build_text_files"),
    ("data", "tokens", "data.components:TokensConfig", "data.components:build_tokens"),
    ("tracker", "console", "report.trackers:ConsoleConfig", "report.trackers:build_console"),
    ("tracker", "jsonl", "report.trackers:JsonlConfig", "report.trackers:build_jsonl"),
)
"""Kind, name, and where in this package the config class and the factory are."""


@hookimpl
def moe_components() -> list[Component]:
    here = "nemotron_nano."
    return [Component(kind, name, here + config, here + factory) for kind, name, config, factory in _COMPONENTS]


@hookimpl
def moe_validate(config: "Config", world_size: int) -> list[Problem]:
    from nemotron_nano.components import NemotronNanoModelConfig, problems
    from nemotron_nano.data.components import validate_data

    model = config["model"].config
    found = problems(model, config.run.device_type) if isinstance(model, NemotronNanoModelConfig) else []
    return found + _unused_axes(config) + validate_data(config, world_size)


def _unused_axes(config: "Config") -> list[Problem]:
    """The reference trainer shards over data and experts; another axis would repeat the same work on its ranks."""
    if config["trainer"].name != "pretrain":
        return []
    degrees = {axis: getattr(config["mesh"].config, axis, 1) for axis in ("tp", "pp", "cp")}
    rule = "must be 1: the trainer uses no such axis, and its ranks would all train the same copy"
    return [Problem(f"mesh.{axis}", rule, degree) for axis, degree in degrees.items() if degree > 1]
