from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from relayrun import places
from relayrun.config.compose import resolve, yaml_file
from relayrun.control.chain import job_script
from relayrun.errors import ConfigError
from relayrun.slurmtime import format_time, parse_time

RUN = """
project: demo
name: a
model: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_query_groups: 2}
data: {tokenizer: x, datasets: [d]}
training:
  steps: 4
  micro_batch_size: 2
  global_batch_size: 4
  seq_length: 8
optimizer: {lr: 1e-5}
checkpoint: {interval: 5}
job: {time: 12:00:00, ntasks_per_node: 2}
cluster: {name: here, scheduler: local}
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve.load_run_config(path, overrides)
    return str(caught.value)


def test_a_resolved_config_reads_back_as_it_was_by_us_and_by_plain_yaml(run_yaml: Path, tmp_path: Path) -> None:
    config = resolve.load_run_config(run_yaml, ["name='1e5'"])  # a name that YAML readers take for a number
    text = resolve.dump_run_config(config)
    (tmp_path / "out.yaml").write_text(text)
    assert resolve.read_resolved_config(tmp_path / "out.yaml") == config
    assert yaml.safe_load(text) == config.model_dump(mode="json")
    assert config.optimizer.lr == 1e-5
    assert config.name == "1e5"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("12:00:00", "12:00:00"),
        ("no", "no"),
        ("010", "010"),
        ("true", True),
        ("~", None),
        ("", None),
        ("1_000", 1000),
        ("2026-01-01", "2026-01-01"),
        (".5", 0.5),
        ("'1'", "1"),
        ("[a, 1]", ["a", 1]),
    ],
)
def test_yaml_values_without_surprises(text: str, value: object) -> None:
    assert yaml_file.parse_yaml_value(text) == value
    assert type(yaml_file.parse_yaml_value(text)) is type(value)


def test_an_unknown_name_is_an_error_with_file_line_and_nearest_name(run_yaml: Path) -> None:
    run_yaml.write_text(RUN.replace("  steps", "  stepz"))
    message = error_of(run_yaml)
    assert f"{run_yaml}:7: training.stepz: unknown setting; did you mean 'steps'?" in message
    assert "training.steps: this setting is missing" in message


def test_an_override_is_checked_like_a_file(run_yaml: Path) -> None:
    assert resolve.load_run_config(run_yaml, ["training.steps=50"]).training.steps == 50
    assert "--set job.tiem=5: job.tiem: unknown setting; did you mean 'time'?" in error_of(run_yaml, "job.tiem=5")
    assert "write NAME.NAME=VALUE" in error_of(run_yaml, "training.steps")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.lr_warmup_steps=4",
            "lr_warmup_steps 4 must be below training.steps 4; set optimizer.lr_warmup_steps=0",
        ),
        ("optimizer={lr: 1e-3, lr_warmup_steps: 50, lr_decay_steps: 30}", "must be below optimizer.lr_decay_steps 30"),
        ("optimizer.min_lr=1e-3", "optimizer.min_lr 0.001 is above optimizer.lr 1e-05"),
        ("training.global_batch_size=5", "training.global_batch_size 5 is no multiple of micro_batch_size"),
        (
            "training.recompute_granularity=some",
            "training.recompute_granularity: Input should be 'full' or 'selective'",
        ),
        ("training.recompute_num_layers=1", "recompute_num_layers needs recompute_granularity full"),
        ("training.recompute_modules=[mlp]", "recompute_modules needs recompute_granularity selective"),
        ("training.seq_length=no", "training.seq_length: Input should be a valid integer, not 'no'"),
        ("chain.auto_requeue=yes", "chain.auto_requeue: Input should be a valid boolean, not 'yes'"),
        ("job.time=soon", "'soon' is no Slurm time"),
        ("job.time=0", "the time limit must be positive"),
        ("parallel.tensor_model_parallel_size=4", "2 ranks (job.nodes x job.ntasks_per_node) are no multiple of"),
        ("model.num_query_groups=3", "num_attention_heads 4 is no multiple of num_query_groups 3"),
        ("project=../x", "project: String should match pattern"),
        ("cluster=nowhere", "unknown cluster 'nowhere'; there are:"),
    ],
)
def test_wrong_values_are_refused_by_name(run_yaml: Path, override: str, message: str) -> None:
    assert message in error_of(run_yaml, override)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("[layernorm]", "training.recompute_modules.0: Input should be 'core_attn', 'mlp' or 'moe'"),
        ("[]", "recompute_modules names nothing; leave out recompute_granularity"),
    ],
)
def test_modules_that_cannot_be_recomputed_are_refused(run_yaml: Path, modules: str, message: str) -> None:
    overrides = ["training.recompute_granularity=selective", f"training.recompute_modules={modules}"]
    assert message in error_of(run_yaml, *overrides)
    assert "recompute_num_layers needs" in error_of(run_yaml, overrides[0], "training.recompute_num_layers=1")


def test_a_name_takes_the_number_of_nodes(run_yaml: Path, tmp_path: Path) -> None:
    assert resolve.load_run_config(run_yaml, ["name=a-{nodes}-nodes"]).name == "a-1-nodes"
    config = resolve.load_run_config(run_yaml, ["name=a-{nodes}-nodes", "job.nodes=4", "training.global_batch_size=16"])
    assert config.name == "a-4-nodes"
    assert config.run_dir is not None
    assert config.run_dir.endswith("logs/runs/demo/a-4-nodes")
    revision = tmp_path / "resolved.yaml"
    revision.write_text(resolve.dump_run_config(config))
    assert (
        resolve.load_run_config(revision, ["job.nodes=2"]).name == "a-4-nodes"
    )  # a resume on other nodes is the same run
    assert "name: String should match pattern" in error_of(run_yaml, "name=a-{node}")


def test_a_run_stops_before_its_last_step_or_at_it(run_yaml: Path) -> None:
    assert resolve.load_run_config(run_yaml).training.end_iteration == 4
    assert resolve.load_run_config(run_yaml, ["training.stop_after=3"]).training.end_iteration == 3
    assert resolve.load_run_config(run_yaml, ["training.stop_after=3"]).lr_steps(lambda samples: samples) == (0, 4)
    assert "stop_after 5 lies behind the last of steps 4" in error_of(run_yaml, "training.stop_after=5")


def test_includes_are_merged_in_order_and_loops_are_named(run_yaml: Path, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("optimizer: {lr: 1.0, weight_decay: 0.5}\n")
    run_yaml.write_text("include: [base.yaml]\n" + RUN)
    config = resolve.load_run_config(run_yaml)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-5, 0.5)
    (tmp_path / "base.yaml").write_text("include: [run.yaml]\n")
    assert "the files include each other" in error_of(run_yaml)


def test_a_cluster_file_gives_job_defaults_that_the_run_overrides(run_yaml: Path, tmp_path: Path) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "big.yaml").write_text(
        "name: big\nscheduler: slurm\njob: {partition: normal, cpus_per_task: 72}\n"
    )
    run_yaml.write_text(RUN.replace("cluster: {name: here, scheduler: local}", "cluster: big"))
    config = resolve.load_run_config(run_yaml, ["job.partition=debug"])
    assert (config.job.partition, config.job.cpus_per_task, config.cluster.name) == ("debug", 72, "big")


SITE = "name: big\nscheduler: slurm\njob: {partition: normal, cpus_per_task: 72}\nenvironment: {A: a, B: b}\n"


@pytest.mark.parametrize("cluster", ["{name: here, scheduler: local}", "small"])
def test_an_override_names_a_cluster_and_changes_parts_of_it_in_any_order(
    run_yaml: Path, tmp_path: Path, cluster: str
) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "big.yaml").write_text(SITE)
    (tmp_path / "clusters" / "small.yaml").write_text("name: small\nscheduler: local\n")
    run_yaml.write_text(RUN.replace("{name: here, scheduler: local}", cluster))
    overrides = ["cluster.environment.B=c", "cluster=big", "cluster.job.partition=debug", "cluster.python=/p"]
    for order in (overrides, overrides[::-1]):
        config = resolve.load_run_config(run_yaml, order)
        assert (config.cluster.name, config.cluster.environment) == ("big", {"A": "a", "B": "c"})
        assert (config.job.partition, config.job.cpus_per_task, config.cluster.python) == ("debug", 72, "/p")
    assert "--set cluster.pyton=/p: cluster.pyton: unknown setting; did you mean 'python'?" in error_of(
        run_yaml, "cluster=big", "cluster.pyton=/p"
    )


def test_a_part_of_a_cluster_that_a_file_names_is_overridden_alone(run_yaml: Path, tmp_path: Path) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "big.yaml").write_text(SITE)
    run_yaml.write_text(RUN.replace("{name: here, scheduler: local}", "big"))
    config = resolve.load_run_config(run_yaml, ["cluster.environment.B=c"])
    assert (config.cluster.name, config.cluster.environment) == ("big", {"A": "a", "B": "c"})


@pytest.mark.parametrize("path", sorted(places.shared_file("configs/runs").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("name", sorted(path.stem for path in places.shared_file("configs/clusters").glob("*.yaml")))
def test_every_run_config_goes_to_every_cluster(path: Path, name: str) -> None:
    config = resolve.load_run_config(path, [f"cluster={name}", "cluster.environment.NCCL_DEBUG=INFO"])
    assert (config.cluster.name, config.cluster.environment["NCCL_DEBUG"]) == (name, "INFO")


def test_a_name_given_twice_and_broken_yaml_name_their_line(run_yaml: Path) -> None:
    run_yaml.write_text(RUN + "name: b\n")
    assert f"{run_yaml}:15: name is given twice" in error_of(run_yaml)
    run_yaml.write_text("project: [a\n")
    assert f"{run_yaml}:2: not valid YAML" in error_of(run_yaml)
    assert "there is no such config file" in error_of(run_yaml.with_name("none.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job: &a {time: *a}", ":2: job.time: this alias names what it lies in"),
        ("x: &a [1, &b [*a, *b]]", ":2: x.1.0: this alias names what it lies in"),
        ("x: [1,\n  !!int abc]", ":3: x.1: 'abc' is no int"),
        ("x: !!float abc", ":2: x: 'abc' is no float"),
        ("x: !!bool abc", ":2: x: 'abc' is no bool"),
        ("x: !!timestamp abc", ":2: x: 'abc' is no timestamp"),
        (f"x: {'9' * 5000}", f":2: x: '{'9' * 17}...{'9' * 20}' has more than 64 bits"),
        ("x: 9_223_372_036_854_775_808", ":2: x: '9_223_372_036_854_775_808' has more than 64 bits"),
        ("x: 1e999", ":2: x: '1e999' is no finite number"),
        ("x: !!float .nan", ":2: x: '.nan' is no finite number"),
        (f"x: {'[' * 2000}{']' * 2000}", ": values are nested too deeply"),
        ("x: a\x00b", ": not valid YAML: special characters are not allowed"),
        (
            "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
            + "".join(f"{b}: &{b} [{', '.join(9 * ['*' + a])}]\n" for a, b in itertools.pairwise("abcdefghi")),
            ": more than 100,000 values, with those that aliases repeat",
        ),
    ],
)
def test_yaml_that_means_no_value_is_one_error_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"first: 1\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        yaml_file.read_yaml(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_an_alias_that_stands_twice_is_no_loop() -> None:
    assert yaml_file.parse_yaml("a: &a {b: [1]}\nc: [*a, *a]", source="x").values["c"] == [{"b": [1]}, {"b": [1]}]


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ('job.account="a\\n#SBATCH --wrap=x"', "job.account"),
        ('job.partition="a\\rb"', "job.partition"),
        ('job.exclude="n1\\x7f"', "job.exclude"),
        ('evaluation={interval: 1000, job: {qos: "a\\eb"}}', "evaluation.job.qos"),
        ('cluster.environment={A: "1\\n2"}', "cluster.environment.A"),
        ('cluster.modules=["gcc\\n"]', "cluster.modules.0"),
        ('cluster.srun_options=["--a\\tb"]', "cluster.srun_options.0"),
        ('cluster.command_prefix=["a\\Lb"]', "cluster.command_prefix.0"),
        ('cluster.python="/usr/bin/python3\\n"', "cluster.python"),
        ('cluster.host_python="python3\\0"', "cluster.host_python"),
        ('run_dir="/a\\nb"', "run_dir"),
        ('name="a\\n"', "name"),
    ],
)
def test_a_control_character_in_what_reaches_a_job_is_refused_by_the_settings_name(
    run_yaml: Path, override: str, name: str
) -> None:
    error = error_of(run_yaml, override)
    assert f"{name}: " in error
    assert "control character" in error or "should match pattern" in error


def test_an_override_is_one_line(run_yaml: Path) -> None:
    assert "one value stands behind an =, on one line" in error_of(run_yaml, "name=a\njob: b")


def test_no_line_of_a_job_script_takes_a_line_break() -> None:
    with pytest.raises(ConfigError, match="control character cannot stand in a line of a job script"):
        job_script._quote("a\n#SBATCH --wrap=x")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("1:30", 90), ("12:00:00", 43200), ("1-0", 86400), ("1-2:03", 93780), ("2-03:04:05", 183845)],
)
def test_slurm_times(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds
    assert parse_time(format_time(seconds)) == seconds
