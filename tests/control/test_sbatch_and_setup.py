"""Any option of sbatch from a config, and a person's own lines before the ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.job_script import check_setup_lines
from relayrun.control.chain import job_script
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import ConfigError
from relayrun.submit import policies, run_plan, submission
from relayrun.submit.check import slurm as check

ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "configs/runs/demo-slurm.yaml"

HELP = """Usage: sbatch [OPTIONS(0)...] [ : [OPTIONS(N)...]] script(0) [args(0)...]
  -A, --account=name          charge job to specified account
      --gres=list             required generic resources
  -J, --job-name=jobname      name of job
      --mail-type=type        notify on state change: BEGIN, END, FAIL or ALL
      --mem-per-cpu=MB        --mem >= --mem-per-cpu if --mem is specified.
      --propagate[=rlimits]   propagate all [or specific list of] rlimits
Options provided by plugins:
      --uenv=<file>           the user environment
"""


def config(*overrides: str) -> RunConfig:
    return resolve.load_run_config(SLURM, overrides)


def header(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed sbatch that prints HELP."""
    monkeypatch.setattr(slurm_commands, "run_slurm_command", lambda command, seconds: HELP)
    slurm_commands.installed_sbatch_options.cache_clear()
    yield
    slurm_commands.installed_sbatch_options.cache_clear()


@pytest.mark.parametrize(
    ("option", "kept"),
    [('cpus-per-gpu: "4"', False), ("tres-per-task: cpu=4", False), ("tres-per-task: gres/gpu:1", True)],
)
def test_processors_are_asked_for_in_one_way(option: str, kept: bool) -> None:
    """sbatch: --cpus-per-task, --tres-per-task=cpu:#, and --cpus-per-gpu are mutually exclusive."""
    lines = header(submission.dry_run(config(f"job.sbatch={{{option}}}")))
    assert any(line.startswith("--cpus-per-task") for line in lines) is kept
    assert any(line.startswith(f"--{option.partition(':')[0]}") for line in lines)


def test_any_option_stands_in_the_job_script_quoted() -> None:
    text = submission.dry_run(
        config('job.sbatch={gres: "gpu:4", mail-type: END, licenses: "a b\\"$(id)", nice: 100, contiguous: true}')
    )
    lines = header(text)
    for line in ("--gres=gpu:4", "--mail-type=END", '--licenses="a b\\"$(id)"', "--nice=100", "--contiguous"):
        assert line in lines
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{job-name: x}", "job-name is relayrun's own: it follows from project and name"),
        ("{dependency: singleton}", "dependency is relayrun's own"),
        ("{output: /tmp/x}", "output is relayrun's own: the job's script opens its logs"),
        ("{signal: USR1@60}", "signal is relayrun's own: set chain.signal_seconds"),
        ("{requeue: true}", "requeue is relayrun's own: set chain.auto_requeue"),
        ("{open-mode: append}", "open-mode is relayrun's own"),
        ("{export: NONE}", "export is relayrun's own: set cluster.environment"),
        ("{comment: mine}", "comment is relayrun's own: the chain notes there"),
        ("{partition: gpu}", "partition is relayrun's own: set job.partition"),
        ("{mail_type: END}", "'mail_type' is no long name of an option of sbatch"),
        ('{gres: "gpu:4\\n#SBATCH --account=x"}', "holds the control character '\\n'"),
        ('{gres: ""}', "gres has no value"),
        ("{gres: [gpu]}", "job.sbatch.gres"),
    ],
)
@pytest.mark.parametrize("section", ["job", "evaluation.job"])
def test_what_cannot_be_handed_on_is_refused_with_what_to_do(section: str, given: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config("evaluation.interval=100", f"{section}.sbatch={given}")
    assert said in str(error.value)
    assert f"--set {section}.sbatch=" in str(error.value)


@pytest.mark.usefixtures("listed")
def test_names_are_checked_against_the_installed_sbatch_with_its_plugins() -> None:
    assert slurm_commands.option_names_in(HELP) >= {"account", "gres", "mem-per-cpu", "mem", "propagate", "uenv"}
    check.refuse_job_settings(config('job.sbatch={gres: "gpu:4", uenv: prgenv}'))
    with pytest.raises(
        ConfigError, match=r"job.sbatch.mail-typ: the sbatch .* has no option --mail-typ\n.*mail-type\?"
    ):
        check.refuse_job_settings(config("job.sbatch={mail-typ: END}"))
    with pytest.raises(ConfigError, match=r"evaluation.job.sbatch.grs: .*\n.*did you mean gres\?"):
        check.refuse_job_settings(config("evaluation={interval: 100, job: {sbatch: {grs: gpu}}}"))
    with pytest.raises(ConfigError, match=r"job.sbatch.gres: asks for 3 GPUs of a node, and job.gpus_per_node is 4"):
        check.refuse_job_settings(config("job.gpus_per_node=4", 'job.sbatch={gres: "gpu:a100:2,lustre:1,gpu:v100"}'))


def test_without_sbatch_the_list_of_a_named_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_commands, "installed_sbatch_options", lambda: None)
    slurm_commands.check_sbatch_options(["gres", "mail-type", "network"], where="job.sbatch")
    with pytest.raises(ConfigError, match=r"sbatch 26\.05\.5 has no option --mailtype\n.*did you mean mail-type\?"):
        slurm_commands.check_sbatch_options(["mailtype"], where="job.sbatch")


