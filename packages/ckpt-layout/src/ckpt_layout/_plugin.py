"""The components that ckpt-layout registers with the plugin host."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from moe_core.plugins import Component, hookimpl

if TYPE_CHECKING:
    from ckpt_layout._checkpoint import BackgroundSaves
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
    background: bool = False
    """Whether training goes on while a checkpoint, copied to the host, is written. The event `checkpoint_saved` then
    comes when the copy is taken; the folder is there before the next save, and before the run ends."""


@attrs.define
class DcpCheckpointer:
    """Saves and restores a run; see `save_checkpoint` and `load_checkpoint`."""

    directory: Path
    keep_last: int | None = None
    background: "BackgroundSaves | None" = None

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
            files=getattr(getattr(run, "data", None), "files", {}),
            plugins=_plugins(run),
            keep_last=self.keep_last,
            background=self.background,
        )

    def latest_step(self) -> int | None:
        from ckpt_layout._folders import latest_step

        return latest_step(self.directory)

    def load(self, run: "Run", step: int | None = None) -> Mapping[str, Any] | None:
        from ckpt_layout._checkpoint import load_checkpoint

        if self.background is not None:
            self.background.wait()
        return load_checkpoint(
            self.directory,
            model=run.model,
            optimizer=run.optimizer,
            scheduler=run.scheduler,
            step=step,
            plugins=_plugins(run),
        )

    def run_end(self, **_: Any) -> None:
        """The trainer's last event: the save in flight is completed."""
        if self.background is not None:
            self.background.close()


def build_dcp(config: DcpConfig, run: "Run") -> DcpCheckpointer:
    directory = Path(config.directory or Path(run.config.run.output_dir) / "checkpoints")
    background = None
    if config.background:
        from ckpt_layout._checkpoint import BackgroundSaves

        background = BackgroundSaves()
    return DcpCheckpointer(directory, config.keep_last, background)


def _plugins(run: "Run") -> list[str]:
    return sorted({f"{entry.distribution} {entry.version}" for entry in run.config.registry.entries})


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
