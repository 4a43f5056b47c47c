"""A run's tokenizer is the one that made its shards, or the submit says which shard is of another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import DataSection
from relayrun.errors import FatalTrainingError, InputError
from relayrun.files import read_json, write_json
from relayrun.submit import submission
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.tokens.mixture.create_mixture import create_mixture
from relayrun.tokens.shards.checks import check_data, check_tokenizer
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.shard import FOLDER_RECORD, RECORD_SUFFIX, ShardWriter
from relayrun.tokens.tokenize.encode.tokenizer import ids_fingerprint, load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
from tests.config.test_trainer_configs import MEGATRON, written
from tests.megatron_lm.stand_in import stand_in
from tests.tokenization_corpus import TEXTS, train_tokenizer, write_parquet
from tests.workspace import Workspace


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tokenizer.json` (400 entries) and `dump`, two shards that it made."""
    folder = tmp_path_factory.mktemp("dump")
    train_tokenizer(folder / "tokenizer.json")
    for number in range(2):
        write_parquet(folder / f"{number}.parquet", (TEXTS if number else TEXTS[::-1]) * 20)
    (folder / "paths").write_text("0.parquet\n1.parquet\n")
    options = TokenizeOptions(tokenizer=str(folder / "tokenizer.json"), workers=1)
    tokenize_paths_file(options, output_folder=folder / "dump", dataset=folder, paths_file=folder / "paths")
    return folder


@pytest.fixture
def workspace(dump: Path, tmp_path: Path) -> Workspace:
    """A copy of the dump in `dump`, with tokenizers beside it."""
    shutil.copytree(dump, tmp_path, dirs_exist_ok=True)
    return Workspace(tmp_path)


def changed(workspace: Workspace, name: str, change: Any) -> Path:
    value = json.loads((workspace.folder / "tokenizer.json").read_text())
    change(value)
    path = workspace.folder / f"{name}.json"
    path.write_text(json.dumps(value))
    Tokenizer.from_file(str(path))
    return path


