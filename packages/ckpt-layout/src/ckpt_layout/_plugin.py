"""The components that ckpt-layout registers with the plugin host."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from moe_core.plugins import Component, hookimpl

if TYPE_CHECKING:
    from ckpt_layout._families import Family
    from moe_core.plugins import Run


def _at_least_one(_: Any, attribute: Any, value: int) -> None:
    if value < 1:
        raise ValueError(f"{attribute.name} = {value}: must be at least 1")


@attrs.frozen
class DcpConfig:
    """Checkpoints in torch.distributed.checkpoint's format, which load under any layout."""

    directory: str | None = None
    """Where they lie; unset: the folder `checkpoints` in the run's output directory."""
    keep_last: int | None = attrs.field(default=None, validator=attrs.validators.optional(_at_least_one))
    """How many of the checkpoints written last are kept; unset: all."""


@attrs.frozen
class DcpCheckpointer:
    """Saves and restores a run; see `save_checkpoint` and `load_checkpoint`."""

    directory: Path
    keep_last: int | None = None

    def save(self, run: "Run", step: int, state: Mapping[str, Any]) -> Path:
        from ckpt_layout._checkpoint import save_checkpoint

        return save_checkpoint(
            self.directory,
            step,
            model=run.model,
            optimizer=run.optimizer,
            scheduler=run.scheduler,
            state=state,
            config_toml=run.config.to_toml(),
            keep_last=self.keep_last,
        )

    def latest_step(self) -> int | None:
        from ckpt_layout._latest import latest_step

        return latest_step(self.directory)

    def load(self, run: "Run", step: int | None = None) -> Mapping[str, Any] | None:
        from ckpt_layout._checkpoint import load_checkpoint

        return load_checkpoint(
            self.directory, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler, step=step
        )


def build_dcp(config: DcpConfig, run: "Run") -> DcpCheckpointer:
    directory = Path(config.directory or Path(run.config.run.output_dir) / "checkpoints")
    return DcpCheckpointer(directory, config.keep_last)


@attrs.frozen
class FamilyConfig:
    """A family of models as data; it has no settings."""


def __getattr__(name: str) -> Any:
    """The factory of a family's component, which is called like its row."""
    from ckpt_layout._families import families

    if name not in families():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def row(config: FamilyConfig, run: Any) -> "Family":
        return families()[name]

    return row


@hookimpl
def moe_components() -> list[Component]:
    from ckpt_layout._families import families

    here = "ckpt_layout._plugin:"
    return [
        Component("checkpointer", "dcp", f"{here}DcpConfig", f"{here}build_dcp"),
        *(Component("family", row, f"{here}FamilyConfig", f"{here}{row}") for row in families()),
    ]
