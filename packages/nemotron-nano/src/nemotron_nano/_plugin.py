"""The components that nemotron-nano registers with the plugin host."""

from typing import TYPE_CHECKING

from moe_core.plugins import Component, Problem, hookimpl

if TYPE_CHECKING:
    from moe_core.config import Config

_HOMES = {
    ("model", "nemotron_nano"): ("nemotron_nano.components", "NemotronNanoModelConfig", "build_model"),
    ("transform", "compiled"): ("nemotron_nano.components", "CompiledConfig", "build_compiled"),
    ("optimizer", "adamw"): ("nemotron_nano.train.components", "AdamWConfig", "build_adamw"),
    ("scheduler", "warmup_cosine"): ("nemotron_nano.train.components", "WarmupCosineConfig", "build_warmup_cosine"),
    ("trainer", "pretrain"): ("nemotron_nano.train.components", "PretrainConfig", "build_pretrain"),
    ("data", "python_stdlib"): ("nemotron_nano.data.components", "PythonStdlibConfig", "build_python_stdlib"),
    ("data", "text_files"): ("nemotron_nano.data.components", "TextFilesConfig", "build_text_files"),
    ("tracker", "console"): ("nemotron_nano.report.trackers", "ConsoleConfig", "build_console"),
    ("tracker", "jsonl"): ("nemotron_nano.report.trackers", "JsonlConfig", "build_jsonl"),
}


@hookimpl
def moe_components() -> list[Component]:
    return [
        Component(kind, name, config=f"{module}:{config}", factory=f"{module}:{factory}")
        for (kind, name), (module, config, factory) in _HOMES.items()
    ]


@hookimpl
def moe_validate(config: "Config", world_size: int) -> list[Problem]:
    from nemotron_nano.components import NemotronNanoModelConfig, problems
    from nemotron_nano.data.components import validate_text

    model = config["model"].config
    found = problems(model, config.run.device_type) if isinstance(model, NemotronNanoModelConfig) else []
    return found + _unused_axes(config) + validate_text(config, world_size)


def _unused_axes(config: "Config") -> list[Problem]:
    """The reference trainer shards over data and experts; another axis would repeat the same work on its ranks."""
    if config["trainer"].name != "pretrain":
        return []
    degrees = {axis: getattr(config["mesh"].config, axis, 1) for axis in ("tp", "pp", "cp")}
    rule = "must be 1: the trainer uses no such axis, and its ranks would all train the same copy"
    return [Problem(f"mesh.{axis}", rule, degree) for axis, degree in degrees.items() if degree > 1]
