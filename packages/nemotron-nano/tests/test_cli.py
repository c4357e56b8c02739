"""The command: mistakes are said at once and start nothing; listing and checking need no torch."""

import json
import os
import platform
import resource
import socket
import subprocess
import sys
from importlib.metadata import version

import pytest


def _nemotron(*words, cwd=None, env=None):
    return subprocess.run(
        [sys.executable, "-m", "nemotron_nano", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "t"\nsteps = 2\n[[transform]]\ntype = "fsdp"\n')
    return path


def _in_process(words, then):
    """Run the command in a fresh interpreter and print what `then` evaluates to afterwards."""
    code = f"import sys; from nemotron_nano.cli import main; code = main({[str(w) for w in words]!r}); print(({then}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)


def test_components_lists_kind_name_distribution_and_version_without_torch():
    answer = _in_process(["components"], "code, 'torch' in sys.modules")
    *lines, last = answer.stdout.splitlines()
    assert last == "(0, False)"
    listed = [line.split() for line in lines if line.strip()]
    assert listed[0] == ["kind", "name", "distribution", "version"]
    for row in (["clipper", "multi_mesh", "grad-clip-multimesh"], ["transform", "fsdp", "fsdp-ep"]):
        assert any(line[:3] == row and line[3][0].isdigit() for line in listed), row
    distributions = {line[2] for line in listed[1:] if len(line) == 4}
    assert distributions >= {"moe-core", "ep-mesh", "ep-dispatch", "fsdp-ep", "grad-clip-multimesh", "chunked-loss",
                             "ckpt-layout", "nemotron-nano"}  # fmt: skip


def test_components_takes_under_a_second():
    def processor_seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert _nemotron("components").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # it waits for nothing but a processor, which other tests may have at the time; the best of a few
    assert min(processor_seconds() for _ in range(5)) < 1.0


def test_all_mistakes_in_a_config_come_at_once_and_nothing_is_started(config):
    tables = ['[mesh]\nep = "2"', '[model]\nprest = "tiny"', "[los]", '[clipper]\ntype = "multi_mash"']
    config.write_text("\n".join([*tables, "[data]", "sequence_length = 0"]))
    words = ["train", config, "--nproc", "2", "run.steps=1.5"]
    answer = _in_process(words, "code, 'torch' in sys.modules")
    assert answer.stdout.strip() == "(2, False)"
    for expected in (
        f"{config}:2:1: mesh.ep = '2': must be an integer, not a string",
        f"{config}:4:1: model.prest: is not a key of this table (did you mean 'preset'?)",
        f"{config}:5:1: los: is not a table of a config (did you mean 'loss'?)",
        "no clipper component is called 'multi_mash'; did you mean 'multi_mesh'?",
        f"{config}:9:1: data.sequence_length = 0: must be >= 1",
        "command line 'run.steps=1.5': run.steps = 1.5: must be an integer, not a number",
    ):
        assert expected in answer.stderr, answer.stderr
    assert "6 problems" in answer.stderr


def test_rules_between_tables_are_checked_before_a_process_starts(config):
    words = ["train", config, "--nproc", "4", "mesh.ep=3", "data.global_batch_size=6"]
    answer = _in_process(words, "code, 'torch' in sys.modules")
    assert answer.stdout.strip() == "(2, False)"
    assert "mesh.ep = 3" in answer.stderr
    assert "data.global_batch_size = 6: must be a multiple of 4 ranks" in answer.stderr


def test_a_degree_that_leaves_a_rank_without_experts_is_refused(config):
    answer = _nemotron("train", config, "--nproc", 4, "mesh.ep=4", "model.num_experts=5", "data.global_batch_size=4")
    assert answer.returncode == 2
    assert "mesh.ep = 4" in answer.stderr
    assert "5" in answer.stderr


def test_a_dry_run_prints_a_config_that_gives_the_same_again(config, tmp_path):
    first = _nemotron("train", config, "--nproc", 2, "--dry-run", "transform.fsdp.reshard_after_forward=false")
    assert first.returncode == 0, first.stderr
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(first.stdout)
    assert _nemotron("train", resolved, "--nproc", 2, "--dry-run").stdout == first.stdout
    assert "reshard_after_forward = false" in first.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["train", "absent.toml"], "absent.toml: can't be read: No such file or directory"),
        (["export", "absent"], "absent is not the folder of a run"),
        (["generate", "absent"], "absent is not the folder of a run"),
        (["report", "absent"], "absent is not the folder of a run"),
        (["train", "{config}", "--resume"], "has no checkpoint to --resume from"),
        (["train", "{config}", "run.device_type=banana"], "this machine has no such device"),
        (["train", "{config}", "data.type=text_files", "data.folder=absent"], "'absent': must be a folder that exists"),
    ],
)
def test_a_wrong_path_gives_one_clear_line(config, tmp_path, words, reason):
    answer = _nemotron(*[word.format(config=config) for word in words], cwd=tmp_path)
    assert answer.returncode == 2
    assert reason in answer.stderr
    assert "Traceback" not in answer.stderr
    assert len([line for line in answer.stderr.splitlines() if line.strip()]) <= 2


def test_several_ranks_that_a_config_needs_are_not_started_by_themselves_and_the_line_says_how(config):
    answer = _in_process(["train", config, "mesh.ep=2"], "code, 'torch' in sys.modules")
    assert answer.stdout.strip() == "(2, False)"
    assert "mesh.ep = 2: must divide dp_shard = 1" in answer.stderr
    assert "one process, which is the default" in answer.stderr
    assert "--nproc 2, or under torchrun" in answer.stderr
    assert "torchrun" not in _nemotron("train", config, "mesh.ep=2", "--nproc", 3).stderr  # it was said for how many
    four = _nemotron("train", config, "mesh.ep=2", "mesh.dp_replicate=2")
    assert "--nproc 4" in four.stderr
    never = _nemotron("train", config, "mesh.ep=2", "mesh.tp=3")  # no number of ranks would help
    assert (never.returncode, "--nproc" in never.stderr) == (2, False)


