"""Files that another user can have written start nothing, with users that the kernel tells apart.

The users need no accounts: root may take any number. Without root the owners are pretended, see `tests.owners`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun import trust
from relayrun.control.agent import __main__ as agent
from relayrun.control.agent import node_facts
from relayrun.control.agent.messages import MessageSocket
from relayrun.control.agent.spawn_server import SpawnServer
from relayrun.control.chain import failover, supervisor, watch
from relayrun.control.chain.watch import Watch
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.errors import RelayrunError
from relayrun.files import read_bytes, read_json_lines, writable_by_owner_alone
from relayrun.leftovers import open_lock
from relayrun.submit.submission import _refuse_untrusted
from relayrun.train import __main__ as training
from relayrun.train.reporting import liveness
from relayrun.trust import UntrustedError, group_writable_parent, read_trusted, read_with_owner
from tests.history import make_history
from tests.slurm.test_triggers_uids import Person, acting_as

ME, OTHER = 61_021, 61_022


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of ME with `notices/policy.json`, behind folders that everybody can pass."""
    if os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("two users need root, and CI must not skip this")
        pytest.skip("two users need root")
    top = Path(tempfile.mkdtemp())
    top.chmod(0o755)
    try:
        with writable_by_owner_alone():
            (made := top / "run").mkdir()
            (made / "notices").mkdir()
            (made / "notices/policy.json").write_bytes(b"{}")
        for path in (made, made / "notices", made / "notices/policy.json"):
            os.chown(path, ME, ME)
        yield made
    finally:
        shutil.rmtree(top)


NAME = "notices/policy.json"


def refusal(folder: Path) -> str:
    """Why ME is refused the file; empty if it is read."""
    with acting_as(Person(ME, ME, ())):
        try:
            assert read_trusted(folder, NAME) == b"{}"
        except UntrustedError as error:
            return str(error)
    return ""


def test_a_file_of_this_user_or_of_root_is_read(folder: Path) -> None:
    assert refusal(folder) == ""
    os.chown(folder / NAME, 0, 0)
    assert refusal(folder) == ""
    (folder.parent / "link").symlink_to(folder)  # what this user names may be a link
    assert refusal(folder.parent / "link") == ""


@pytest.mark.parametrize("name", [".", "notices", NAME])
def test_each_part_of_the_path_must_be_this_users(folder: Path, name: str) -> None:
    os.chown(folder / name, OTHER, OTHER)
    said = refusal(folder)
    assert f"this belongs to {OTHER}" in said
    assert "--take-over" in said


@pytest.mark.parametrize("name", [".", "notices", NAME])
@pytest.mark.parametrize(("bits", "who"), [(0o020, "its group"), (0o002, "everybody")])
def test_no_part_may_be_written_by_others_and_the_command_that_mends_it_is_said(
    folder: Path, name: str, bits: int, who: str
) -> None:
    (folder / name).chmod((folder / name).stat().st_mode | bits)
    said = refusal(folder)
    assert f"{who} may write this" in said
    os.system(said.partition("look at it, then: ")[2])
    assert refusal(folder) == ""


@pytest.mark.parametrize("name", ["notices", NAME])
def test_a_link_below_the_folder_is_not_followed(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "aside")
    (folder / name).symlink_to(folder.parent / "aside")
    assert "this is a link" in refusal(folder)


def test_a_pipe_is_refused_at_once(folder: Path) -> None:
    (folder / NAME).unlink()
    os.mkfifo(folder / NAME, 0o600)
    os.chown(folder / NAME, ME, ME)
    assert "this is no file" in refusal(folder)


def test_of_the_folders_above_only_one_in_which_everybody_renames_is_refused(folder: Path) -> None:
    above = folder.parent
    above.chmod(0o775)
    assert refusal(folder) == ""
    assert group_writable_parent(folder) == str(above)
    above.chmod(0o1777)
    assert refusal(folder) == ""
    above.chmod(0o777)
    assert "everybody may rename" in refusal(folder)


