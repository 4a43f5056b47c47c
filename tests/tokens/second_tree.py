# ruff: noqa
"""Forty-odd small data sets as crawls, hubs, table formats and desktops leave them, with what is right for each file.

Written down before its author had looked at the code of the inventory. Answers as in `tree_of_files.py`.
"""

import json
import os
import socket
import stat
import unicodedata

import pyarrow as pa
import pyarrow.parquet as pq

from tests.tokens.tree_of_files import (
    APPLE,
    DS,
    DS_STORE,
    HTML_ERR,
    LEFT,
    META,
    NAMED,
    REFUSED,
    TAKEN,
    THUMBS,
    arrow_stream,
    bz,
    csv_bytes,
    gz,
    hadoop_crc,
    json_array,
    jsonl,
    md5,
    parquet,
    pointer,
    tar,
    warc_record,
    warcinfo,
    zip_bytes,
    zst,
)

OUT = [LEFT, NAMED, REFUSED]
"""Not used, with a reason."""
SETS = {}


def a_set(name, *troubles):
    def keep(f):
        SETS[name] = (troubles, f)
        return f

    return keep


def take(d, rel, n=5, encode=jsonl):
    docs = d.docs(n)
    return d.take(rel, encode(docs), n), docs


@a_set("windows-share")
def _(d):
    take(d, "news.jsonl")
    d.meta("Thumbs.db", THUMBS)
    d.meta("desktop.ini", "[.ShellClassInfo]\r\nIconResource=C:\\x.dll,1\r\n")
    d.meta("~$news.docx", b"\x05Owner" + b"\0" * 60)
    d.meta("$RECYCLE.BIN/desktop.ini", "[.ShellClassInfo]\r\n")
    d.put("$RECYCLE.BIN/$R1A2B3C.jsonl", jsonl(d.docs(3)), "deleted", OUT, 0, "deleted by its owner")
    d.meta("System Volume Information/IndexerVolumeGuid", "{A}")
    d.put("news.jsonl:Zone.Identifier", b"[ZoneTransfer]\r\nZoneId=3\r\n", "stream", OUT, 0, "a mark of the browser")


@a_set("mac-zip")
def _(d):
    take(d, "letters.jsonl")
    take(d, unicodedata.normalize("NFD", "übersetzungen.jsonl"))
    d.meta("._letters.jsonl", APPLE)
    d.meta("__MACOSX/._letters.jsonl", APPLE)
    d.meta(".DS_Store", DS_STORE)
    d.put(".Trashes/501/old.jsonl", jsonl(d.docs(2)), "deleted", OUT, 0, "deleted by its owner")
    d.put(".AppleDouble/letters.jsonl", APPLE, "netatalk", OUT, 0, "a resource fork")


@a_set("nfc-and-nfd-twins", "one name in two normal forms")
def _(d):
    data, _ = take(d, unicodedata.normalize("NFC", "größe.jsonl"))
    d.put(unicodedata.normalize("NFD", "größe.jsonl"), data, "twin", OUT, 0, "the same content twice")


@a_set("case-twins", "two names that differ in case")
def _(d):
    data, _ = take(d, "data/Part-1.jsonl")
    d.put("data/part-1.jsonl", data, "twin", OUT, 0, "the same content twice")
    take(d, "Data/part-2.jsonl")


@a_set("numbered-copies", "copies by hand with a few rows more")
def _(d):
    data, docs = take(d, "essays.jsonl", 20)
    more = d.docs(1)
    for name in ("essays (1).jsonl", "essays copy.jsonl", "Copy of essays.jsonl", "essays - Copy.jsonl"):
        d.put(name, jsonl(docs + more), "near copy", [NAMED, REFUSED, LEFT], 20, "nearly the same rows twice")
        more += d.docs(1)


@a_set("data-and-data-old", "an older copy of the folder")
def _(d):
    for i in range(3):
        docs = d.docs(20)
        d.take(f"data/part-{i}.jsonl", jsonl(docs), 20)
        d.put(f"data_old/part-{i}.jsonl", jsonl(docs[:-2]), "old", [NAMED, REFUSED, LEFT], 18, "an older state")
        d.put(f"data.bak/part-{i}.jsonl", jsonl(docs[:-4]), "old", [NAMED, REFUSED, LEFT], 16, "an older state")


