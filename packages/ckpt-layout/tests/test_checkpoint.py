"""`save_checkpoint` and `load_checkpoint`: bit-identical under other layouts, and never half there."""

import json

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt_layout import load_checkpoint, save_checkpoint
from moe_core.testing import RankFailed, run_ranks

E, F, D, T = 5, 3, 4, 6


class Model(nn.Module):
    """Two dense layers, a stack of experts, an fp32 buffer, and a parameter that never gets a gradient."""

    def __init__(self, experts=E):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.dense = nn.Linear(D, D)
        self.experts = nn.Module()
        self.experts.up_proj = nn.Parameter(torch.randn(experts, F, D, generator=g))
        self.experts.down_proj = nn.Parameter(torch.randn(experts, D, F, generator=g))
        self.unused = nn.Parameter(torch.randn(2, D, generator=g))
        self.register_buffer("bias", torch.randn(experts, generator=g))
        with torch.no_grad():
            for parameter in self.dense.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g))


PLAIN, FSDP2, FSDP4, HSDP = (1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1)
LAYOUTS = {1: [PLAIN], 2: [FSDP2, (1, 1, 2)], 4: [FSDP4, (1, 2, 2), (1, 1, 4), HSDP, (2, 1, 2)]}
"""By number of ranks: (replicas, FSDP shards of the experts, expert-parallel degree)."""


def sharded(layout, experts=E):
    """The same model: experts over the ep axis, then FSDP on the other two; everything else FSDP over all."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    model, (replicas, shards, ep) = Model(experts), layout
    if layout == PLAIN:
        return model
    assert dist.get_world_size() == replicas * shards * ep
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("replicate", "shard", "ep"))
    if ep > 1:
        for name, p in list(model.experts.named_parameters()):
            chunks = [*p.detach().chunk(ep), *[p.detach()[:0]] * ep]  # as torch.chunk, empty ones after
            local = chunks[mesh.get_local_rank("ep")].clone()
            stack = DTensor.from_local(local, mesh["ep"], (Shard(0),), shape=p.shape, stride=p.stride())
            model.experts.register_parameter(name, nn.Parameter(stack))
        if replicas > 1:
            fully_shard(model.experts, mesh=mesh["replicate", "shard"])
        elif shards > 1:
            fully_shard(model.experts, mesh=mesh["shard"])
    if replicas > 1:
        flat = init_device_mesh("cpu", (replicas, shards * ep), mesh_dim_names=("replicate", "all"))
    else:
        flat = init_device_mesh("cpu", (shards * ep,))
    return fully_shard(model, mesh=flat, ignored_params=set(model.experts.parameters()) if ep > 1 else set())


def gradient_of(name, shape, step):
    g = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    return torch.randn(shape, generator=g)


def train(model, optimizer, scheduler, steps):
    """AdamW steps on gradients that depend on name and step alone, so every layout has the same history."""
    from torch.distributed.tensor import DTensor

    for step in steps:
        for name, p in model.named_parameters():
            if name == "unused":
                continue
            full = gradient_of(name, p.shape, step)
            if isinstance(p, DTensor):
                from ckpt_layout._shards import held_region

                mesh = p.device_mesh
                runs = held_region(p.shape, mesh.shape, mesh.get_coordinate(), p.placements)
                for dim, held in enumerate(runs):
                    full = full.index_select(dim, torch.tensor([i for run in held for i in run], dtype=torch.int64))
                p.grad = DTensor.from_local(full, mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
            else:
                p.grad = full
        optimizer.step()
        scheduler.step()


def optimizers(model):
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        foreach=False,
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def state_of(model, optimizer, take):
    """Weights, buffers and the optimizer's tensors by name, each as `take` gives it, and the learning rates."""
    names = {id(p): name for name, p in model.named_parameters()}
    state = {name: take(value).detach().clone() for name, value in model.state_dict().items()}
    for p, values in optimizer.state.items():
        state |= {f"{names[id(p)]}/{key}": take(value).detach().clone() for key, value in values.items()}
    return state, [group["lr"] for group in optimizer.param_groups]