def swapped(value: dict[str, Any]) -> None:
    vocabulary = value["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


def submit(workspace: Workspace, tokenizer: str | Path, folder: str = "dump", **data: Any) -> None:
    data = {"tokenizer": str(workspace.folder / tokenizer), "datasets": [str(workspace.folder / folder)]} | data
    submission.submit_run(resolve.load_run_config(workspace.config("run", data=data)))


@pytest.mark.slow
def test_the_right_tokenizer_is_taken_without_a_word(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    submit(workspace, "tokenizer.json")
    said = capsys.readouterr().err.splitlines()  # its template puts a token before each text, and the dump has none
    assert ["the tokenizer begins a text with token 1" in line for line in said] == [True]
    assert Manifest.read(workspace.run("run").manifest).tokenizer_ids == read_ids(workspace)["ids"]


def read_ids(workspace: Workspace) -> dict[str, Any]:
    found: dict[str, Any] = read_json(workspace.folder / "dump" / FOLDER_RECORD)["tokenizer"]
    assert found["size"] == 400
    return found


def test_a_vocabulary_that_is_too_small_is_refused_before_anything_is_queued(workspace: Workspace) -> None:
    train_tokenizer(workspace.folder / "small.json", vocabulary=278)
    with pytest.raises(InputError, match=r"has 400 entries, the run's 278, and ids beyond it end the run") as caught:
        submit(workspace, "small.json")
    assert str(caught.value).startswith(f"{workspace.folder}/dump/00000_tokens: data set 'train': 2 of 2 shards")
    assert "set data.tokenizer to the one that made them" in str(caught.value)
    assert not (workspace.folder / "run").exists()


@pytest.mark.parametrize("order", ["window", "document-window"])
def test_two_swapped_ids_are_found_through_the_links_of_a_mixture(workspace: Workspace, order: str) -> None:
    create_mixture([workspace.folder / "dump"], [1.0], workspace.folder / "mixture")
    other = changed(workspace, "swapped", swapped)
    with pytest.raises(InputError, match="both have 400 entries, and ids mean other text"):
        submit(workspace, other, "mixture", order=order)
    with pytest.raises(InputError, match=r"mixture/dump/0000._tokens: validation set 'books': 2 of 2"):
        submit(workspace, other, order=order, allow_other_tokenizer=False, **held_out(workspace))


def held_out(workspace: Workspace) -> dict[str, Any]:
    """Shards of another program to train on, the mixture for validation."""
    writer = ShardWriter(workspace.folder / "foreign" / "shard", np.uint16)
    writer.add(np.arange(2000) % 400, [2000])
    writer.finish()
    foreign = str(workspace.folder / "foreign")
    return {"datasets": [foreign], "validation": {"books": [str(workspace.folder / "mixture")]}}


def test_another_tokenizer_is_taken_where_somebody_says_so(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    submit(workspace, changed(workspace, "swapped", swapped), allow_other_tokenizer=True)
    assert "taken, as data.allow_other_tokenizer says" in caplog.text
    assert workspace.run("run").plan.exists()


def test_what_does_not_decide_ids_makes_no_other_tokenizer(workspace: Workspace) -> None:
    path = workspace.folder / "tokenizer.json"
    usual = load_tokenizer(TokenizeOptions(tokenizer=str(path)))
    as_text = load_tokenizer(TokenizeOptions(tokenizer=str(path), special_text=True))
    assert as_text.fingerprint != usual.fingerprint
    fingerprint = ids_fingerprint(usual.definition)
    assert ids_fingerprint(as_text.definition) == fingerprint

    def older(value: dict[str, Any]) -> None:
        value |= {"decoder": None, "post_processor": None, "truncation": None}
        value["model"]["merges"] = [" ".join(pair) for pair in value["model"]["merges"]]
        value["model"].pop("ignore_merges", None)

    text = changed(workspace, "older", older).read_text()
    assert ids_fingerprint(text) == fingerprint

    def merges(value: dict[str, Any]) -> None:
        value["model"]["merges"].reverse()

    def added(value: dict[str, Any]) -> None:
        value["added_tokens"][0]["lstrip"] = True

    def normalizer(value: dict[str, Any]) -> None:
        value["normalizer"] = {"type": "NFC"}

    for number, change in enumerate((swapped, merges, added, normalizer)):
        assert ids_fingerprint(changed(workspace, f"other{number}", change).read_text()) != fingerprint


def test_ends_of_documents_that_the_run_takes_for_something_else_are_refused_where_they_matter(
    workspace: Workspace,
) -> None:
    (workspace.folder / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    with pytest.raises(InputError, match="the token 0 ends documents there, and the run takes 1 for their end"):
        submit(workspace, "tokenizer.json", eod_mask_loss=True)
    submit(workspace, "tokenizer.json")


def test_shards_of_other_programs_are_looked_at_and_spoken_of_once(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    create_mixture([workspace.folder / "dump"], [1.0], workspace.folder / "mixture")
    data = {"tokenizer": str(workspace.folder / "tokenizer.json")} | held_out(workspace)
    caplog.set_level("INFO", logger="relayrun")
    for _ in range(2):
        submission.submit_run(resolve.load_run_config(workspace.config("run", data=data)))
        for job in (workspace.folder / "run").glob("local*"):
            shutil.rmtree(job)
    said = [message for message in caplog.messages if "do not say which tokenizer" in message]
    assert said == ["1 shards do not say which tokenizer made them; ids are checked again as they are read"]
    train_tokenizer(workspace.folder / "small.json", vocabulary=278)
    with pytest.raises(
        InputError, match=r"foreign/shard: data set 'train': this shard holds the id 278, which is beyond"
    ):
        submit(workspace, "small.json", "foreign")


def prefixes_of(workspace: Workspace) -> list[str]:
    """One shard of the dump and one of its copy in `other`."""
    shutil.copytree(workspace.folder / "dump", workspace.folder / "other")
    return [str(workspace.folder / folder / "00000_tokens") for folder in ("dump", "other")]


def change_record(workspace: Workspace, change: Any) -> None:
    record = workspace.folder / "other" / FOLDER_RECORD
    value = read_json(record)
    change(value)
    write_json(record, value)


def test_a_merged_shard_has_the_tokenizer_of_its_inputs(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    prefixes = prefixes_of(workspace)
    merge_shards(prefixes, workspace.folder / "merged" / "dump-0")
    merge_shards([str(workspace.folder / "merged" / "dump-0"), prefixes[0]], workspace.folder / "again" / "dump-0")
    other = changed(workspace, "swapped", swapped)
    for folder in ("merged", "again"):
        submit(workspace, "tokenizer.json", folder)
        with pytest.raises(InputError, match=rf"{folder}/dump-0: .*both have 400 entries, and ids mean other text"):
            submit(workspace, other, folder)
        shutil.rmtree(workspace.folder / "run")
    assert all("the tokenizer begins a text with token 1" in message for message in caplog.messages)


def test_shards_of_two_tokenizers_are_not_merged(workspace: Workspace) -> None:
    prefixes = prefixes_of(workspace)
    change_record(workspace, lambda value: value["settings"].update(eos=None))
    with pytest.raises(InputError, match=r"documents end with no token here, with the token 0 in .*dump/00000_tokens"):
        merge_shards(prefixes, workspace.folder / "twice")
    change_record(workspace, lambda value: value["tokenizer"].update(ids="0" * 64))
    with pytest.raises(
        InputError, match=r"other/00000_tokens: another tokenizer made this shard than .*dump/00000_tokens"
    ):
        merge_shards(prefixes, workspace.folder / "twice")


def test_a_mixture_of_two_tokenizers_is_refused(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    prefixes_of(workspace)
    for prefix in ("dump/00001_tokens", "other/00000_tokens"):  # text stands once
        for suffix in (".bin", ".idx"):
            (workspace.folder / (prefix + suffix)).unlink()
    folders = [workspace.folder / "dump", workspace.folder / "other"]
    create_mixture(folders, [1.0, 1.0], workspace.folder / "mixture")
    change_record(workspace, lambda value: value["tokenizer"].update(ids="0" * 64))
    with pytest.raises(InputError, match=r"other/0000._tokens: another tokenizer made this shard than .*dump/0000._to"):
        create_mixture(folders, [1.0, 1.0], workspace.folder / "mixture")
    assert "taken, as" not in caplog.text
    create_mixture(folders, [1.0, 1.0], workspace.folder / "mixture", allow_other_tokenizer=True)
    assert "taken, as --allow-other-tokenizer says" in caplog.text


def test_a_merge_says_where_a_tokenizer_is_not_known(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    prefixes = prefixes_of(workspace)
    (workspace.folder / "other" / FOLDER_RECORD).unlink()
    merge_shards(prefixes, workspace.folder / "merged")
    assert "its record will name no tokenizer, since 1 of 2 inputs have none on record" in caplog.text
    record = read_json(f"{workspace.folder}/merged{RECORD_SUFFIX}")
    assert record["tokenizer"] is None
    assert sorted(record["xxh3_128"]) == ["bin", "idx"]


def test_a_job_refuses_shards_that_were_made_anew_with_another_tokenizer(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    """The index is the same, and so are all sizes. A run that began before this was looked at goes on."""
    submit(workspace, "tokenizer.json")
    path = workspace.run("run").manifest
    data = DataSection(tokenizer="t", datasets=["d"])
    check_data(Manifest.read(path), ["train"], data)
    record = workspace.folder / "dump" / FOLDER_RECORD
    value = read_json(record)
    value["tokenizer"]["ids"] = "0" * 64
    value["settings"]["tokenizer"] = "0" * 64
    write_json(record, value)
    with pytest.raises(FatalTrainingError, match="ids mean other text"):
        check_data(Manifest.read(path), ["train"], data)
    check_data(Manifest.read(path), ["train"], data.model_copy(update={"allow_other_tokenizer": True}))
    assert "ids mean other text" in caplog.text
    assert check_tokenizer(Manifest.read(path), [], allow=True) == 0


TRAINING = {"steps": 4, "micro_batch_size": 1, "global_batch_size": 2, "seq_length": 16}


def data_findings(workspace: Workspace, trainer: str, *, args: dict[str, Any] | None = None, **data: Any) -> list[Any]:
    """What a check says of data and tokenizer, without the settings' places."""
    folder = workspace.folder
    own = {"tokenizer": str(folder / "tokenizer.json"), "datasets": [str(folder / "dump")]} | data
    sections = {"data": {name: value for name, value in own.items() if value is not None}, "training": TRAINING}
    if trainer == "native":
        path = workspace.config("run", **sections)
    else:
        checkout = folder / "checkout"
        section = {"dir": str(checkout if checkout.exists() else stand_in(checkout)), "args": args or {}}
        path = written(folder, MEGATRON, megatron_lm=section, job={"time": "5", "ntasks_per_node": 2}, **sections)
    found = submission.check_submission(resolve.load_run_config(path), intent=SubmitIntent()).findings.all
    again = "; ids are checked again as they are read"  # by the own reader alone
    return [
        (each.level, each.name, each.words.replace(again, ""), each.remedy)
        for each in found
        if each.name.startswith("data.")
    ]


@pytest.mark.parametrize(
    ("case", "level", "name"),
    [
        ("as it was made", "ok", "data.tokenizer"),
        ("another tokenizer", "error", "data.tokenizer"),
        ("another tokenizer, meant", "warning", "data.tokenizer"),
        ("no such tokenizer", "error", "data.shards"),
        ("validation of another", "error", "data.tokenizer"),
        ("another end of documents", "error", "data.tokenizer"),
        ("an id beyond", "error", "data.ids"),
        ("read too often", "error", "data.epochs"),
        ("read often", "warning", "data.epochs"),
        ("too few tokens", "error", "data.windows"),
    ],
)
def test_data_of_megatron_lm_are_looked_at_as_those_of_the_own_trainer(
    case: str, level: str, name: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "log_folder", lambda _: workspace.folder / "logs")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = workspace.folder
    train_tokenizer(folder / "small.json", vocabulary=278)
    tokens = {"an id beyond": 500, "read often": 30, "read too often": 30, "too few tokens": 9}.get(case, 270)
    writer = ShardWriter(folder / "foreign" / "shard", np.uint16)
    writer.add(np.arange(tokens), [tokens])
    writer.finish()
    if case == "another end of documents":
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    cases: dict[str, dict[str, Any]] = {
        "as it was made": {},
        "another tokenizer": {"tokenizer": str(folder / "small.json")},
        "another tokenizer, meant": {"tokenizer": str(folder / "small.json"), "allow_other_tokenizer": True},
        "no such tokenizer": {"tokenizer": "no-such/tokenizer"},
        "validation of another": {
            "tokenizer": str(folder / "small.json"),
            "datasets": [str(folder / "foreign")],
            "validation": {"held": [str(folder / "dump")]},
            "max_epochs": 1000.0,
        },
        "another end of documents": {"eod_mask_loss": True},
        "read too often": {"datasets": [str(folder / "foreign")], "max_epochs": 7.0},
    }
    data = cases.get(case, {"datasets": [str(folder / "foreign")]})
    found = data_findings(workspace, "megatron-lm", **data)
    assert (level, name) in [each[:2] for each in found]
    assert found == data_findings(workspace, "native", **data)


def test_what_flags_name_in_the_place_of_settings_is_looked_at(workspace: Workspace) -> None:
    """Flags hold over settings: another tokenizer, other shards, more iterations; or nothing can be compared."""
    folder = workspace.folder
    small = str(train_tokenizer(folder / "small.json", vocabulary=278))
    found = data_findings(workspace, "megatron-lm", args={"tokenizer-model": small})
    assert [each[:2] for each in found if each[0] == "error"] == [("error", "data.tokenizer")]
    assert f"were not made with the tokenizer {small}" in str(found)
    many = data_findings(workspace, "megatron-lm", args={"train-iters": 1_000_000})
    assert [each[:2] for each in many if each[0] == "error"] == [("error", "data.epochs")]
    weighted = {"data-path": ["0.5", f"{folder}/dump/00000_tokens"], "tokenizer-model": small}
    found = data_findings(workspace, "megatron-lm", args=weighted)
    assert "1 of 1 shards" in str(found)
    for args, wanted, words in (
        ({"tokenizer-type": "NullTokenizer"}, "not checked", "--tokenizer-type NullTokenizer of megatron_lm.args"),
        ({"mock-data": True}, "ok", "made-up tokens"),
        ({"data-args-path": "/x"}, "not checked", "--data-args-path /x of megatron_lm.args"),
    ):
        ((level, _, said, _),) = data_findings(workspace, "megatron-lm", args=args, tokenizer="no-such/tokenizer")
        assert (level, words in said) == (wanted, True)


def test_what_flags_hold_out_is_looked_at_and_what_settings_allow_holds_for_flags(workspace: Workspace) -> None:
    """`--valid-data-path` of args or a launcher is validation data too, and a name is no pattern there."""
    folder = workspace.folder
    small = str(train_tokenizer(folder / "small.json", vocabulary=278))
    dump, web2 = f"{folder}/dump/00000_tokens", folder / "web2" / "shard"
    for prefix, tokens in ((web2, 270), (folder / "apart" / "shard", 260)):
        writer = ShardWriter(prefix, np.uint16)
        writer.add(np.arange(tokens), [tokens])
        writer.finish()
    shutil.copytree(folder / "dump", folder / "copy")

    def errors(args: dict[str, Any], **data: Any) -> str:
        return str([each for each in data_findings(workspace, "megatron-lm", args=args, **data) if each[0] == "error"])

    train = {"train-data-path": [str(web2)]}
    held = [f"{folder}/apart/shard"]
    assert errors(train | {"valid-data-path": held, "test-data-path": ["1", *held]}, tokenizer=small) == "[]"
    for name in ("valid", "test"):
        said = errors(train | {f"{name}-data-path": ["0.5", *held, "0.5", dump]}, tokenizer=small)
        assert f"validation set '{name}': 1 of 2 shards" in said
        said = errors({"train-data-path": [dump], f"{name}-data-path": [f"{folder}/copy/00000_tokens"]})
        assert f"also stand in validation '{name}'" in said
    both = {"data-path": [dump, f"{folder}/copy/00000_tokens"]}
    assert "its text also stands in" in errors(both | {"split": "100,0,0"})
    often = {"data-path": [dump], "train-iters": 1_000_000}
    assert "data.epochs" in errors(often)
    assert errors(often, max_epochs=1e9) == "[]"
    said = errors({"data-path": [dump], "tokenizer-model": small}, allow_other_tokenizer=True)
    assert "'data.ids'" in said  # taken, and an id beyond the vocabulary is told
    assert "'data.tokenizer'" not in said
    assert "leads to no folder and to no shard" in errors({"data-path": [f"{folder}/web[2024]/shard"]})
    assert errors({"data-path": ["s3://bucket/shard"]}) == "[]"  # which Megatron-LM reads itself