def test_the_real_sbatch_prints_a_list_that_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=ALL\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    slurm_commands.installed_sbatch_options.cache_clear()
    found = slurm_commands.installed_sbatch_options()
    slurm_commands.installed_sbatch_options.cache_clear()
    if found is None:
        assert os.environ.get("RELAYRUN_NO_SLURM") == "1", "Slurm's commands are missing"
        pytest.skip("no Slurm here")
    assert {"gres", "mail-type", "job-name", "network", "open-mode", "contiguous", "mem-bind"} <= found
    assert not {"x", "set"} & found


def test_gpus_are_asked_for_in_one_way_only() -> None:
    assert "--gpus-per-node=4" in header(submission.dry_run(config("job.gpus_per_node=4")))
    per_task = ('{tres-per-task: "cpu=4,gres/gpu:1"}', '{tres-per-task: "gres/gpu=1"}', "{gpus-per-task: 1}")
    for other in ('{gres: "gpu:4"}', '{gres: "lustre:1,gpu:a100:4"}', *per_task):
        lines = header(submission.dry_run(config("job.gpus_per_node=4", f"job.sbatch={other}")))
        assert not any(line.startswith("--gpus-per-node") for line in lines), lines


@pytest.mark.parametrize(
    ("script", "options", "wanted"),
    [
        ({}, {"gpus-per-node": "4", "time": "10"}, {"gpus-per-node": "4", "time": "10"}),
        ({"gres": "gpu:4"}, {"gpus-per-node": "4"}, {"gres": "gpu:4"}),
        ({"gres": "gpu:a100:4"}, {"gpus-per-node": "2"}, {"gres": "gpu:a100:2"}),
        ({"gres": "lustre:1,gpu:4"}, {"gpus-per-node": "a100:2(S:0)"}, {"gres": "lustre:1,gpu:a100:2"}),
        ({"gpus-per-task": "1"}, {"gpus-per-node": "4"}, {}),
        ({"gres": "lustre:1"}, {"gpus-per-node": "4"}, {"gpus-per-node": "4"}),
    ],
)
def test_a_successor_asks_for_gpus_as_its_script_does(
    script: dict[str, str | None], options: dict[str, str], wanted: dict[str, str]
) -> None:
    assert slurm_commands.gpu_options_like_script(options, script) == wanted


@pytest.mark.parametrize(
    ("gres", "asks"),
    [
        *((none, False) for none in ("gpu:0", "gpu:a100:0", "gpu:0(S:0)", "lustre:1,gpu:0")),
        *((some, True) for some in ("gpu", "gpu:10", "gpu:a100:4", "gpu:0,gpu:a100:1")),
    ],
)
def test_no_gpus_are_no_request_for_gpus(gres: str, asks: bool) -> None:
    assert slurm_commands.asks_for_gpus({"gres": gres}) is asks


