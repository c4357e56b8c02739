"""Saves in the background: what is stored is the state at the call, and training's collectives never meet theirs."""

import json

import pytest
import torch
from torch import nn

from ckpt_layout import BackgroundSaves, load_checkpoint, save_checkpoint
from moe_core.testing import run_ranks


def training_during_a_save(directory):
    """Rank 0's write is held back until both ranks have trained on; returns what was seen on the way."""
    import threading

    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from ckpt_layout import BackgroundSaves, load_checkpoint, save_checkpoint

    def full():
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in model.state_dict().items()
        }

    def step():
        """A step with real FSDP collectives on the training group."""
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    background = BackgroundSaves()
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model.register_buffer("bias", torch.arange(3.0))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    step()
    before = full()
    trained = threading.Event()
    original = FileSystemWriter.write_data

    def late(self, plan, planner):
        assert trained.wait(30)
        return original(self, plan, planner)

    seen = {}
    FileSystemWriter.write_data = late if dist.get_rank() == 0 else original
    try:
        path = save_checkpoint(
            directory, 1, model=model, optimizer=optimizer, state={"a": 1}, config_toml="x = 1\n", background=background
        )
        for _ in range(3):
            step()
        model.bias += 7
        torch.manual_seed(99)
        seen["complete before"] = path.exists() or (directory / "latest").exists()
        dist.barrier()
        trained.set()
        background.wait()
    finally:
        FileSystemWriter.write_data = original
    seen["after"] = path.exists(), (directory / "latest").read_text()
    later = full()

    # the next one waits for the one in flight
    save_checkpoint(directory, 2, model=model, optimizer=optimizer, background=background)
    save_checkpoint(directory, 3, model=model, optimizer=optimizer, background=background, keep_last=2)
    seen["second"] = (directory / "step-00000002").exists()
    background.wait()
    background.close()

    seen["state"] = load_checkpoint(directory, model=model, optimizer=optimizer, step=3)
    seen["third"] = all(torch.equal(value, later[name]) for name, value in full().items())
    seen["names"] = sorted(entry.name for entry in directory.iterdir())
    return seen, before


def test_the_state_at_the_call_is_stored_while_training_goes_on(tmp_path):
    def first(directory):
        from ckpt_layout import load_checkpoint

        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        model.register_buffer("bias", torch.zeros(3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        state = load_checkpoint(directory, model=model, optimizer=optimizer, step=3)
        return state, {int(s["step"]) for s in optimizer.state.values()}

    results = run_ranks(training_during_a_save, 2, tmp_path)
    for seen, _ in results:
        assert not seen["complete before"]
        assert seen["after"] == (True, "step-00000001\n")
        assert seen["second"]
        assert seen["third"]
        assert seen["names"] == ["latest", "step-00000002", "step-00000003"]
    assert run_ranks(first, 1, tmp_path)[0] == ({"step": 3}, {4})


def test_what_was_copied_is_not_what_training_made_of_it(tmp_path):
    """One process: parameters, moments, buffer, settings and generator change under the save."""
    import threading

    from ckpt_layout import _checkpoint

    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step():
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()

    step()
    want = [p.detach().clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    rate, generator = optimizer.param_groups[0]["lr"], torch.get_rng_state()
    go, original = threading.Event(), _checkpoint.dcp_save

    def late(*args, **kwargs):
        assert go.wait(30)
        return original(*args, **kwargs)

    background = BackgroundSaves()
    _checkpoint.dcp_save = late
    try:
        save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, scheduler=scheduler, background=background)
        step()
        torch.rand(5)
        go.set()
        background.close()
    finally:
        _checkpoint.dcp_save = original
    assert optimizer.param_groups[0]["lr"] != rate
    load_checkpoint(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
    for parameter, value, moment in zip(model.parameters(), want, moments, strict=True):
        assert torch.equal(parameter, value)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moment)
        assert optimizer.state[parameter]["step"] == 1
    assert optimizer.param_groups[0]["lr"] == rate
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_failure_in_the_background_is_raised_once_on_all_ranks_and_latest_stays(tmp_path):
    def failing(directory):
        import torch.distributed as dist
        from torch import nn

        from ckpt_layout import BackgroundSaves, _checkpoint, save_checkpoint

        background, model = BackgroundSaves(), nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.fill_(1)
        save_checkpoint(directory, 1, model=model, background=background)
        background.wait()
        original = _checkpoint.write_durably

        def full_disk(file, content):
            raise OSError(28, "No space left on device")

        if dist.get_rank() == 1:
            _checkpoint.write_durably = full_disk
        try:
            save_checkpoint(directory, 2, model=model, background=background)
            try:
                background.wait()
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
        finally:
            _checkpoint.write_durably = original
        background.wait()  # it was said
        save_checkpoint(directory, 3, model=model, background=background)
        background.close()
        return message

    first, second = run_ranks(failing, 2, tmp_path)
    assert first.startswith("PeerError: writing the checkpoint failed on rank 1: OSError")
    assert second.startswith("OSError")
    assert (tmp_path / "latest").read_text() == "step-00000003\n"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("step")) == ["step-00000001", "step-00000003"]


def test_mistakes_are_said_at_once(tmp_path):
    background = BackgroundSaves()
    with pytest.raises(ValueError, match="keep_last = 0"):
        save_checkpoint(tmp_path, 1, model=nn.Linear(1, 1), keep_last=0, background=background)
    background.close()
    assert not list(tmp_path.iterdir())


def test_other_plugins_are_warned_of(tmp_path, caplog):
    model = nn.Linear(1, 1)
    path = save_checkpoint(tmp_path, 1, model=model, plugins=["a 1.0", "b 2.0"])
    assert json.loads((path / "meta.json").read_text())["plugins"] == ["a 1.0", "b 2.0"]
    load_checkpoint(tmp_path, model=model, plugins=["a 1.0", "b 2.0"])
    assert "other plugins" not in caplog.text
    load_checkpoint(tmp_path, model=model, plugins=["a 1.0", "b 2.1"])
    assert "only then: b 2.0; only here: b 2.1" in caplog.text