def full_state(model, optimizer):
    """Everything, put together from the shards by torch."""
    from torch.distributed.tensor import DTensor

    return state_of(model, optimizer, lambda value: value.full_tensor() if isinstance(value, DTensor) else value)


def local_state(model, optimizer):
    """What this rank holds of the same, without a collective."""
    from torch.distributed.tensor import DTensor

    return state_of(model, optimizer, lambda value: value.to_local() if isinstance(value, DTensor) else value)


def saved_by(model, folder):
    """Three steps, saved; the state then, and after one more step."""
    from ckpt_layout import save_checkpoint

    optimizer, scheduler = optimizers(model)
    train(model, optimizer, scheduler, range(3))
    save_checkpoint(folder, 3, model=model, optimizer=optimizer, scheduler=scheduler, state={"seen": [1, 2.5]})
    after = full_state(model, optimizer)
    train(model, optimizer, scheduler, range(3, 4))
    return after, full_state(model, optimizer)


def loaded_by(model, folder, state_of):
    """What a load over NaN gives: the caller's state, `state_of` everything then, and after one more step."""
    from ckpt_layout import load_checkpoint

    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(float("nan"))
    optimizer, scheduler = optimizers(model)
    state = load_checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    loaded = state_of(model, optimizer)
    train(model, optimizer, scheduler, range(3, 4))
    return state, loaded, state_of(model, optimizer)


def same_or_names(mine, want):
    """[] if two states are equal bit by bit, else what differs."""
    (tensors, rates), (others, other_rates) = mine, want
    wrong = sorted(tensors.keys() ^ others.keys())
    wrong += [name for name in tensors.keys() & others.keys() if not torch.equal(tensors[name], others[name])]
    return wrong if rates == other_rates else [*wrong, "lr"]


def save_and_load(layouts, directory, saves, sources, experts):
    """Under each layout, a checkpoint in a folder of its own; then under each, every source.

    Returns the states around each save; per layout what the first source's load gave, put together from all shards;
    and per source and layout the caller's state and what differs, on this rank, from the first source's.
    """

    def full_and_local(model, optimizer):
        return full_state(model, optimizer), local_state(model, optimizer)

    models = {layout: sharded(layout, experts) for layout in layouts}
    saved = [saved_by(model, directory / str(layout)) for layout, model in models.items() if saves]
    firsts, found = {}, {}
    for layout, model in models.items():
        for source in sources:
            folder, is_first = directory / str(source), source == sources[0]
            state, *states = loaded_by(model, folder, full_and_local if is_first else local_state)
            if is_first:
                firsts[layout] = [full for full, _ in states]
                states = mine = [local for _, local in states]
            found[source, layout] = state, [same_or_names(*both) for both in zip(states, mine, strict=True)]
    return saved, firsts, found


def assert_same(mine, want):
    (tensors, rates), (others, other_rates) = mine, want
    assert set(tensors) == set(others)
    for name, value in others.items():
        assert torch.equal(tensors[name], value), name
    assert rates == other_rates


def test_every_layout_loads_what_every_other_saved_bit_by_bit(tmp_path):
    """World 1, 2 and 4, ep 1, 2 and 4, replicas: weights and moments, then one more step.

    Under each layout the first source's state is put together and compared with what one process had, and each
    rank compares its shards of the others with its shards of that one.
    """
    experts = 10  # 3, 3, 3, 1 at ep 4
    sources = [layout for layouts in LAYOUTS.values() for layout in layouts]

    def on(ranks, saves, sources):
        return run_ranks(save_and_load, ranks, LAYOUTS[ranks], tmp_path, saves, sources, experts, timeout=240)

    results = [on(1, True, []), on(2, True, []), on(4, True, sources), on(2, False, sources), on(1, False, sources)]
    first, after_a_step = results[0][0][0][0]
    assert "experts.up_proj/exp_avg" in first[0]
    assert not any(name.startswith("unused/") for name in first[0])
    assert first[0]["dense.weight/step"] == 3
    pairs, saves = set(), 0
    for saved, firsts, found in (outcome for ranks in results for outcome in ranks):
        for before, after in saved:
            assert_same(before, first)
            assert_same(after, after_a_step)
            saves += 1
        for loaded, later in firsts.values():
            assert_same(loaded, first)
            assert_same(later, after_a_step)
        for pair, (state, different) in found.items():
            assert state == {"seen": [1, 2.5], "step": 3}, pair
            assert different == [[], []], pair
            assert pair[1] in firsts
            pairs.add(pair)
    assert saves == 1 + 2 * 2 + 4 * 5
    assert len(pairs) == len(sources) ** 2 == 64


