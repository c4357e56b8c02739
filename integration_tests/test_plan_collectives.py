"""The planner's collectives, calls and bytes, equal those counted in a step of the trainer, at every layout."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

WORDS = ["tracker=[]", "data.sequence_length=6", "data.global_batch_size=8", "model.hidden_size=64"]
EP = '{type="expert_parallelized"}'
FULL, SELECTIVE, SECOND = (
    f'{{type="activation_checkpointed", mode="{mode}", every=2}}' for mode in ("full", "selective", "every_nth")
)
FSDP = '{type="fsdp", separate_lm_head=true}'


def _transforms(*transforms: str) -> str:
    return f"transform=[{', '.join(transforms)}]"


VARIANTS = [
    [_transforms(EP, FSDP)],
    [_transforms(EP, FULL, FSDP), "data.microbatches=2", "loss.keep_head_unsharded=true"],
    [_transforms(EP, SELECTIVE, FSDP), "model.num_experts=10", "model.top_k=3", "clipper.norm_type=inf"],
    [
        _transforms(EP, SECOND, '{type="fsdp", reshard_after_forward=false}'),
        'loss.type="clm_cross_entropy"',
        "data.microbatches=2",
        "model.aux_loss_coefficient=0.01",
    ],
    [
        _transforms(
            '{type="expert_parallelized", dispatcher={type="all_to_all", check_splits=true}}',
            FULL,
            '{type="fsdp", separate_lm_head=true, param_dtype="bfloat16", reduce_dtype="bfloat16"}',
        ),
        "model.z_loss_coefficient=0.01",
    ],
]

LAYOUTS = [
    (1, ["mesh.ep=1"]),
    (4, ["mesh.ep=1"]),
    (4, ["mesh.ep=2"]),
    (4, ["mesh.ep=4"]),
    (4, ["mesh.ep=2", "mesh.dp_replicate=2"]),
]


def counted(variants: list[list[str]], device_type: str) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Calls and bytes by the operation's name of a step, for each list of words."""
    from moe_core import load_config
    from moe_core.testing import count_collectives
    from nemotron_nano.train.assemble import assemble

    found = []
    for words in variants:
        run = assemble(load_config((), words), device_type=device_type)
        trainer = run.config["trainer"].build(run)
        with count_collectives() as count:
            trainer._step(run, 0)
        found.append((dict(count.calls), dict(count.bytes)))
    return found


def planned(words: list[str], world_size: int) -> tuple[Counter[str], Counter[str]]:
    """Calls and bytes by kind, of all ranks together."""
    from moe_core import load_config
    from nemotron_nano.planner._collectives import collectives_of_a_step
    from nemotron_nano.planner._footprint import model_on_meta
    from nemotron_nano.planner._inputs import read_workload
    from nemotron_nano.planner._units import find_units

    work = read_workload(load_config((), words))
    mesh = work.mesh.resolve(world_size, work.model.num_experts)
    model = model_on_meta(work)
    names = len(list(model.parameters()))
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for rank in range(world_size):
        ep_rank = rank % mesh.ep
        for one in collectives_of_a_step(work, mesh, find_units(model, work, mesh, ep_rank), names, ep_rank):
            calls[one.kind] += one.calls
            sizes[one.kind] += one.bytes
    return calls, sizes


def _by_kind(counts: list[dict[str, int]]) -> Counter[str]:
    """The same operation has other names in other versions of torch."""
    kinds: Counter[str] = Counter()
    for of_rank in counts:
        for name, count in of_rank.items():
            plain = name.replace("_", "")
            (kind,) = (
                kind
                for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
                if kind.replace("_", "") in plain
            )
            kinds[kind] += count
    return kinds


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=lambda value: str(value).replace("mesh.", ""))
def test_planned_collectives_are_those_counted(
    on_ranks: Any, device_type: str, tmp_path: Path, world_size: int, layout: list[str]
) -> None:
    for number in range(40):  # read sooner than the files that are the default
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 50)
    data = ["data.type=text_files", f"data.folder={tmp_path}", "data.validation_fraction=0.2"]
    variants = [WORDS + data + variant + layout for variant in VARIANTS]
    results = on_ranks(counted, world_size, variants, device_type, timeout=300)
    for index, words in enumerate(variants):
        # bytes of rows depend on the router's choices rank by rank, and not in their sum
        calls, sizes = planned(words, world_size)
        assert calls == _by_kind([result[index][0] for result in results]), words
        assert sizes == _by_kind([result[index][1] for result in results]), words