@a_set("backup-endings", "backups beside files")
def _(d):
    data, docs = take(d, "posts.jsonl", 20)
    for name in (
        "posts.jsonl.bak",
        "posts.jsonl~",
        "posts.jsonl.orig",
        "posts.jsonl.old",
        "#posts.jsonl#",
        "posts.jsonl.1",
    ):
        d.put(name, jsonl(docs[:-3]), "backup", OUT, 0, "an older state")
    d.put("posts.bak.jsonl", jsonl(docs[:-1]), "backup", [NAMED, REFUSED, LEFT], 19, "an older state")


@a_set("spark-no-success", "no _SUCCESS beside parts of Spark")
def _(d):
    u = "c0ffee00-1111-2222-3333-444455556666"
    for i in range(3):
        d.put(
            f"part-{i:05d}-{u}-c000.snappy.parquet",
            parquet(d.docs(5)),
            "part",
            [NAMED, REFUSED],
            5,
            "the job did not end",
        )
    d.put(
        f"_temporary/0/_temporary/attempt_1/part-00003-{u}-c000.snappy.parquet",
        parquet(d.docs(5)),
        "uncommitted",
        OUT,
        0,
        "not committed",
    )


@a_set("spark-wrong-crc", "a part whose .crc is of other bytes")
def _(d):
    u = "c0ffee00-1111-2222-3333-444455556666"
    for i in range(3):
        name = f"part-{i:05d}-{u}-c000.json"
        docs = d.docs(20)
        if i == 1:
            d.put(name, jsonl(docs), "part", [NAMED, REFUSED], 20, "not the bytes that Spark wrote")
        else:
            d.take(name, jsonl(docs), 20)
        d.meta(f".{name}.crc", hadoop_crc(jsonl(docs[: 19 if i == 1 else 20])))
    d.meta("_SUCCESS", b"")
    d.meta("._SUCCESS.crc", hadoop_crc(b""))


@a_set("delta-table", "files that the table's log has removed")
def _(d):
    log, names = [], [f"part-0000{i}-{'ab' * 4}-c000.snappy.parquet" for i in range(4)]
    for i, name in enumerate(names):
        data = parquet(d.docs(6))
        if i < 2:
            d.put(name, data, "removed", OUT, 0, "removed from the table: another version holds its rows")
        else:
            d.take(name, data, 6)
        log.append({"add": {"path": name, "size": len(data), "dataChange": True, "partitionValues": {}}})
    d.meta("_delta_log/00000000000000000000.json", "\n".join(json.dumps(x) for x in log[:2]))
    second = [{"remove": {"path": n, "dataChange": True}} for n in names[:2]] + log[2:]
    d.meta("_delta_log/00000000000000000001.json", "\n".join(json.dumps(x) for x in second))
    d.meta("_delta_log/00000000000000000001.crc", "{}")


@a_set("iceberg-table", "a table of Iceberg: which files are live stands in its manifests")
def _(d):
    for i in range(3):
        d.put(
            f"data/{i:05d}-0-{'cd' * 8}.parquet",
            parquet(d.docs(6)),
            "live or not",
            [NAMED, REFUSED],
            6,
            "perhaps deleted from the table",
        )
    d.meta("metadata/v1.metadata.json", {"format-version": 2, "current-snapshot-id": 1})
    d.meta("metadata/v2.metadata.json", {"format-version": 2, "current-snapshot-id": 2})
    d.meta("metadata/version-hint.text", "2")
    d.meta("metadata/snap-1-1-x.avro", b"Obj\x01" + b"\0" * 80)


@a_set("hudi-table", "a table of Hudi: file slices")
def _(d):
    for t in ("20240101", "20240202"):
        d.put(
            f"fileid1_0-1-0_{t}.parquet",
            parquet(d.docs(6)),
            "slice",
            [NAMED, REFUSED],
            6,
            "an older slice of the same rows",
        )
    d.meta(".hoodie/hoodie.properties", "hoodie.table.name=x\n")
    d.meta(".hoodie/20240101.commit", "{}")