@settings(max_examples=6, derandomize=True, deadline=None)
@given(st.integers(1, 13), st.sampled_from(LAYOUTS[4]), st.sampled_from(LAYOUTS[4]))
def test_random_layouts_and_numbers_of_experts(experts, saved, loaded):
    def there_and_back(saved, loaded, experts):
        import shutil
        import tempfile
        from pathlib import Path

        import torch.distributed as dist

        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        directory = Path(folder[0])
        try:
            before, after = saved_by(sharded(saved, experts), directory)
            _, back, later = loaded_by(sharded(loaded, experts), directory, full_state)
            dist.barrier()
        finally:
            if dist.get_rank() == 0:
                shutil.rmtree(directory)
        return before, after, back, later

    # a fully sharded stack may leave ranks empty; one that FSDP splits further on the ep axis may not
    assume(all(s == 1 or ep == 1 or -(-experts // ep) * (ep - 1) < experts for _, s, ep in (saved, loaded)))
    for before, after, back, later in run_ranks(there_and_back, 4, saved, loaded, experts, timeout=240):
        assert_same(back, before)
        assert_same(later, after)


# -- in one process ----------------------------------------------------------------------------------------


def trained(steps):
    model = Model()
    optimizer, scheduler = optimizers(model)
    train(model, optimizer, scheduler, range(steps))
    return model, optimizer, scheduler


def test_no_checkpoint_is_none_and_a_missing_step_is_an_error(tmp_path):
    model, optimizer, _ = trained(1)
    assert load_checkpoint(tmp_path / "nowhere", model=model) is None
    with pytest.raises(ValueError, match="has no checkpoint of step 7; there are: none"):
        load_checkpoint(tmp_path, model=model, step=7)
    save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="there are: step-00000001"):
        load_checkpoint(tmp_path, model=model, step=7)


def test_gradients_that_are_still_there_change_nothing(tmp_path):
    model, optimizer, scheduler = trained(2)
    assert model.dense.weight.grad is not None
    save_checkpoint(tmp_path, 2, model=model, optimizer=optimizer, scheduler=scheduler)
    want = full_state(model, optimizer)
    other, other_optimizer, other_scheduler = trained(0)
    load_checkpoint(tmp_path, model=other, optimizer=other_optimizer, scheduler=other_scheduler)
    assert_same(full_state(other, other_optimizer), want)


def test_an_optimizer_that_never_stepped_comes_back_so(tmp_path):
    model, optimizer, scheduler = trained(0)
    save_checkpoint(tmp_path, 0, model=model, optimizer=optimizer, scheduler=scheduler)
    other, other_optimizer, other_scheduler = trained(2)
    load_checkpoint(tmp_path, model=other, optimizer=other_optimizer, scheduler=other_scheduler)
    assert not other_optimizer.state
    train(model, optimizer, scheduler, range(1))
    train(other, other_optimizer, other_scheduler, range(1))
    assert_same(full_state(other, other_optimizer), full_state(model, optimizer))


def test_random_generators_go_on_where_they_were(tmp_path):
    import random

    save_checkpoint(tmp_path, 1, model=Model())
    want = torch.rand(3), random.random()
    load_checkpoint(tmp_path, model=Model())
    assert torch.equal(torch.rand(3), want[0])
    assert random.random() == want[1]


def test_momentum_and_settings_of_other_optimizers(tmp_path):
    def made():
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 2])

    model, optimizer, scheduler = made()
    train(model, optimizer, scheduler, range(2))
    save_checkpoint(tmp_path, 2, model=model, optimizer=optimizer, scheduler=scheduler)
    other, other_optimizer, other_scheduler = made()
    load_checkpoint(tmp_path, model=other, optimizer=other_optimizer, scheduler=other_scheduler)
    assert other_scheduler.state_dict() == scheduler.state_dict()
    for trainee in ((model, optimizer, scheduler), (other, other_optimizer, other_scheduler)):
        train(*trainee, range(2, 4))
    assert torch.equal(other.dense.weight, model.dense.weight)
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_what_lies_in_the_folder(tmp_path):
    path = save_checkpoint(tmp_path, 12, model=Model(), state={"a": 1}, config_toml="[run]\nsteps = 3\n")
    assert path == tmp_path / "step-00000012"
    assert (tmp_path / "latest").read_text() == "step-00000012\n"
    assert (path / "config.toml").read_text() == "[run]\nsteps = 3\n"
    meta = json.loads((path / "meta.json").read_text())
    assert (meta["step"], meta["world_size"], meta["state"]) == (12, 1, {"a": 1})
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_only_the_last_ones_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, model=Model(), keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000004"]
    save_checkpoint(tmp_path, 2, model=Model(), keep_last=2)  # after going back
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000002", "step-00000004"]
    assert load_checkpoint(tmp_path, model=Model())["step"] == 2
    assert load_checkpoint(tmp_path, model=Model(), step=4)["step"] == 4


