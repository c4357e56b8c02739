"""`run_ranks` never hangs and names the root of a failure; the counters count, and only what they should."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from moe_core.testing import RankFailed, RanksTimedOut, count_collectives, count_host_syncs, run_ranks


def test_results_come_by_rank_and_closures_are_sent_by_value():
    offset = torch.tensor([10.0])

    def sum_of_ranks():
        value = offset + dist.get_rank()
        dist.all_reduce(value)
        return dist.get_rank(), value

    results = run_ranks(sum_of_ranks, 3)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(value, torch.tensor([33.0])) for _, value in results)


def test_every_call_starts_from_the_same_state():
    def disturb():
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        torch.set_grad_enabled(False)
        warnings.simplefilter("error")
        return torch.rand(1).item()

    def look():
        warnings.warn("shown, not raised", stacklevel=1)
        return torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.rand(1).item()

    run_ranks(disturb, 2)
    first, second = run_ranks(look, 2)
    assert first == second == (torch.float32, 1, True, torch.Generator().manual_seed(0) and first[3])
    assert run_ranks(look, 2)[0] == first


def test_the_root_failure_is_named_not_its_echo():
    def fail_on_one():
        if dist.get_rank() == 1:
            raise KeyError("the root")
        dist.barrier()

    with pytest.raises(RankFailed, match="the root") as caught:
        run_ranks(fail_on_one, 3)
    assert caught.value.rank == 1
    assert run_ranks(dist.get_world_size, 2) == [2, 2]


def test_a_killed_rank_is_named_and_the_pool_recovers():
    def kill_one():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), 9)
        dist.barrier()

    with pytest.raises(RankFailed, match="SIGKILL") as caught:
        run_ranks(kill_one, 2)
    assert caught.value.rank == 0
    assert run_ranks(dist.get_rank, 2) == [0, 1]


def test_a_rank_that_hangs_is_named_within_the_time_limit():
    def hang_on_one():
        if dist.get_rank() == 1:
            time.sleep(60)

    begin = time.monotonic()
    with pytest.raises((RanksTimedOut, RankFailed)):
        run_ranks(hang_on_one, 2, timeout=2)
    assert time.monotonic() - begin < 20
    assert run_ranks(dist.get_rank, 2) == [0, 1]


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        ("_local_scalar_dense", lambda x: x.sum().item()),
        ("_local_scalar_dense", lambda x: bool((x > 0).all())),
        ("_local_scalar_dense", lambda x: int(x[0])),
        ("tolist", lambda x: x.tolist()),
        ("cpu", lambda x: x.cpu().tolist()),
        ("cpu", lambda x: x.to("cpu").tolist()),
        ("nonzero", lambda x: x.nonzero()),
        ("index", lambda x: x[x > 1]),
        ("_unique2", lambda x: x.unique()),
        ("repeat_interleave", lambda x: torch.repeat_interleave(x.long())),
    ],
)
def test_host_syncs_are_counted_once_each(kind, act):
    with count_host_syncs() as count:
        act(torch.arange(1.0, 4.0))
    assert dict(count.calls) == {kind: 1}


@pytest.mark.parametrize(
    "act",
    [
        lambda x: (x * 2).sum(),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: torch.where(x > 1, x, 0),
        lambda x: x.to(torch.float64).argsort(),
        lambda x: torch.bincount(x.long(), minlength=5),
        lambda x: torch.repeat_interleave(x.long(), x.long(), output_size=6),
    ],
)
def test_work_on_the_device_is_not_counted(act):
    x = torch.arange(1.0, 4.0)
    with count_host_syncs() as count:
        act(x)
    assert count.total == 0


def test_collectives_are_counted_with_their_bytes():
    def collect():
        x = torch.ones(3)
        with count_collectives() as nothing:
            x.sum()
        with count_collectives() as count:
            dist.all_reduce(x)
            dist.all_to_all_single(torch.empty(4), torch.ones(4))
        return nothing.total, dict(count.calls), dict(count.bytes)

    for nothing, calls, sizes in run_ranks(collect, 2):
        assert nothing == 0
        assert calls == {"allreduce": 1, "alltoall_base": 1}
        assert sizes == {"allreduce": 12, "alltoall_base": 32}


def test_a_call_finds_nothing_of_the_meshes_of_an_earlier_one():
    def results_mesh_is_the_operands():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
        sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        return torch.empty_like(sharded).device_mesh is mesh

    assert run_ranks(results_mesh_is_the_operands, 2) == [True, True]
    assert run_ranks(results_mesh_is_the_operands, 2) == [True, True]


def test_a_mesh_and_so_its_threads_end_with_the_call():
    def use(shape):
        import weakref

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(0)])
        (rows * 2).sum(0).redistribute(mesh, [Replicate(), Replicate()])
        dist.meshes = [*getattr(dist, "meshes", []), weakref.ref(mesh)]  # the module outlives the call

    def left():
        return len(dist.meshes), sum(mesh() is not None for mesh in dist.meshes)

    run_ranks(use, 2, (2, 1))
    run_ranks(use, 2, (1, 2))
    assert run_ranks(left, 2) == [(2, 0)] * 2