def test_an_evaluation_asks_for_its_own_gpus_in_the_way_of_the_site() -> None:
    def lines(*overrides: str) -> list[str]:
        given = config("job.gpus_per_node=4", "evaluation.interval=100", *overrides)
        run = Run(Path("/tmp/run"))
        plan = run_plan.make_plan(given, run, ROOT, revision=1)
        return header(policies.evaluation_script(given, plan, run))

    site = 'job.sbatch={gres: "gpu:4", constraint-of-mine: x, mail-type: END}'.replace("constraint-of-mine: x, ", "")
    assert {"--gres=gpu:1", "--mail-type=END"} <= set(lines(site))
    assert "--gpus-per-node=1" not in lines(site)
    assert "--gpus-per-node=1" in lines()
    assert not any("gpu" in line for line in lines(site, "evaluation.job.gpus_per_node=0"))
    own = lines(site, 'evaluation.job.sbatch={gres: "gpu:2", mail-type: false}')
    assert "--gres=gpu:2" in own
    assert not any(line.startswith("--mail-type") for line in own)


def test_options_of_the_site_and_of_the_run_are_joined(tmp_path: Path) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/here.yaml").write_text(
        'name: here\nscheduler: slurm\njob:\n  partition: boost\n  sbatch: {gres: "gpu:4", licenses: scratch}\n'
    )
    path = tmp_path / "run.yaml"
    path.write_text(f"include: [{SLURM}]\ncluster: here\njob:\n  sbatch: {{mail-type: END, licenses: false}}\n")
    resolved = resolve.load_run_config(path)
    lines = header(submission.dry_run(resolved))
    assert {"--partition=boost", "--gres=gpu:4", "--mail-type=END"} <= set(lines)
    assert not any(line.startswith("--licenses") for line in lines)
    (tmp_path / "again.yaml").write_text(resolve.dump_run_config(resolved))
    assert resolve.read_resolved_config(tmp_path / "again.yaml") == resolved
    assert resolve.read_settings(path).place(("job", "sbatch", "gres")) == f"{tmp_path}/clusters/here.yaml:5"


def run_setup(tmp_path: Path, lines: list[str]) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the lines, then a program that prints A and its working directory."""
    script, report = tmp_path / "setup.sh", tmp_path / "it's failed"
    script.write_text(job_script.setup_script(lines, report=str(report)))
    done = subprocess.run(
        ["bash", str(script), "sh", "-c", 'echo "ran A=${A-} $PWD"'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return done, report.read_text() if report.exists() else ""


def test_lines_run_as_they_are_and_change_the_programs_surroundings(tmp_path: Path) -> None:
    lines = ["export A='x y'", "if [ 1 = 1 ]; then", '  A="$A z"', "fi", "mine() { false || true; }", "mine; cd /"]
    done, report = run_setup(tmp_path, lines)
    assert (done.returncode, done.stdout, report) == (0, "ran A=x y z /\n", "")


@pytest.mark.parametrize(
    ("lines", "failed", "code"),
    [
        (["true", "false", "true"], "false", 1),
        (
            ["if true; then", '  sh -c "exit 3" -- 50% \\x', "fi"],
            'sh -c "exit 3" -- 50% \\x',
            3,
        ),
        (["false | cat"], "false | cat", 1),
        (["no-such-command-here"], "no-such-command-here", 127),
        (["(exit 7)", "true"], "(exit 7)", 7),
        (["activate() { false; return 4; }", "activate env", "true"], "activate env", 4),
    ],
)
def test_a_line_that_fails_ends_the_script_and_is_named(
    tmp_path: Path, lines: list[str], failed: str, code: int
) -> None:
    done, report = run_setup(tmp_path, lines)
    assert done.returncode == code
    assert "ran" not in done.stdout
    assert " ".join(report.split()) == f"job.setup failed (exit code {code}) at: {failed}"
    assert report.strip() in done.stderr


@pytest.mark.parametrize("call", ["exit 0", "ends"])
def test_a_line_that_ends_the_script_does_not_start_the_program(tmp_path: Path, call: str) -> None:
    done, report = run_setup(tmp_path, ["ends() { exit 0; }", call, "true"])
    assert (done.returncode, "ran" in done.stdout) == (1, False)
    assert report == "job.setup failed (exit code 0) in a call of exit\n"


def test_code_of_the_site_runs_without_our_strictness_and_traps(tmp_path: Path) -> None:
    """Lmod reads variables that are not set; the scripts of conda's environments do, and have commands that fail."""
    (tmp_path / "conda.sh").write_text(
        'conda() { false; CONDA="$NO_SUCH_VARIABLE$2"; [[ "$2" ]]; }\n'
        'false\n[ "$ALSO_NOT_SET" = 1 ]\ncase $- in *[eu]*) exit 9 ;; esac\ntrue\n'
    )
    lines = ["source ./conda.sh", "conda activate w", 'export A="$NOT_SET$CONDA"']
    done, report = run_setup(tmp_path, lines)
    assert (done.returncode, report) == (0, ""), done.stderr
    assert done.stdout.startswith("ran A=w ")
    done, report = run_setup(tmp_path, ["source ./conda.sh", "conda activate", "export A=1"])
    assert (done.returncode, report) == (1, "job.setup failed (exit code 1) at: conda activate\n")