def test_a_step_can_be_saved_again(tmp_path):
    model = Model()
    save_checkpoint(tmp_path, 1, model=model)
    with torch.no_grad():
        model.bias += 1
    save_checkpoint(tmp_path, 1, model=model)
    other = Model()
    load_checkpoint(tmp_path, model=other)
    assert torch.equal(other.bias, model.bias)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001.1"]


@pytest.mark.parametrize("stop", range(6))
def test_saving_a_step_again_leaves_a_whole_one_at_every_moment(tmp_path, stop, monkeypatch):
    """The process ends at the stop-th of the folder operations; what `latest` names is the old or the new one."""
    import os
    import shutil

    model, done = Model(), []
    save_checkpoint(tmp_path, 1, model=model)
    old = model.bias.clone()
    with torch.no_grad():
        model.bias += 1

    class Ended(BaseException):
        pass

    def until(name, original):
        def operation(*args, **kwargs):
            if len(done) == stop:
                raise Ended
            done.append(name)
            return original(*args, **kwargs)

        return operation

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", until("rename", os.replace))  # what Path.replace calls, too
        patch.setattr(shutil, "rmtree", until("remove", shutil.rmtree))
        try:
            save_checkpoint(tmp_path, 1, model=model)
        except Ended:
            pass
        else:
            assert done == ["rename", "rename", "remove", "rename", "remove"]
            assert stop == 5
    for step in (None, 1):
        other = Model()
        state = load_checkpoint(tmp_path, model=other, step=step)
        assert state["step"] == 1
        assert torch.equal(other.bias, old if stop < 2 else model.bias)
    save_checkpoint(tmp_path, 1, model=model)  # and it goes on from there
    load_checkpoint(tmp_path, model=other)
    assert torch.equal(other.bias, model.bias)


class Wider(Model):
    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (Model, Wider, "not in the checkpoint: model/extra"),
        (Wider, Model, "not in the model: model/extra"),
        (Model, lambda: Model(experts=6), r"shapes differ: .*model/bias is \(5,\), the model's is \(6,\)"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_unchanged(tmp_path, saved, loaded, message):
    save_checkpoint(tmp_path, 1, model=saved())
    model = loaded()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, model=model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path):
    model, optimizer, scheduler = trained(1)
    save_checkpoint(tmp_path / "a", 1, model=model, optimizer=optimizer, scheduler=scheduler)
    with pytest.raises(ValueError, match="the checkpoint has 2 parameter groups, the optimizer 1"):
        load_checkpoint(tmp_path / "a", model=model, optimizer=torch.optim.AdamW(model.parameters()))
    save_checkpoint(tmp_path / "b", 1, model=model)
    with pytest.raises(ValueError, match="holds no optimizer"):
        load_checkpoint(tmp_path / "b", model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="not in the model: build the optimizer after"):
        save_checkpoint(tmp_path / "c", 1, model=Model(), optimizer=optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, "step = -1"),
        ({"keep_last": 0}, "keep_last = 0"),
        ({"state": {"x": torch.zeros(1)}}, "state must be what JSON can hold"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, **{"step": 1, "model": Model(), **options})
    assert not list(tmp_path.iterdir())


