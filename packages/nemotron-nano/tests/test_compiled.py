"""Blocks under torch.compile: the eager numbers, and how many graphs each kind takes."""

import warnings

import attrs
import pytest
import torch
from torch._dynamo.utils import counters

from nemotron_nano import NemotronNano, presets
from nemotron_nano.components import CompiledConfig, compile_blocks

SMALL = attrs.evolve(
    presets["tiny"], hidden_size=48, vocab_size=61, num_experts=6, expert_hidden_size=24,
    shared_expert_hidden_size=32, mlp_hidden_size=40, mamba_num_heads=6, mamba_head_dim=8, chunk_size=8,
)  # fmt: skip


def graphs_and_difference(pattern: str, packed: bool, kinds: str | None = None) -> tuple[int, int, float]:
    """Graphs, breaks, and how far the compiled gradients are from the eager ones; of all kinds in the pattern."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    config = attrs.evolve(SMALL, pattern=pattern)
    eager, compiled = NemotronNano(config), NemotronNano(config)
    compiled.load_state_dict(eager.state_dict())
    compile_blocks(compiled, pattern if kinds is None else kinds, backend="aot_eager")
    tokens = torch.randint(61, (2, 21))
    documents = torch.tensor([[0] * 7 + [1] * 14, [3] * 21]) if packed else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's own, on its reading .grad of tensors that are no leaves
        for model in (eager, compiled):
            model(tokens, document_ids=documents).square().mean().backward()
    pairs = zip(compiled.parameters(), eager.parameters(), strict=True)
    apart = max(((a.grad - b.grad).norm() / b.grad.norm().clamp(min=1e-12)).item() for a, b in pairs)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), apart


@pytest.mark.parametrize(("kind", "packed"), [("M", True), ("*", False), ("*", True), ("-", False)])
def test_blocks_of_a_kind_share_one_whole_graph(kind, packed):
    graphs, breaks, apart = graphs_and_difference(kind * 3, packed)
    assert apart < 1e-5
    assert (graphs, breaks) == (1, 0)


def test_each_kind_is_one_graph_and_what_is_not_chosen_is_none():
    graphs, breaks, apart = graphs_and_difference("M*E-M*", False, kinds="M*")
    assert apart < 1e-5
    assert (graphs, breaks) == (2, 0)


def test_a_block_with_experts_is_cut_where_it_reads_its_counts():
    """16 pieces of one block and 18 of three, with torch 2.13 on a CPU: two are compiled again, for any number of rows,
    when loads differ. That depends on the loads, on where moe-core asks about the CPU, and on what dynamo traces.
    """
    graphs, breaks, apart = graphs_and_difference("EEE", False)
    assert apart < 1e-5
    assert 10 <= graphs <= 24  # three blocks that shared none would be 48
    assert graphs - 4 <= breaks < graphs


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match=r"kinds = 'MX': unknown letter 'X'"):
        CompiledConfig(kinds="MX")
