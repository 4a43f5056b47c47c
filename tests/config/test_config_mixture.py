"""The forms of a mixture: written out, a file, a line; and what they lead to on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.config.compose import resolve
from relayrun.config.compose.mixture_setting import parse_data_args
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import ConfigError, InputError
from relayrun.tokens.shards.prefixes import expand_paths
from relayrun.tokens.shards.shard import ShardWriter
from tests.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.make(tmp_path)


def load(workspace: Workspace, *overrides: str, **data: Any) -> RunConfig:
    values = {"tokenizer": str(workspace.folder / "tokenizer.json"), **data}
    return resolve.load_run_config(workspace.config("run", data=values), overrides)


def load_mixture(workspace: Workspace, mixture: Any, *overrides: str) -> RunConfig:
    return load(workspace, *overrides, datasets=[], mixture=mixture)


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_file_means_what_it_holds(workspace: Workspace, suffix: str) -> None:
    mixture = {"web": {"path": "/data/web*", "weight": 0.75}, "code": {"path": ["/data/c1", "/data/c2"], "weight": 2}}
    file = workspace.folder / f"mixture{suffix}"
    file.write_text(json.dumps(mixture, indent=1))
    config = load_mixture(workspace, str(file))
    assert config == load_mixture(workspace, mixture)
    assert config.data.mixture["web"].path == "/data/web*"
    assert config.data.mixture["code"].paths == ["/data/c1", "/data/c2"]
    assert (
        resolve.validate_settings(resolve.yaml_file.parse_yaml(resolve.dump_run_config(config), source="x")) == config
    )


def test_an_override_changes_a_part_of_a_file_or_takes_its_place(workspace: Workspace) -> None:
    file = workspace.folder / "mixture.yaml"
    file.write_text("web: {path: /w, weight: 1}\ncode: {path: /c, weight: 1}\n")
    part = load_mixture(workspace, str(file), "data.mixture.web.weight=5")
    assert {name: source.weight for name, source in part.data.mixture.items()} == {"web": 5.0, "code": 1.0}
    assert list(load_mixture(workspace, str(file), "data.mixture=/b,1;/d,1").data.mixture) == ["b", "d"]
    assert load_mixture(workspace, str(file), "data.mixture=null", "data.datasets=[/x]").data.mixture == {}


def test_an_error_in_a_mixture_file_names_its_line(workspace: Workspace) -> None:
    file = workspace.folder / "mixture.yaml"
    file.write_text("web:\n  path: /data\n  wieght: 1\n")
    with pytest.raises(ConfigError, match=r"mixture\.yaml:3: data\.mixture\.web\.wieght: unknown setting"):
        load_mixture(workspace, str(file))


def test_the_short_form_names_data_sets_by_their_paths(workspace: Workspace) -> None:
    config = load_mixture(workspace, "/data/web*,0.3; /data/more code/*,7e-1")
    assert {name: (source.path, source.weight) for name, source in config.data.mixture.items()} == {
        "web": ("/data/web*", 0.3),
        "more-code": ("/data/more code/*", 0.7),
    }
    assert load(workspace, "data.mixture='/data/web,1'", "data.datasets=[]").data.mixture["web"].weight == 1.0


@pytest.mark.filterwarnings("ignore")  # of torch, while megatron-core imports it
@pytest.mark.parametrize("text", ["0.3 /data/web/s0 .7\n/data/code/s0\n", "/data/web/s0 /data/code/s0", "/data/web/s0"])
def test_a_file_of_megatrons_data_args_path_means_what_megatron_reads_in_it(workspace: Workspace, text: str) -> None:
    from megatron.core.datasets.utils import get_blend_from_list

    file = workspace.folder / "data-args.txt"
    file.write_text(text)
    blend = get_blend_from_list(text.split())
    assert blend is not None
    prefixes, weights = blend
    mixture = load_mixture(workspace, str(file)).data.mixture
    if weights is None:
        assert {name: (source.path, source.weight) for name, source in mixture.items()} == {"train": (prefixes, 1.0)}
    else:
        assert [source.path for source in mixture.values()] == prefixes
        assert [source.weight for source in mixture.values()] == weights
        assert list(mixture) == ["data-web-s0", "data-code-s0"]


def test_a_prefix_of_megatrons_data_args_path_is_never_a_pattern(workspace: Workspace) -> None:
    for name in ("web2/s0", "web[24]/s0"):
        write_shard(workspace.folder / name)
    file = workspace.folder / "data-args.txt"
    for prefix, found in (("web[24]/s0", ["web[24]/s0"]), ("web[2]/s0", []), ("web?/s0", [])):
        file.write_text(f"0.3 {workspace.folder}/{prefix}")
        (source,) = load_mixture(workspace, str(file)).data.mixture.values()
        if found:
            assert expand_paths(source.paths) == [str(workspace.folder / name) for name in found]
        else:
            with pytest.raises(InputError, match="leads to no folder and to no shard"):
                expand_paths(source.paths)
    url = "s3://bucket/web[24]/s0"  # shards below a URL are named literally anyway
    assert parse_data_args([url], "file")["train"]["path"] == [url]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "data-args.txt: names no prefix"),
        ("0.3 /a 0.7", "weights and prefixes do not alternate"),
        ("/a 0.3 /b 0.7", "weights and prefixes do not alternate"),
        ("0.3 /a 0 0", "weights and prefixes do not alternate"),
        ("0.3 /a/b 0.7 /a-b", "two prefixes have the name 'a-b'"),
        ("0 /a 1 /b", "greater than 0"),
    ],
)
def test_a_file_of_data_args_that_means_nothing_is_refused(workspace: Workspace, text: str, said: str) -> None:
    file = workspace.folder / "data-args.txt"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_mixture(workspace, str(file))
    assert said in str(caught.value)


def test_a_mapping_is_one_whatever_its_file_is_called(workspace: Workspace) -> None:
    file = workspace.folder / "mixture.txt"
    file.write_text("# two of them\nweb: {path: /w, weight: 1}\ncode: {path: /c, weight: 1}\n")
    assert list(load_mixture(workspace, str(file)).data.mixture) == ["web", "code"]


@pytest.mark.parametrize(
    ("mixture", "said"),
    [
        ("/x/a,1;/y/a,2", "two data sets are named 'a'"),
        ("/x/a,0.3;/y/b", "'/y/b' is no PATH,WEIGHT"),
        ("/x/a,0;/y/b,1", "with a positive weight"),
        ("/no/such/file.yaml", "there is no mixture file"),
        ({"a": {"path": "/x", "weight": -1}}, "greater than 0"),
        ({"a": {"path": "/x", "weight": float("inf")}}, "valid number"),
        ({"a": {"weight": 1}}, "mixture.a: this data set has no path"),
        ({"a": {"path": "/x", "weight": 1, "order": "windows"}}, "none of window, document-window, module:callable"),
        ({"a b": {"path": "/x", "weight": 1}}, "match pattern"),
    ],
)
def test_a_wrong_mixture_is_refused(workspace: Workspace, mixture: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_mixture(workspace, mixture)
    assert said in str(caught.value)


def test_datasets_and_mixture_exclude_each_other(workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match="either datasets or mixture"):
        load(workspace, datasets=["/x"], mixture={"a": {"path": "/y", "weight": 1}})
    with pytest.raises(ConfigError, match="either datasets or mixture"):
        load(workspace, datasets=[])
    sources = load(workspace, datasets=["/x", "/y"]).data.sources
    assert {name: source.paths for name, source in sources.items()} == {"train": ["/x", "/y"]}


def test_a_users_own_order_needs_no_path_and_cannot_be_split(workspace: Workspace) -> None:
    own = {"mine": {"weight": 1, "order": "package.module:Pairs", "options": {"depth": 3}}}
    assert load_mixture(workspace, own).data.mixture["mine"].options == {"depth": 3}
    with pytest.raises(ConfigError, match="hold data out by path"):
        load_mixture(workspace, own, "data.split=0.1")


def write_shard(prefix: Path) -> None:
    writer = ShardWriter(prefix, np.uint16)
    writer.add(np.arange(5), [5])
    writer.finish()


@pytest.mark.parametrize("name", ["web[24]", "web?", "web*"])
def test_what_exists_under_just_this_name_is_never_a_pattern(tmp_path: Path, name: str) -> None:
    for shard in (f"{name}/s[0]", f"{name}/s1", "web2/s0", "web2/s1", "web2/s[0]"):
        write_shard(tmp_path / shard)

    def found(path: str) -> list[str]:
        return [str(Path(prefix).relative_to(tmp_path)) for prefix in expand_paths([f"{tmp_path}/{path}"])]

    assert found(name) == [f"{name}/s1", f"{name}/s[0]"]
    assert found(f"{name}/s1") == [f"{name}/s1"]
    assert found(f"{name}/s[0]") == found(f"{name}/s[0].bin") == [f"{name}/s[0]"]
    assert found(f"{name}/s?") == [f"{name}/s1"]
    assert found("web2/s[0]") == ["web2/s[0]"]
    assert found("web2/s[01]") == ["web2/s0", "web2/s1"]
    with pytest.raises(InputError, match="leads to no folder and to no shard"):
        found(f"{name}/s2")
    (tmp_path / name / "s1.idx").unlink()
    with pytest.raises(InputError, match=r"s1\.idx: .*missing"):
        found(f"{name}/s1")


def test_nor_is_the_begin_of_a_name_in_front_of_its_first_wildcard(tmp_path: Path) -> None:
    for shard in ("web[24]-a/s", "web2-a/s", "s[0]_1", "s0_1", "t1_1"):
        write_shard(tmp_path / shard)

    def found(path: str) -> list[str]:
        return [str(Path(prefix).relative_to(tmp_path)) for prefix in expand_paths([f"{tmp_path}/{path}"])]

    assert found("web[24]-*") == found("web[24]-?/s") == ["web[24]-a/s"]
    assert found("s[0]_*") == ["s[0]_1"]
    assert found("t[01]_*") == ["t1_1"]  # no name begins so: it is a pattern
    assert found("[st][01]_*") == ["s0_1", "t1_1"]


def test_paths_may_be_folders_shards_and_patterns(tmp_path: Path) -> None:
    for name in ("a/s0", "a/s1", "b/x/s0", "web0", "web1"):
        write_shard(tmp_path / name)

    def found(*paths: str) -> list[str]:
        return [
            str(Path(prefix).relative_to(tmp_path)) for prefix in expand_paths([f"{tmp_path}/{path}" for path in paths])
        ]

    assert found("a") == ["a/s0", "a/s1"]
    assert found("web*") == found("web0", "web1") == found("web[01]") == ["web0", "web1"]
    (tmp_path / "a/logs/stats").mkdir(parents=True)
    (tmp_path / "a/logs/stats/00000.json").write_text("{}")
    assert found("a/*") == ["a/s0", "a/s1"]
    with pytest.raises(InputError, match="leads to no folder and to no shard"):
        found("a/l*")
    assert found("a/s*", "b") == ["a/s0", "a/s1", "b/x/s0"]
    assert found("[ab]", "web0", "web?") == ["a/s0", "a/s1", "b/x/s0", "web0", "web1"]
    assert found("b", "web1", "a/s1", "web0", "a/s0") == ["b/x/s0", "web1", "a/s1", "web0", "a/s0"]
    assert found("web1", "web*", "b", "web1", "[ab]") == ["web1", "web0", "b/x/s0", "a/s0", "a/s1"]
    (tmp_path / "again").symlink_to("a")
    assert found("b", "again", "a") == ["b/x/s0", "again/s0", "again/s1"]
    with pytest.raises(InputError, match="leads to no folder and to no shard"):
        found("nothing*")
    (tmp_path / "part.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="leads to no folder and to no shard") as error:
        found("part*.jsonl")
    assert error.value.hint is not None
    assert "`source`" in error.value.hint
    (tmp_path / "web1.idx").unlink()
    with pytest.raises(InputError, match=r"web1\.idx: .*missing"):
        found("web*")