# -- interrupted -------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_in_a_save_leaves_the_last_good_checkpoint(tmp_path):
    def good(directory):
        return saved_by(sharded(FSDP2), directory)[0]

    def again(directory):
        return loaded_by(sharded(FSDP2), directory, full_state)

    saved = run_ranks(good, 2, tmp_path)[0]

    def killed(directory):
        import os
        import signal

        import torch.distributed as dist
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        from ckpt_layout import save_checkpoint

        model = sharded(FSDP2)

        def die(self, plan, planner):
            os.kill(os.getpid(), signal.SIGKILL)

        if dist.get_rank() == 1:
            FileSystemWriter.write_data = die
        save_checkpoint(directory, 4, model=model)

    with pytest.raises(RankFailed, match="SIGKILL"):
        run_ranks(killed, 2, tmp_path, timeout=30)
    assert (tmp_path / "latest").read_text() == "step-00000003\n"
    assert not (tmp_path / "step-00000004").exists()
    for state, loaded, _ in run_ranks(again, 2, tmp_path):
        assert state["step"] == 3
        assert_same(loaded, saved)


def test_a_rank_that_fails_in_a_save_fails_it_for_all(tmp_path):
    def failing(directory):
        import torch.distributed as dist

        from ckpt_layout import _checkpoint, save_checkpoint

        model = sharded(FSDP2)
        save_checkpoint(directory, 1, model=model)
        original = _checkpoint.capture_rng

        def full_disk(device_type):
            raise OSError(28, "No space left on device")

        if dist.get_rank() == 1:
            _checkpoint.capture_rng = full_disk
        try:
            save_checkpoint(directory, 2, model=model)
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            _checkpoint.capture_rng = original

    first, second = run_ranks(failing, 2, tmp_path)
    assert first[0] == "PeerError"
    assert "rank 1: OSError" in first[1]
    assert second[0] == "OSError"
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


def test_state_on_some_ranks_only_is_named(tmp_path):
    def uneven(directory):
        import torch.distributed as dist

        from ckpt_layout import save_checkpoint

        model = Model()
        optimizer, scheduler = optimizers(model)
        train(model, optimizer, scheduler, range(1))
        if dist.get_rank() == 1:
            del optimizer.state[model.dense.weight]
        try:
            save_checkpoint(directory, 1, model=model, optimizer=optimizer)
        except ValueError as error:
            return str(error)

    for message in run_ranks(uneven, 2, tmp_path):
        assert "only some ranks hold optimizer/dense.weight/exp_avg" in message


@pytest.mark.parametrize("background", [False, True])
def test_the_component_saves_and_loads_a_run(tmp_path, background):
    from types import SimpleNamespace

    from ckpt_layout._plugin import DcpConfig, build_dcp

    model, optimizer, scheduler = trained(1)
    installed = SimpleNamespace(entries=[SimpleNamespace(distribution="theirs", version="3.1")] * 2)
    config = SimpleNamespace(
        run=SimpleNamespace(output_dir=str(tmp_path)), to_toml=lambda: "[run]\n", registry=installed
    )
    run = SimpleNamespace(config=config, model=model, optimizer=optimizer, scheduler=scheduler)
    checkpointer = build_dcp(DcpConfig(background=background), run)
    assert checkpointer.load(run) is None
    path = checkpointer.save(run, 1, {"x": 2})
    checkpointer.run_end(status=0)
    assert json.loads((path / "meta.json").read_text())["plugins"] == ["theirs 3.1"]
    assert path == tmp_path / "checkpoints" / "step-00000001"
    assert (path / "config.toml").read_text() == "[run]\n"
    assert checkpointer.load(run) == {"x": 2, "step": 1}
