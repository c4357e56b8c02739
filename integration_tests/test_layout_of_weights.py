"""Where the weights of the assembled model live: experts on the expert mesh, everything else on the data shards."""


def placements(
    words: list[str], device_type: str
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]]:
    from moe_core import load_config
    from nemotron_nano.train.assemble import assemble

    run = assemble(load_config((), words), device_type=device_type)
    return {
        name: (p.device_mesh.mesh_dim_names, tuple(p.shape), tuple(p.to_local().shape))
        for name, p in run.model.named_parameters()
    }


WORDS = ['transform=[{type="expert_parallelized"}, {type="fsdp", separate_lm_head=true}]', "tracker=[]"]


def test_experts_are_sharded_over_both_axes_and_the_router_over_data_parallel_only(on_ranks, device_type):
    for by_name in on_ranks(placements, 2, [*WORDS, "mesh.ep=2"], device_type):
        experts = {name: value for name, value in by_name.items() if ".experts." in name}
        assert len(experts) == 4
        for axes, shape, local in experts.values():
            assert axes == ("dp_shard_mod_ep", "ep")
            assert shape[0] == 16
            assert local == (8, *shape[1:])
        for name, (axes, shape, local) in by_name.items():
            if name not in experts:
                assert axes == ("dp_shard",), name
                assert local[0] == shape[0] // 2, name
        assert any("router.weight" in name for name in by_name)
        assert any("shared_experts" in name for name in by_name)


def test_four_ranks_hold_a_quarter_of_the_experts_each(on_ranks, device_type):
    for by_name in on_ranks(placements, 4, [*WORDS, "mesh.ep=2"], device_type):
        for name, (axes, shape, local) in by_name.items():
            if ".experts." in name:
                assert axes == ("dp_shard_mod_ep", "ep")
                assert (shape[0], local[0]) == (16, 4)


def test_names_are_those_of_one_process_at_every_degree(on_ranks, device_type):
    (one,) = on_ranks(placements, 1, WORDS, device_type)
    assert list(on_ranks(placements, 2, [*WORDS, "mesh.ep=2"], device_type)[1]) == list(one)
    assert list(on_ranks(placements, 2, WORDS, device_type)[1]) == list(one)
