"""The trainer's own parts: learning rate, decay groups, the check that all ranks are alike, the record of metrics."""

import json
import math
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import nn

from moe_core.testing import RankFailed, run_ranks
from nemotron_nano.report.trackers import ConsoleTracker, JsonlTracker, MetricsError, read_metrics
from nemotron_nano.train.components import AdamWConfig, adamw, warmup_cosine
from nemotron_nano.train.measure import Utilisation, UtilisationError


def test_the_learning_rate_warms_up_and_falls_on_a_cosine_to_its_floor():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    scheduler = warmup_cosine(optimizer, warmup_steps=4, decay_steps=12, floor=0.1)
    rates = []
    for _ in range(15):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    halfway = 2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 4 / 8)))
    assert rates[8] == pytest.approx(halfway)
    assert rates[12:] == pytest.approx([0.2, 0.2, 0.2])


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    optimizer = adamw(model, AdamWConfig(weight_decay=0.3))
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decayed[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.3,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
    }


def _assemble(*words):
    from moe_core import load_config
    from nemotron_nano.train.assemble import assemble

    assemble(load_config((), ["tracker=[]", *words]), device_type="cpu")


def test_ranks_with_different_configs_are_named_instead_of_diverging():
    def assemble_with_another_seed_on_rank_1():
        _assemble('transform=[{type="fsdp"}]', f"run.seed={torch.distributed.get_rank()}")

    with pytest.raises(RankFailed, match="ranks 1 loaded other config than rank 0"):
        run_ranks(assemble_with_another_seed_on_rank_1, 2)


def test_ranks_with_different_plugins_are_named():
    def assemble_without_a_plugin_on_rank_1():
        import os

        if torch.distributed.get_rank() == 1:
            os.environ["MOE_PLUGINS_DISABLE"] = "ep-dispatch"
        try:
            _assemble('transform=[{type="fsdp"}]')
        finally:
            os.environ.pop("MOE_PLUGINS_DISABLE", None)

    with pytest.raises(RankFailed, match="ranks 1 loaded other plugins than rank 0"):
        run_ranks(assemble_without_a_plugin_on_rank_1, 2)


def test_a_model_that_no_transform_shards_is_refused_on_several_ranks():
    with pytest.raises(RankFailed, match=r"would train its own copy; add \[\[transform\]\]"):
        run_ranks(_assemble, 2)