@a_set("hive-partitions")
def _(d):
    for lang in ("de", "fr", "__HIVE_DEFAULT_PARTITION__"):
        docs = d.docs(6)
        for doc in docs:
            del doc["lang"]
        o = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(docs), o)
        d.take(f"lang={lang}/part-0.parquet", o.getvalue().to_pybytes(), 6)


@a_set("hive-partition-split", "a partition that is the test split")
def _(d):
    take(d, "split=train/part-0.parquet", 6, parquet)
    d.put("split=test/part-0.parquet", parquet(d.docs(6)), "held out", OUT, 0, "another split")
    d.put("split=validation/part-0.parquet", parquet(d.docs(6)), "held out", OUT, 0, "another split")


@a_set("parquet-odd-groups")
def _(d):
    docs = d.docs(9)
    table = pa.Table.from_pylist(docs)
    o = pa.BufferOutputStream()
    with pq.ParquetWriter(o, table.schema) as w:
        w.write_table(table.slice(0, 5))
        w.write_table(table.slice(0, 0))
        w.write_table(table.slice(5))
    d.take("a.parquet", o.getvalue().to_pybytes(), 9)
    d.put("b.parquet", parquet([]), "no rows", [TAKEN, *OUT], 0, "an empty part")
    d.meta("_metadata", parquet([]))
    d.meta("_common_metadata", parquet([]))


@a_set("json-is-an-array")
def _(d):
    take(d, "a.json", 6, json_array)
    take(d, "b.json", 6, lambda docs: json_array(docs, 2))
    take(d, "c.json", 6, jsonl)
    docs = d.docs(4)
    d.put(
        "d.json",
        json.dumps({"data": docs}, indent=1).encode(),
        "rows in a field",
        [NAMED, REFUSED],
        0,
        "rows below a key",
    )


@a_set("jsonl-of-editors")
def _(d):
    take(d, "bom.jsonl", 6, lambda docs: b"\xef\xbb\xbf" + jsonl(docs))
    take(d, "crlf.jsonl", 6, lambda docs: jsonl(docs, eol="\r\n"))
    take(d, "blank.jsonl", 6, lambda docs: b"\n\n" + jsonl(docs, eol="\n\n") + b"  \n")
    take(d, "noeol.jsonl", 6, lambda docs: jsonl(docs).rstrip(b"\n"))


@a_set("jsonl-utf16", "JSON lines in UTF-16")
def _(d):
    take(d, "a.jsonl")
    d.put(
        "b.jsonl",
        jsonl(d.docs(5)).decode().encode("utf-16"),
        "utf-16",
        [TAKEN, NAMED, REFUSED],
        5,
        "a limit that is said",
    )


@a_set("txt-utf16", "plain text in UTF-16 and Latin-1")
def _(d):
    d.take("a.txt", (d.t.text() + "\n").encode(), 1)
    d.put("b.txt", ("Ein Text " + d.t.text()).encode("utf-16"), "utf-16", [TAKEN, NAMED, REFUSED], 1, "no UTF-8")
    d.put("c.txt", ("Straße und Größe\n" * 20).encode("latin-1"), "latin-1", [TAKEN, NAMED, REFUSED], 1, "no UTF-8")


@a_set("datasets-cache", "caches of map and filter beside the data")
def _(d):
    docs = d.docs(12)
    d.take("text-train.arrow", arrow_stream(docs), 12)
    d.put("cache-1b2c3d4e5f607182.arrow", arrow_stream(docs), "cache", OUT, 0, "a cache of the same rows")
    d.put("cache-0011223344556677.arrow", arrow_stream(docs[:8]), "cache", OUT, 0, "a cache of some of the rows")
    d.put("tmpab12cd34", arrow_stream(docs[:3])[:-30], "temporary", OUT, 0, "an unfinished cache")
    d.put("text-test.arrow", arrow_stream(d.docs(4)), "held out", OUT, 0, "another split")
    d.meta("dataset_info.json", {"splits": {"train": {"num_examples": 12}, "test": {"num_examples": 4}}})
    d.meta("_0_0_0.lock", b"")