def test_modules_load_without_our_strictness_and_then_it_holds_again(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    module = 'module() { if [ "$MODULES_SILENT_SHELL_DEBUG" = 1 ]; then set +x; fi; false; export LOADED="$2"; }'
    lines = job_script.setup_lines([], modules=["cuda"])
    script.write_text("\n".join(["set -euo pipefail", module, *lines, 'echo "$LOADED $-"', "false", "echo lost", ""]))
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("cuda ")
    assert {"e", "u"} <= set(done.stdout.split()[1])
    script.write_text("\n".join(["set -euo pipefail", "module() { return 3; }", *lines, "echo lost", ""]))
    sourced = subprocess.run(
        ["bash", "-c", f"set -e; . {script}"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (sourced.returncode, sourced.stdout) == (3, "")
    assert "cluster.modules or job.setup failed (exit code 3) at: module load cuda" in sourced.stderr


def test_lines_that_are_no_bash_are_refused_and_nothing_of_them_runs(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    with pytest.raises(ConfigError, match=r"job.setup: Bash cannot read these lines: line 2: syntax error"):
        check_setup_lines([f"touch {trace}", "fi"], where="job.setup")
    check_setup_lines([f"touch {trace}"], where="job.setup")
    assert not trace.exists()
    with pytest.raises(ConfigError, match=r"job.setup.0: holds the control character"):
        config('job.setup=["a\\nb"]')


def test_lines_stand_in_an_evaluations_script_behind_the_modules(tmp_path: Path) -> None:
    given = config(
        "evaluation.interval=100",
        "cluster.modules=[cuda]",
        'job.setup=["source /opt/site/env.sh", "ulimit -l unlimited"]',
    )
    run = Run(tmp_path)
    plan = run_plan.make_plan(given, run, ROOT, revision=1)
    lines = policies.evaluation_script(given, plan, run).splitlines()
    places = [lines.index(line) for line in ("module load cuda", "source /opt/site/env.sh", "ulimit -l unlimited")]
    assert places == sorted(places)
    assert lines.index("set -euo pipefail") < places[0]
    assert lines[-1].startswith("exec srun ")
    attempt = run.attempt(1)
    command = job_script.task_command(plan, ["srun"], ["train", "--attempt=1"], setup=attempt.setup)
    assert command[:3] == ["bash", str(attempt.setup), "srun"]


def test_the_first_of_the_chains_jobs_and_its_successor_have_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given = config("job.gpus_per_node=4", 'job.sbatch={gres: "gpu:4"}')
    plan = run_plan.make_plan(given, Run(Path("/tmp/run")), ROOT, revision=1)
    said: list[Any] = []
    monkeypatch.setattr(Slurm, "submit_once", lambda self, arguments, name: said.append(arguments) or "1")
    Slurm().submit(plan, Path("/tmp/run/job.sbatch"), options={"gpus-per-node": "4", "time": "10"})
    assert said == [["--dependency=singleton", "--time=10", "--gres=gpu:4", "/tmp/run/job.sbatch"]]