def test_the_bytes_that_are_read_are_those_that_were_judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody exchanges the file between the judgement and the reading."""
    judge, path = trust._refuse, folder / NAME

    def judge_and_exchange(fd: int, name: str, top: str) -> None:
        judge(fd, name, top)
        if name.endswith(NAME):
            path.with_name("new").write_bytes(b'{"program": ["theirs"]}')
            path.with_name("new").replace(path)

    monkeypatch.setattr(trust, "_refuse", judge_and_exchange)
    assert refusal(folder) == ""
    assert path.read_bytes() != b"{}"


def program(main: Callable[[], int]) -> Callable[[Run], None]:
    """Run a program of a job, as a rank or a node starts it."""

    def start(run: Run) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["program", f"--run-dir={run.path}", "--attempt=1"])
            patch.setenv("RANK", "1")
            patch.setenv("LOCAL_RANK", os.environ.get("LOCAL_RANK", "0"))
            if main() != 0:
                raise UntrustedError((run.attempt(1).path / "failures/rank-0001.json").read_text())

    return start


@pytest.mark.parametrize(
    "process",
    [
        lambda run: Watch(run, 1),
        lambda run: watch.run_guard(run, 1, batch_pid=1),
        lambda run: supervisor.end_attempt(run, 1, 0),
        failover.run_fallback_job,
        program(node_facts.main),
        program(agent.main),
        program(lambda: training.main(training.SignalFlag())),
    ],
    ids=["watch", "guard", "end", "fallback", "facts of a node", "agent", "rank"],
)
def test_processes_of_a_job_refuse_a_plan_that_others_can_write_since_its_begin(
    tmp_path: Path, process: Callable[[Run], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "dump_stacks_on_request", lambda path: None)  # one handler for each process
    run = make_history(tmp_path / "run", lines=10, attempts=1)
    run.plan.chmod(0o664)
    with pytest.raises(UntrustedError, match="its group may write this"):
        process(run)


DEEP = "code/0001/relayrun/train/model/deep.py"
CHECKOUT = "code/megatron-lm/0001/megatron/core/deep.py"


def run_of_snapshots(folder: Path) -> Run:
    """A run whose plan names a snapshot of the code and one of Megatron-LM's checkout."""
    run = make_history(folder, lines=10, attempts=1)
    for name in (DEEP, CHECKOUT):
        (path := run.path / name).parent.mkdir(parents=True)
        path.write_text("")
    (run.path / DEEP).with_name("link").symlink_to("nowhere")  # as a checkout may have it
    settings = {"run": ["pretrain"], "dialect": "nvidia", "total_steps": 1, "dir": str(run.code / "megatron-lm/0001")}
    changes = {"package_root": str(run.code / "0001"), "trainer": "megatron-lm", "trainer_settings": settings}
    replace(Plan.load(run), **changes).write(run.plan)  # type: ignore[arg-type]
    return run


@pytest.mark.parametrize("name", [DEEP, CHECKOUT, "code/0001/relayrun/train", "code/megatron-lm"])
@pytest.mark.parametrize("load", [Plan.load_before_ranks, Plan.load_trusted, _refuse_untrusted])
def test_all_of_the_code_that_a_job_executes_is_judged(
    tmp_path: Path, name: str, load: Callable[[Run], object]
) -> None:
    run = run_of_snapshots(tmp_path / "run")
    load(run)
    (run.path / name).chmod(0o775)
    with pytest.raises(UntrustedError, match=f"{name}: its group may write this"):
        load(run)