def test_the_versions_of_all_packages_torch_and_python_are_printed_without_importing_torch():
    code = (
        "import sys\nfrom nemotron_nano.cli import main\ntry:\n    main(['--version'])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *lines, last = answer.stdout.splitlines()
    assert last == "0 False"
    told = dict(line.split(" ") for line in lines)
    ours = {"nemotron-nano", "moe-core", "ep-mesh", "ep-dispatch", "fsdp-ep", "grad-clip-multimesh", "chunked-loss",
            "ckpt-layout"}  # fmt: skip
    assert set(told) == ours | {"torch", "Python"}
    assert told["nemotron-nano"] == version("nemotron-nano")
    assert told["Python"] == platform.python_version()


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["train", "c.toml", "--nproc", "x"], "--nproc: 'x': must be a whole number, at least 1"),
        (["train", "c.toml", "--nproc", "0"], "--nproc: '0': must be a whole number, at least 1"),
        (["train", "c.toml", "--nproc", "1.5"], "--nproc: '1.5': must be a whole number, at least 1"),
        (["plan", "c.toml", "--gpus", "many"], "--gpus: 'many': must be a whole number, at least 1"),
        (["plan", "c.toml", "--tflops", "nan"], "--tflops: 'nan': must be a number above 0"),
        (["generate", "r", "--temperature=warm"], "--temperature: 'warm': must be a number, not negative"),
        (["generate", "r", "--top-p", "0"], "--top-p: '0': must be a number above 0 and at most 1"),
        (["generate", "r", "--seed", "a"], "--seed: 'a': must be a whole number"),
    ],
)
def test_an_option_says_what_it_must_be(words, rule):
    answer = _nemotron(*words)
    assert answer.returncode == 2
    assert answer.stderr.rstrip().endswith(rule)
    assert "_" not in answer.stderr.splitlines()[-1]


def test_an_axis_that_the_trainer_does_not_use_is_refused(config):
    answer = _nemotron("train", config, "--nproc", 2, "mesh.tp=2")
    assert answer.returncode == 2
    assert "mesh.tp = 2: must be 1" in answer.stderr


def test_what_a_killed_first_save_leaves_is_no_checkpoint(config, tmp_path):
    (tmp_path / "runs" / "t" / "checkpoints" / ".step-00000002.partial").mkdir(parents=True)
    resumed = _nemotron("train", config, "--resume", cwd=tmp_path)
    assert (resumed.returncode, "has no checkpoint to --resume from" in resumed.stderr) == (2, True)
    little = ["run.steps=1", "data.validation_sequences=1", "data.sequence_length=16", "data.global_batch_size=2"]
    afresh = _nemotron("train", config, *little, cwd=tmp_path)
    assert afresh.returncode == 0, afresh.stderr


@pytest.mark.parametrize("launched", [{}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}])
def test_checkpoints_are_found_where_the_config_puts_them_and_never_written_over(config, tmp_path, launched):
    words = ["train", config, "checkpointer.directory=ck", "run.steps=1", "data.validation_sequences=1"]
    words += ["data.sequence_length=16", "data.global_batch_size=2"]
    assert _nemotron(*words, cwd=tmp_path, env=launched).returncode == 0
    before = (tmp_path / "runs" / "t" / "metrics.jsonl").read_text()
    again = _nemotron(*words, cwd=tmp_path, env=launched)
    assert again.returncode == 2
    assert "holds a checkpoint of step 1" in again.stderr
    assert (tmp_path / "runs" / "t" / "metrics.jsonl").read_text() == before
    resumed = _nemotron(*words, "run.steps=2", "--resume", cwd=tmp_path, env=launched)
    assert resumed.returncode == 0, resumed.stderr
    assert _nemotron("export", "runs/t", cwd=tmp_path).returncode == 0
    too_far = _nemotron(*words, "--resume", cwd=tmp_path, env=launched)
    assert too_far.returncode == 1
    assert "beyond run.steps = 1" in too_far.stderr


def test_nothing_to_continue_is_refused(config, tmp_path):
    (tmp_path / "config.toml").write_text("[run]\n")
    answer = _nemotron("generate", tmp_path, "--prompt", "")
    assert answer.returncode == 2
    assert "must have at least one character" in answer.stderr
    assert _nemotron("generate", tmp_path, "--temperature=-1").returncode == 2


def test_a_missing_extra_is_named(tmp_path):
    (tmp_path / "config.toml").write_text("[run]\n")
    step = {"event": "step_end", "step": 1, "loss": 2.0, "tokens": 8, "seconds": 1.0, "peak_memory_bytes": [1]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    code = (
        "import sys; sys.modules['matplotlib'] = None; from nemotron_nano.cli import main; "
        f"sys.exit(main(['report', {str(tmp_path)!r}]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert answer.stderr.strip() == "nemotron-nano: plots need matplotlib: pip install 'nemotron-nano[plot]'"


def test_a_port_in_use_is_one_clear_line(config, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        answer = _nemotron("train", config, cwd=tmp_path, env=env)
    assert answer.returncode == 1
    assert f"127.0.0.1:{port}" in answer.stderr
    assert "choose another one" in answer.stderr
    assert "Traceback" not in answer.stderr
