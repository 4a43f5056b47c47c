"""Every site file renders a job, which holds what the site's documentation asks for."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.config.compose.yaml_file import LocatedSettings
from relayrun.lab.site_probe import write_facts
from relayrun.submit import submission
from relayrun.submit.check import report
from relayrun.tokens.tokenize import job_config

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "configs/clusters"

ASKED_FOR = {
    "alps": ["--partition=normal", "--gpus-per-node=4", "--ntasks-per-node=4", "--cpus-per-task=72", "--exclusive"],
    "lumi": ["--partition=standard-g", "--gpus-per-node=8", "--ntasks-per-node=8", "--cpus-per-task=7"],
    "leonardo": ["--partition=boost_usr_prod", "--gres=gpu:4", "--ntasks-per-node=4", "--cpus-per-task=8"],
    "juwels-booster": ["--partition=booster", "--gres=gpu:4", "--ntasks-per-node=4", "--cpus-per-task=12"],
    "jupiter": ["--partition=booster", "--gres=gpu:4", "--ntasks-per-node=4", "--cpus-per-task=72"],
    "marenostrum5": ["--partition=acc", "--gres=gpu:4", "--ntasks-per-node=4", "--cpus-per-task=20"],
    "perlmutter": ["--constraint=gpu", "--gpus-per-node=4", "--qos=regular", "--cpus-per-task=32"],
    "frontier": ["--partition=batch", "--gpus-per-node=8", "--ntasks-per-node=8", "--cpus-per-task=7"],
    "generic": [],
}
CORES = {
    "alps": 288,
    "lumi": 56,
    "leonardo": 32,
    "juwels-booster": 48,
    "jupiter": 288,
    "marenostrum5": 80,
    "perlmutter": 128,
    "frontier": 56,
}
"""Processors that jobs may have of a node, logical ones on Perlmutter."""

RUN = """
include: [{root}/configs/models/llama-3m.yaml]
project: p
name: n
cluster: {name}
run_dir: {folder}/run
data: {{tokenizer: {root}/x, datasets: [{root}/y]}}
training: {{steps: 10, micro_batch_size: 1, global_batch_size: 16, seq_length: 256, precision: bf16}}
optimizer: {{lr: 1e-3}}
checkpoint: {{interval: 5}}
job: {{nodes: 2, time: 01:00:00, account: proj}}
"""


def test_every_site_has_a_row() -> None:
    assert {path.stem for path in CLUSTERS.glob("*.yaml")} == set(ASKED_FOR) | {"local", "test"}


@pytest.mark.parametrize("name", ASKED_FOR)
def test_the_job_holds_what_the_site_asks_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(root=ROOT, name=name, folder=tmp_path))
    config = resolve.load_run_config(tmp_path / "run.yaml")
    text = submission.dry_run(config)
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    for option in [*ASKED_FOR[name], "--account=proj", "--nodes=2"]:
        assert option in lines, lines
    assert sum("gpu" in line and not line.startswith("--constraint") for line in lines) == (name != "generic")
    if name in CORES:
        assert config.job.ntasks_per_node == config.job.gpus_per_node
        assert config.job.ntasks_per_node * config.job.cpus_per_task <= CORES[name]


@pytest.mark.parametrize("name", [name for name in ASKED_FOR if name != "generic"])
def test_a_site_file_names_its_sources_and_leaves_the_account_to_the_user(name: str) -> None:
    text = (CLUSTERS / f"{name}.yaml").read_text()
    words = " ".join(text.replace("\n# ", " ").split())
    assert re.search(r"[Ff]rom ", words)
    assert "Not tried there by relayrun's authors" in words
    assert "The account is yours" in words or "Account and QOS are yours" in words
    assert "account" not in yaml.safe_load(text)["job"]


def test_the_check_says_what_could_not_be_read_of_a_site(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.format(root=ROOT, name="juwels-booster", folder=tmp_path))
    for overrides, said in (([], 1), (["cluster.not_checked=[]"], 0)):
        config = resolve.load_run_config(tmp_path / "run.yaml", overrides)
        found = [each for each in report.check_config(config).warnings if each.name == "job.site"]
        assert len(found) == said
        assert all("the name of the partition, booster; that GPUs" in each.words for each in found)


def test_a_check_warns_of_what_a_probe_found_and_the_run_meets(tmp_path: Path) -> None:
    site = tmp_path / "clusters/here.yaml"
    site.parent.mkdir()
    site.write_text("# mine\nname: here\nscheduler: slurm\nmodules: [good, bad]\n")
    facts = {"refused": ["partition", "qos"], "modules": ["bad"], "denied": ["requeue"], "misplaced": ["by-number"]}
    for written in ({"clocks": ["n1"]}, facts):
        write_facts(site, written)
    assert site.read_text().startswith("# mine\n")
    assert yaml.safe_load(site.read_text())["probed"] == facts
    (tmp_path / "run.yaml").write_text(RUN.format(root=ROOT, name="generic", folder=tmp_path))
    wanted = [f"cluster={site}", "job.partition=fast", "chain.auto_requeue=true"]
    config = resolve.load_run_config(tmp_path / "run.yaml", wanted)
    words = [each.words for each in report.check_config(config).warnings if each.name == "job.probed"]
    assert words == ["the site refuses --partition; the site lets nobody requeue a job; module bad does not load"]


def test_the_definition_file_of_alps_holds_the_variables_of_its_site_file() -> None:
    file = tomllib.loads((ROOT / "container/relayrun.toml").read_text())
    site = resolve.yaml_file.read_yaml(CLUSTERS / "alps.yaml").values
    assert file["env"] == site["environment"]
    assert len(file["env"]) == 11
    assert file["annotations"]["com"]["hooks"]["aws_ofi_nccl"] == {"enabled": "true", "variant": "cuda12"}
    assert set(file) == {"image", "mounts", "writable", "annotations", "env"}


@pytest.mark.long
def test_an_image_gets_the_packages_that_it_lacks_and_keeps_its_own(tmp_path: Path) -> None:
    """The image's Python is this one's base, with this one's packages; one package is in no image."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "not_in_the_image-1.0-py3-none-any.whl", "w") as wheel:
        about = "not_in_the_image-1.0.dist-info"
        wheel.writestr("not_in_the_image.py", "WORD = 'here'\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: not-in-the-image\nVersion: 1.0\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==0.0.1\nnvidia-nothing==9\nnumpy==0.0.1\nnot-in-the-image==1.0\n")
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "CONSTRAINTS": str(constraints),
        "HOME": str(tmp_path),
    }
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    command = ["make", "-s", "container-env", f"ENV={tmp_path}/env", f"IMAGE_PYTHON={base}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done
    assert (tmp_path / "env/missing-packages.txt").read_text() == "not-in-the-image==1.0\n"
    assert done.stdout.splitlines()[-1] == f"set cluster.python={tmp_path}/env/bin/python"
    python = [str(tmp_path / "env/bin/python"), "-c"]
    code = "import not_in_the_image as n, relayrun; print(n.WORD, relayrun.__file__)"
    told = subprocess.run(
        [*python, code], cwd="/", env=environment, capture_output=True, text=True, check=True, timeout=600
    ).stdout
    assert told == f"here {ROOT}/relayrun/__init__.py\n"
    refused = subprocess.run(
        [*command[:3], f"ENV={wheels}"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert "this is no virtual environment; name another folder" in refused.stderr


def test_the_command_of_the_page_about_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/how-to/clusters.md").read_text().replace("\\\n", " ")
    command = next(line for line in page.splitlines() if line.startswith("relayrun submit "))
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in shlex.split(command)[1:]]
    main(words)  # its placeholders are named, and the script is printed
    lines = capsys.readouterr().out.splitlines()
    for option in ("--partition=boost_usr_prod", "--gres=gpu:4", "--account=MY_PROJECT", "--cpus-per-task=8"):
        assert f"#SBATCH {option}" in lines


def test_the_pages_own_site_file_is_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/clusters.md").read_text()
    text = next(block for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if block.startswith("name: my-cluster"))
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/my-cluster.yaml").write_text(text)
    (tmp_path / "run.yaml").write_text(RUN.format(root=ROOT, name="my-cluster", folder=tmp_path))
    job = submission.dry_run(resolve.load_run_config(tmp_path / "run.yaml"))
    assert "#SBATCH --gres=gpu:4" in job
    assert "#SBATCH --mail-type=END" in job


def run_config(folder: Path, *, job: str = "{nodes: 2, time: 01:00:00}", name: str = "generic") -> Path:
    text = RUN.format(root=ROOT, name=name, folder=folder).replace("{nodes: 2, time: 01:00:00, account: proj}", job)
    (folder / "run.yaml").write_text(text)
    return folder / "run.yaml"


@pytest.mark.parametrize("option", ["account", "partition", "qos", "reservation", "constraint"])
def test_a_persons_variable_for_sbatch_is_heeded_and_written_into_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setenv(f"SBATCH_{option.upper()}", "proj2")
    config = resolve.load_run_config(run_config(tmp_path))
    assert f"#SBATCH --{option}=proj2\n" in submission.dry_run(config)
    config = resolve.load_run_config(run_config(tmp_path, name="alps"))  # it holds over the defaults of the site
    assert f"#SBATCH --{option}=proj2\n" in submission.dry_run(config)
    config = resolve.load_run_config(
        run_config(tmp_path), [f"job.{option}=mine"]
    )  # and --set over it, as an option of sbatch
    assert f"#SBATCH --{option}=mine\n" in submission.dry_run(config)
    (tmp_path / "resolved.yaml").write_text(resolve.dump_run_config(config))
    assert resolve.read_resolved_config(tmp_path / "resolved.yaml") == config  # what a run was submitted with stays


def test_a_persons_variable_for_sbatch_that_says_something_else_than_the_config_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "proj2")
    path = run_config(tmp_path, job="{time: 01:00:00, account: proj}")
    for verb in ("check", "submit"):
        assert main([verb, str(path)]) == 1
        said = capsys.readouterr().err
        assert "SBATCH_ACCOUNT=proj2, and job.account is proj" in said
        assert "run.yaml" in said
    monkeypatch.setenv("SBATCH_ACCOUNT", "proj")
    assert resolve.load_run_config(path).job.account == "proj"


@pytest.mark.parametrize("variable", ["SLURM_CLUSTERS", "SBATCH_CLUSTERS"])
def test_a_variable_that_names_another_cluster_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    monkeypatch.setenv(variable, "other")
    for verb in ("check", "submit"):
        assert main([verb, str(run_config(tmp_path))]) == 1
        assert f"{variable}=other is not heeded" in capsys.readouterr().err
    assert resolve.load_run_config(run_config(tmp_path, name="local")).cluster.scheduler == "local"
    scontrol = tmp_path / "scontrol"  # some sites set it for everybody
    scontrol.write_text("#!/bin/sh\nprintf 'CliFilterPlugins        = (null)\\nClusterName             = other\\n'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert resolve.load_run_config(run_config(tmp_path)).cluster.scheduler == "slurm"


@pytest.mark.parametrize(
    ("variable", "setting"),
    [("SBATCH_TIMELIMIT", "job.time"), ("SBATCH_WCKEY", "job.sbatch.wckey"), ("SBATCH_EXCLUSIVE", "job.exclusive")]
    + [(f"SBATCH_{name}", "the option in job or job.sbatch") for name in ("GPUS", "MEM_PER_CPU", "HINT")],
)
def test_a_variable_of_sbatch_that_is_not_heeded_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str, setting: str
) -> None:
    monkeypatch.setenv(variable, "5")
    resolve.load_run_config(run_config(tmp_path))
    assert f"{variable}=5 is not heeded: set {setting}" in caplog.text
    caplog.clear()
    resolve.load_run_config(run_config(tmp_path, name="local"))
    assert caplog.text == ""


def test_a_launchers_plan_has_the_account_of_its_job_whatever_the_shell_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with `sbatch --account=proj3`, which holds over the variable."""
    monkeypatch.delenv("MEGATRON_LM_DIR", raising=False)  # of the tests that need a checkout
    for name, value in {"SBATCH_ACCOUNT": "proj2", "SLURM_JOB_ACCOUNT": "proj3", "SBATCH_TIMELIMIT": "5"}.items():
        monkeypatch.setenv(name, value)
    seen: list[LocatedSettings] = []
    monkeypatch.setattr("relayrun.cli.run.submit.print_dry_run", lambda given, _: seen.append(given) or 0)
    assert main(["launch", "--dry-run", str(run_config(tmp_path))]) == 0
    assert seen[0].values["job"]["account"] == "proj3"
    assert "not heeded" not in capsys.readouterr().err


def test_the_variables_of_sbatch_hold_for_jobs_of_tokenization_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "proj2")
    job_config.write_site_shell_file("generic", tmp_path / "site")
    assert "--account=proj2" in (tmp_path / "site.options").read_text().split("\0")