def test_code_that_vanishes_meanwhile_hides_none_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python renames a temporary file beside each module that it compiles."""
    run = run_of_snapshots(tmp_path / "run")
    (run.path / DEEP).chmod(0o664)
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda fd: ["gone.pyc.1", *listed(fd)])
    with pytest.raises(UntrustedError, match=r"deep\.py"):
        Plan.load_before_ranks(run)


def test_ranks_that_start_again_refuse_code_that_others_can_write_since(tmp_path: Path) -> None:
    run = run_of_snapshots(tmp_path / "run")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = SpawnServer(theirs, run)
        (run.path / CHECKOUT).chmod(0o666)
        order = {"arguments": [f"--run-dir={run.path}", "--attempt=1"], "environment": {}, "restart": 2, "rank": 0}
        with pytest.raises(UntrustedError, match="everybody may write this"):
            server._obey({"kind": "fork"} | order)
        assert "everybody may write this" in MessageSocket(ours).receive()[0]["error"]


@pytest.mark.parametrize("module", ["relayrun.train.fork_server", "relayrun.control.agent.spawn_server"])
def test_the_server_of_a_nodes_ranks_refuses_the_code_before_it_serves(tmp_path: Path, module: str) -> None:
    run = run_of_snapshots(tmp_path / "run")
    (run.path / DEEP).chmod(0o666)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", module, f"--run-dir={run.path}"]
        assert (
            subprocess.run(
                command, stdin=theirs.fileno(), stderr=subprocess.DEVNULL, timeout=60, check=False
            ).returncode
            == 1
        )
        said = MessageSocket(ours).receive()
    assert said[0]["kind"] == "unable"
    assert "everybody may write this" in said[0]["error"]


@pytest.mark.parametrize(("local_rank", "agent", "judges"), [(0, False, True), (0, True, False), (1, False, False)])
def test_one_process_of_a_node_judges_the_code_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: int, agent: bool, judges: bool
) -> None:
    """Without an agent's server it is the node's first rank: thousands of ranks do not ask for each file."""
    run = run_of_snapshots(tmp_path / "run")

    def begin_training() -> None:
        raise RelayrunError("the ranks start")

    monkeypatch.setattr(training, "quiet_libraries", begin_training)
    monkeypatch.setattr(training, "dump_stacks_on_request", lambda path: None)  # one file for each process
    monkeypatch.setattr(training, "check_node_at_start", lambda *given: None)
    monkeypatch.setattr(liveness, "has_agent", lambda: agent)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    (run.path / DEEP).chmod(0o666)
    with pytest.raises(UntrustedError, match="everybody may write this" if judges else "the ranks start"):
        program(lambda: training.main(training.SignalFlag()))(run)


def test_the_end_of_a_job_whose_plan_others_can_write_is_the_end_of_the_chain(tmp_path: Path) -> None:
    run = make_history(tmp_path / "run", lines=10, attempts=1)
    run.plan.chmod(0o664)
    with pytest.raises(UntrustedError):
        supervisor.end_attempt(run, 1, 0)
    assert "this job could not go on: its group may write this" in (stop_reason(run) or "")


def test_whose_a_file_is_is_the_uid_of_its_folder_and_its_own(folder: Path) -> None:
    with acting_as(Person(ME, ME, ())):
        assert read_with_owner(folder / "notices", "policy.json") == (b"{}", ME)
    for name in ("notices", NAME):
        os.chown(folder / name, OTHER, OTHER)
        with acting_as(Person(ME, ME, ())):
            assert read_with_owner(folder / "notices", "policy.json") == (b"{}", OTHER)
        os.chown(folder / name, ME, ME)


@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_a_reader_neither_waits_nor_reads_for_ever(tmp_path: Path, target: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "record.json").symlink_to(target)
    with pytest.raises(OSError, match="Invalid argument"):
        read_bytes(tmp_path / "record.json")
    with pytest.raises(OSError, match="Invalid argument"):
        list(read_json_lines(tmp_path / "record.json"))


def test_a_lock_is_not_opened_through_a_link_and_truncates_nothing(tmp_path: Path) -> None:
    (mine := tmp_path / "mine").write_text("words")
    (tmp_path / "lock").symlink_to(mine)
    with pytest.raises(OSError, match="symbolic links"):
        open_lock(tmp_path / "lock")
    os.close(open_lock(mine))
    assert mine.read_text() == "words"


@pytest.mark.parametrize("theirs", ["birth", "none"])
@pytest.mark.parametrize("mine", ["birth", "none"])
@pytest.mark.parametrize("system", ["network", "local"])
def test_a_host_that_tells_no_birth_of_a_folder_makes_no_copy_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str, mine: str, system: str
) -> None:
    """One host wrote the plan, another reads it: a client of NFS may tell no birth where another does. On a file system
    of one machine a plan without a birth is planted."""
    tell = trust.folder_identity
    magic = trust._file_system(tmp_path)
    assert magic not in {0, *trust._NETWORK_FILE_SYSTEMS}
    monkeypatch.setattr(trust, "_file_system", lambda _: 0x6969 if system == "network" else magic)

    def on(host: str) -> None:
        monkeypatch.setattr(trust, "folder_identity", tell if host == "birth" else lambda at: [tell(at)[0], None])

    on(theirs)
    trust.write_owned(tmp_path / "plan.json", {"owner": None})
    on(mine)
    planted = (theirs, mine, system) == ("none", "birth", "local")
    assert trust.read_owned(tmp_path, "plan.json")["owner"] == (None if planted else os.geteuid())
    copy = Path(shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-copy")))
    assert trust.read_owned(copy, "plan.json")["owner"] is None


def test_each_line_of_the_threat_model_names_a_test() -> None:
    root = Path(__file__).resolve().parents[2]
    table = (root / "SECURITY.md").read_text(encoding="utf-8").partition("## Who can do what to whom")[2]
    rows = [line.split(" | ") for line in table.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`(tests/[^`]*)`", row[-1])
        assert named or row[-1].startswith("pip"), row
        assert all((root / name).is_file() for name in named), row