def test_a_resumed_run_takes_back_the_records_of_the_steps_that_it_does_again(tmp_path):
    run = SimpleNamespace(config=SimpleNamespace(to_toml=lambda: "[run]\n"), world_size=2)
    first = JsonlTracker(tmp_path, "metrics.jsonl", enabled=True)
    first.run_start(run=run, first_step=0, description={"digest": "d"})
    for step in (1, 2, 3):
        first.step_end(step=step, metrics={"loss": float(step)})
    again = JsonlTracker(tmp_path, "metrics.jsonl", enabled=True)
    again.run_start(run=run, first_step=2, description={"digest": "d"})
    again.step_end(step=3, metrics={"loss": 30.0})
    losses = [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl") if record["event"] == "step_end"]
    assert losses == [1.0, 2.0, 30.0]


def test_only_the_first_rank_writes(tmp_path):
    tracker = JsonlTracker(tmp_path / "run", "metrics.jsonl", enabled=False)
    tracker.run_start(run=None, first_step=0, description={})
    tracker.step_end(step=1, metrics={"loss": 1.0})
    assert not (tmp_path / "run").exists()
    assert json.dumps(read_metrics(tmp_path / "run" / "metrics.jsonl")) == "[]"


def test_a_line_that_a_killed_run_left_incomplete_is_passed_over(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step_end", "step": 1}\n{"event": "step_end", "st')
    assert [record["step"] for record in read_metrics(path)] == [1]
    assert "incomplete" in caplog.text
    path.write_text('{"event": "step_end", "st\n{"event": "step_end", "step": 2}\n')
    with pytest.raises(MetricsError, match="line 1: is not JSON"):
        read_metrics(path)


TFLOPS = 1e-3
FLOPS_PER_TOKEN = 688_128
"""Of one attention layer, tiny, at 256 tokens a row: 3 (forward, and two products back for each of its own) times
2 * 128 * 256 for the head + 2 * 128 * (128 + 64 + 64 + 128) for the projections + 2 * 128 * 256 for half of the scores
and values."""


def test_mfu_of_a_step_is_its_arithmetic_by_what_the_device_could_do():
    from moe_core.plugins import Batch
    from nemotron_nano import NemotronNano, presets

    model = NemotronNano(attrs.evolve(presets["tiny"], pattern="*"), device="meta")
    rows = torch.zeros(3, 256, dtype=torch.int64)
    batches = [Batch(tokens=rows, labels=rows - 100)] * 2  # ignored labels are computed all the same
    # 1536 tokens * 688,128 = 1,056,964,608 operations, where 0.5 s at 10^9 a second allow 500,000,000
    assert Utilisation(model, TFLOPS).of_step(batches, seconds=0.5) == pytest.approx(2.113929216, rel=1e-12)


def test_mfu_of_a_model_that_does_not_say_its_flops_is_refused():
    with pytest.raises(
        UtilisationError, match=r"trainer\.tflops = 312: the model is a Linear and has no method flops_"
    ):
        Utilisation(nn.Linear(2, 3), 312)


def test_a_run_reports_mfu_where_it_knows_a_peak_and_only_there(tmp_path, capsys):
    def train(*words):
        from moe_core import load_config
        from nemotron_nano.train.assemble import assemble

        words = ["run.steps=2", "model.pattern=*", 'transform=[{type="fsdp"}]', "data.global_batch_size=4", *words]
        config = load_config(
            (), ["tracker=[{type='jsonl'}]", "trainer.type=pretrain", "data.sequence_length=256", *words]
        )
        config["trainer"].build(run := assemble(config, device_type="cpu"))(run)

    folders = [tmp_path / "with", tmp_path / "without"]
    for folder, word in zip(folders, (f"trainer.tflops={TFLOPS}", "trainer.tflops=none"), strict=True):
        run_ranks(train, 2, word, f"run.output_dir={folder}")
    known, unknown = ([one for one in read_metrics(f / "metrics.jsonl") if one["event"] == "step_end"] for f in folders)
    assert len(known) == len(unknown) == 2
    for one in known:
        # 512 of the step's 1024 tokens are on a rank
        assert one["mfu"] == pytest.approx(512 * FLOPS_PER_TOKEN / (one["seconds"] * 1e9), rel=1e-9)
    assert not any("mfu" in one for one in unknown)

    for one in (known[0], unknown[0]):
        tracker = ConsoleTracker(every=1, enabled=True)
        tracker.step_end(step=1, steps=2, metrics={**one, "mfu": 0.3456} if "mfu" in one else one)
    first, second = capsys.readouterr().out.splitlines()
    assert " tokens/s  MFU 34.6%  peak memory " in first
    assert "MFU" not in second


def bias_after_a_step(*words):
    from moe_core import load_config
    from moe_core.config import validate
    from nemotron_nano.train.assemble import assemble

    fixed = ["run.steps=1", "model.pattern=E", "tracker=[]", 'transform=[{type="fsdp"}]', "data.global_batch_size=2"]
    config = load_config((), [*fixed, "trainer.type=pretrain", "data.sequence_length=16", *words])
    validate(config, 1)
    config["trainer"].build(run := assemble(config, device_type="cpu"))(run)
    return next(buffer for name, buffer in run.model.named_buffers() if name.endswith("router.bias"))


def test_a_config_chooses_how_the_router_bias_moves(tmp_path):
    words = (f"run.output_dir={tmp_path}/", "trainer.router_bias_rate=0.25")
    (by_sign,) = run_ranks(lambda: bias_after_a_step(f"{words[0]}a", words[1]), 1)
    (by_share,) = run_ranks(
        lambda: bias_after_a_step(f"{words[0]}b", words[1], "trainer.router_bias_rule=proportional"), 1
    )
    assert set(by_sign.abs().tolist()) <= {0.0, 0.25}
    assert len(set(by_share.abs().tolist())) > 2
    assert torch.equal(by_share.sign(), by_sign.sign())