@a_set("wrong-endings", "compression that the name does not tell")
def _(d):
    docs = d.docs(6)
    d.put("a.jsonl.gz", jsonl(docs), "plain", [TAKEN, NAMED, REFUSED], 6, "plain text called .gz")
    d.put("b.jsonl", gz(jsonl(d.docs(6))), "gzip", [TAKEN, NAMED, REFUSED], 6, "gzip called plain")
    d.put("c.jsonl.gz", zst(jsonl(d.docs(6))), "zstd", [TAKEN, NAMED, REFUSED], 6, "zstd called .gz")
    d.put("d.jsonl", parquet(d.docs(6)), "parquet", [TAKEN, NAMED, REFUSED], 6, "parquet called .jsonl")


@a_set("unfinished-downloads", "files that a downloader has not finished")
def _(d):
    take(d, "a.jsonl.gz", 5, lambda docs: gz(jsonl(docs)))
    whole = gz(jsonl(d.docs(30)))
    for name in (
        "b.json.gz.part",
        "c.jsonl.gz.crdownload",
        "d.jsonl.tmp",
        "e.jsonl.gz.incomplete",
        "f.parquet.download",
        ".g.jsonl.gz.Xy12aB",
        "h.jsonl.gz.filepart",
        "i.jsonl.!ut",
        "j.jsonl.gz.partial",
        "k.jsonl.opdownload",
        "l.jsonl.gz.st",
    ):
        d.put(name, whole[: len(whole) // 2], "unfinished", OUT, 0, "not whole")
    d.put(
        "m.jsonl",
        jsonl(d.docs(5)) + b"\0" * 4096,
        "preallocated",
        [NAMED, REFUSED, LEFT],
        5,
        "aria2 has not finished it",
    )
    d.meta("m.jsonl.aria2", b"\0\1" + b"\0" * 40)


@a_set("dvc", "pointers of DVC and its cache")
def _(d):
    data, _ = take(d, "data/train.jsonl")
    d.meta("data/train.jsonl.dvc", f"outs:\n- md5: {md5(data)}\n  size: {len(data)}\n  path: train.jsonl\n")
    d.put(".dvc/cache/files/md5/ab/" + md5(data)[2:], data, "cache", OUT, 0, "the same content")
    d.meta(
        "data/more.jsonl.dvc",
        "outs:\n- md5: 0123456789abcdef0123456789abcdef\n  size: 99\n  path: more.jsonl\n",
        answer=[NAMED, REFUSED, LEFT],
    )
    d.meta("dvc.lock", "schema: '2.0'\n")


@a_set("git-annex-unlocked", "pointers of git-annex in place of data")
def _(d):
    take(d, "a.jsonl")
    d.put(
        "b.jsonl",
        b"/annex/objects/SHA256E-s1048576--" + b"ab" * 32 + b".jsonl\n",
        "pointer",
        [REFUSED, NAMED],
        0,
        "not fetched",
    )
    d.link(
        "c.jsonl",
        ".git/annex/objects/xx/yy/SHA256E-s10--cd.jsonl/SHA256E-s10--cd.jsonl",
        "broken link",
        [REFUSED, NAMED, LEFT],
        0,
        "not fetched",
    )


@a_set("git-lfs", "pointers of Git LFS")
def _(d):
    take(d, "a.parquet", 5, parquet)
    d.put("b.parquet", pointer(b"x"), "pointer", [REFUSED, NAMED], 0, "not fetched")


@a_set("kaggle", "a zip beside what came out of it")
def _(d):
    docs = d.docs(8)
    data = csv_bytes(docs, index=False)
    d.take("train.csv", data, 8)
    d.put("train.csv.zip", zip_bytes([("train.csv", data)]), "zip", OUT, 0, "the same rows")
    d.put("test.csv", csv_bytes(d.docs(4), index=False), "held out", OUT, 0, "another split")
    d.put("sample_submission.csv", b"id,label\n1,0\n2,0\n", "no text", OUT, 0, "no text")


@a_set("kaggle-zip-alone", "text in a zip alone")
def _(d):
    take(d, "a.jsonl")
    d.put(
        "archive.zip",
        zip_bytes([("rows.jsonl", jsonl(d.docs(5)))]),
        "zip",
        [NAMED, REFUSED, TAKEN],
        5,
        "text that must not vanish silently",
    )


@a_set("other-archives", "text in formats that are not read")
def _(d):
    take(d, "a.jsonl")
    for name, data in (
        ("b.7z", b"7z\xbc\xaf\x27\x1c" + b"\0" * 50),
        ("c.rar", b"Rar!\x1a\x07\x01\0" + b"\0" * 50),
        ("d.jsonl.lz4", b"\x04\x22\x4d\x18" + b"\0" * 50),
        ("e.jsonl.br", b"\x1b\x3f" + b"\0" * 50),
        ("f.avro", b"Obj\x01" + b"\0" * 50),
        ("g.orc", b"ORC" + b"\0" * 50),
        ("h.tfrecord", b"\0" * 60),
        ("i.xml", b"<mediawiki><page/></mediawiki>"),
        ("j.h5", b"\x89HDF\r\n\x1a\n" + b"\0" * 50),
        ("k.jsonl.snappy", b"\xff\x06\0\0sNaPpY"),
        ("l.jsonl.Z", b"\x1f\x9d\x90abc"),
        ("m.md", b"# A page\n\ntext\n"),
        ("n.lance", b"LANC"),
        ("o.jsonl.lzma", b"\x5d\0\0\x80\0" + b"\xff" * 8),
        ("p.mds.zstd", b"\x28\xb5\x2f\xfd\0\0"),
    ):
        d.put(name, data, name, [NAMED, REFUSED, TAKEN, LEFT], 0, "not read: counted")


@a_set("warc-plain")
def _(d):
    take(d, "a.jsonl")
    body = b"".join(
        [warcinfo(d.rng)]
        + [warc_record(d.rng, "conversion", x["text"].encode(), "text/plain", x["url"]) for x in d.docs(3)]
    )
    d.put("b.warc", body, "warc", [NAMED, REFUSED], 0, "named with the way")


@a_set("links", "loops, and a file by two names")
def _(d):
    data, _ = take(d, "data/a.jsonl")
    d.link("data/loop", "..", "loop", [LEFT, NAMED, REFUSED], 0, "a loop")
    d.hard("data/b.jsonl", "data/a.jsonl", "hard link", OUT, "the same file")
    d.link("data/c.jsonl", "a.jsonl", "link", OUT, 0, "the same file")
    d.link("data/self.jsonl", "self.jsonl", "loop", OUT, 0, "a link to itself")


@a_set("specials", "a FIFO, a socket, a folder called .jsonl")
def _(d):
    take(d, "a.jsonl")
    d.special("b.jsonl", stat.S_IFIFO, "fifo", OUT, "no file")
    take(d, "c.jsonl/part-0.jsonl")
    d.line("s.jsonl", "socket", OUT, 0, "no file")
    s, here = socket.socket(socket.AF_UNIX), os.getcwd()
    os.chdir(d.full(""))
    s.bind("s.jsonl")
    os.chdir(here)
    s.close()


@a_set("unreadable", "a folder and a file without rights")
def _(d):
    take(d, "a.jsonl")
    d.put(
        "b.jsonl",
        jsonl(d.docs(3)),
        "mode 000",
        [NAMED, REFUSED, TAKEN] if os.geteuid() == 0 else [NAMED, REFUSED],
        3,
        "cannot be read",
        test="mode 000",
    )


@a_set("rsync-and-sync-tools", "conflict copies and temporary names of sync tools")
def _(d):
    data, docs = take(d, "notes.jsonl", 20)
    d.put(
        "notes (Anna's conflicted copy 2024-01-02).jsonl",
        jsonl(docs[:-1] + d.docs(1)),
        "conflict",
        [NAMED, REFUSED, LEFT],
        20,
        "nearly the same rows",
    )
    d.put(
        "notes.sync-conflict-20240102-030405-ABCDEFG.jsonl",
        jsonl(docs[:-2] + d.docs(1)),
        "conflict",
        [NAMED, REFUSED, LEFT],
        19,
        "nearly the same rows",
    )
    d.put(".~tmp~/notes.jsonl", jsonl(docs[:3]), "rsync", OUT, 0, "rsync's delayed updates")
    d.put(".notes.jsonl.a1B2c3", jsonl(docs[:3]), "rsync", OUT, 0, "rsync's temporary file")
    d.meta(".stfolder/x", b"")
    d.meta(".nfs000000000000abcd00000001", jsonl(docs[:3]))


@a_set("hub-snapshot", "the hub's cache below the folder")
def _(d):
    data, _ = take(d, "data/train-00000-of-00002.parquet", 6, parquet)
    take(d, "data/train-00001-of-00002.parquet", 6, parquet)
    d.put("data/test-00000-of-00001.parquet", parquet(d.docs(3)), "held out", OUT, 0, "another split")
    d.meta(".cache/huggingface/download/data/train-00000-of-00002.parquet.metadata", "abc\nabc\n1700000000.0\n")
    d.meta(".cache/huggingface/download/data/train-00000-of-00002.parquet.lock", b"")
    d.put(".cache/huggingface/download/data/xyz.abc.incomplete", data[:100], "unfinished", OUT, 0, "not whole")
    d.meta(".gitattributes", "*.parquet filter=lfs\n")


@a_set("hub-old-shard-count", "shards of an earlier upload")
def _(d):
    for i in range(3):
        d.put(
            f"train-{i:05d}-of-00003.parquet",
            parquet(d.docs(6)),
            "one of two sets",
            [NAMED, REFUSED],
            6,
            "two sets mixed",
        )
    for i in range(2):
        d.put(
            f"train-{i:05d}-of-00002.parquet",
            parquet(d.docs(9)),
            "one of two sets",
            [NAMED, REFUSED],
            9,
            "two sets mixed",
        )


@a_set("error-pages", "answers of a server in place of data")
def _(d):
    take(d, "a.jsonl")
    d.put("b.jsonl", HTML_ERR.format(c="403 Forbidden").encode(), "html", [REFUSED, NAMED], 0, "an error page")
    d.put(
        "c.jsonl.gz",
        b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
        "xml",
        [REFUSED, NAMED],
        0,
        "an error page",
    )
    d.put("d.parquet", b'{"error":"Unauthorized"}', "json", [REFUSED, NAMED], 0, "an error page")
    d.put("e.jsonl", b'{"error": "Rate limit exceeded"}\n', "json", [REFUSED, NAMED], 0, "an error answer")
    d.put("f.jsonl", b"", "empty", OUT, 0, "empty")


@a_set("zeros", "files that a crash left full of zeros")
def _(d):
    take(d, "a.jsonl")
    d.put("b.jsonl", b"\0" * 5000, "zeros", [REFUSED, NAMED], 0, "zeros")
    d.put("c.jsonl", jsonl(d.docs(5)) + b"\0" * 3000, "zeros at the end", [REFUSED, NAMED], 5, "zeros")
    d.put("d.txt", b"\0" * 5000, "zeros", [REFUSED, NAMED], 0, "zeros")


@a_set("split-by-unix", "pieces of `split`, of which only the first has a beginning")
def _(d):
    take(d, "a.jsonl")
    big = gz(jsonl(d.docs(40)))
    for i, s in enumerate(("aa", "ab", "ac")):
        d.put(f"big.jsonl.gz.{s}", big[i * 300 : (i + 1) * 300], "piece", [NAMED, REFUSED, LEFT], 0, "a piece")
    for i in (1, 2):
        d.put(f"more.zip.00{i}", b"PK\3\4" + b"\0" * 60, "piece", [NAMED, REFUSED, LEFT], 0, "a piece")


@a_set("splits-by-word", "held-out sets by common names")
def _(d):
    take(d, "train.jsonl")
    for name in (
        "val.jsonl",
        "dev.jsonl",
        "eval.jsonl",
        "heldout.jsonl",
        "held_out.jsonl",
        "validation_0.jsonl",
        "TEST.jsonl",
        "corpus_test.jsonl",
        "corpus.valid.jsonl",
        "en-dev-01.jsonl",
    ):
        d.put(name, jsonl(d.docs(3)), "held out", OUT, 0, "another split")
    for name in ("testament.jsonl", "evaluation_of_bridges.jsonl", "contest.jsonl", "devon.jsonl", "latest.jsonl"):
        d.put(name, jsonl(d.docs(3)), "data", [TAKEN, NAMED], 3, "words that only look so")


@a_set("logs-and-lists")
def _(d):
    take(d, "a.jsonl")
    d.meta("wget-log", "--2024-- saved\n")
    d.meta("urls.txt", "https://a.example/1\nhttps://a.example/2\n", answer=[LEFT, NAMED])
    d.meta("LICENSE.txt", "Apache License\n")
    d.meta("README.txt", "About\n")
    d.meta("requirements.txt", "numpy\n")
    d.meta("stats.json", {"rows": 5})
    d.meta("robots.txt", "User-agent: *\n", answer=[LEFT, NAMED])
    d.meta("nohup.out", "x\n")
    d.meta("slurm-123.out", "x\n")
    d.meta("convert.py", "print()\n")


@a_set("tar-shards")
def _(d):
    docs = d.docs(6)
    d.take("a.tar", tar([(f"{i}.txt", x["text"].encode()) for i, x in enumerate(docs)]), 6)
    docs = d.docs(6)
    d.put(
        "b.tar",
        tar(
            [(f"{i}.jpg", b"\xff\xd8\xff\xe0") for i in range(3)]
            + [(f"{i}.txt", x["text"].encode()) for i, x in enumerate(docs)]
        ),
        "with pictures",
        [TAKEN, NAMED],
        6,
        "pictures are counted",
    )


@a_set("same-rows-two-formats", "the same rows as jsonl and as parquet")
def _(d):
    docs = d.docs(20)
    d.put("export.jsonl", jsonl(docs), "format 1", [TAKEN, NAMED, REFUSED], 20, "one of two")
    d.put("export.parquet", parquet(docs), "format 2", [NAMED, REFUSED, LEFT], 20, "the same rows again")


@a_set("csv-of-excel")
def _(d):
    take(d, "a.csv", 6, lambda docs: csv_bytes(docs, bom=True, eol="\r\n"))
    d.put(
        "b.csv",
        csv_bytes(d.docs(6), delim=";", index=False),
        "semicolons",
        [TAKEN, NAMED, REFUSED],
        6,
        "another delimiter",
    )
    d.put("c.xlsx", zip_bytes([("xl/workbook.xml", b"<w/>")]), "xlsx", [NAMED, REFUSED, LEFT], 0, "not read")


@a_set("dead-lettered-jobs", "part files of a writer that still writes")
def _(d):
    take(d, "00000.jsonl.gz", 5, lambda docs: gz(jsonl(docs)))
    d.put("00001.jsonl.gz", gz(jsonl(d.docs(60)))[:-200], "torn", [REFUSED, NAMED], 0, "torn gzip")
    d.put("00002.jsonl", jsonl(d.docs(6))[:-20], "torn", [REFUSED, NAMED], 5, "torn last line")
    d.put("00003.parquet", parquet(d.docs(6))[:-30], "torn", [REFUSED, NAMED], 0, "no footer")
    d.put("00004.jsonl.bz2", bz(jsonl(d.docs(30)))[:-40], "torn", [REFUSED, NAMED], 0, "torn bzip2")


def make_second_tree(out, seed=0, only=()):
    """Write OUT/second; return the data sets with their lines."""
    root, made = os.path.join(out, "second"), []
    os.makedirs(root)
    for name, (troubles, f) in SETS.items():
        if not only or name in only:
            made.append(DS(root, seed, name, troubles))
            f(made[-1])
    for d in made:
        for rel, test in d.late:
            if test == "mode 000":
                os.chmod(d.full(rel), 0)
    return made
