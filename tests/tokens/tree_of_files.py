# ruff: noqa
"""A tree of about 5,000 small files as people leave text data for pretraining, with what is right for each.

Made by somebody who did not know the rules of `relayrun dumps prepare`. `make_tree` writes it. An answer is `taken`,
`left out`, `refused` or `named` (taken or not, if the tool names the file with a reason), or a list of answers: any is
right, and a file that must not be used and is named is right, too.
"""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import random
import re
import stat
import struct
import tarfile
import unicodedata
import uuid
import zipfile
import zlib

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import zstandard

pa.set_cpu_count(1)

TAKEN, LEFT, REFUSED, NAMED = "taken", "left out", "refused", "named"
META = [LEFT, NAMED]
ROOT = os.geteuid() == 0

# --------------------------------------------------------------------------- text

WORDS = {
    "noun": "harbour mill ledger orchard railway council lantern bakery river archive kitchen compass "
    "glacier market violin furnace satellite library bridge notebook garden engine parish theatre "
    "quarry telescope workshop cathedral reservoir timetable museum ferry loom vineyard clinic".split(),
    "adj": "old narrow quiet local forgotten careful northern wooden bright damp expensive ordinary crowded "
    "temporary municipal remarkable patient cheap provincial reliable stubborn early modest".split(),
    "verb": "repaired described measured abandoned opened painted catalogued sold inspected borrowed "
    "rebuilt photographed closed mapped translated funded surveyed restored".split(),
    "name": "Ada Marek Ingrid Tomas Leila Owen Priya Kofi Noor Henrik Sofia Jun Amara Pavel Clara Idris "
    "Mei Rosa Stefan Yusuf".split(),
    "place": "Lund Porto Tartu Bergen Graz Leeds Cork Nantes Osaka Turin Gdynia Aarhus Split Bilbao Ghent "
    "Halifax Perth Salta Busan".split(),
}
TEMPLATES = {
    "en": [
        "{name} {verb} the {adj} {noun} in {place} before the winter of {year}.",
        "The {noun} was {adj}, and nobody in {place} had asked why.",
        "According to {name}, about {num} visitors saw the {noun} in {year}.",
        '"It is only a {adj} {noun}," said {name}, "but it is ours."',
        "Between {year} and the present day the {adj} {noun} has been {verb} twice.",
        "What happens to a {noun} when the {adj} {noun} beside it is {verb}?",
        "They paid {num} crowns for the {noun}; the {noun} came free of charge.",
        "See the {noun} (figure {num}) for a {adj} example from {place}.",
        "In {place}, {name} and {name} {verb} every {noun} they could find.",
        "No {adj} account of the {noun} survives, although {name} {verb} one in {year}.",
        "Please note: the {noun} closes at 5 p.m. & the {noun} at 6 p.m.",
    ],
    "de": [
        "{name} hat im Jahr {year} in {place} eine alte Mühle gekauft.",
        "Die Straße nach {place} war wegen Schnee für {num} Tage gesperrt.",
        "„Schön“, sagte {name}, „aber größer wäre besser.“",
        "Über {num} Bürger unterschrieben den Antrag von {name}.",
    ],
    "fr": [
        "En {year}, {name} a visité la bibliothèque de {place}.",
        "L’été dernier, près de {num} élèves ont participé à la fête.",
        "« Où est le marché ? » demanda {name}, déjà fatiguée.",
        "Le pont de {place} a été reconstruit après la crue de {year}.",
    ],
    "es": [
        "{name} escribió {num} páginas sobre la cocina de {place}.",
        "¿Quién construyó el puente de {place} en {year}?",
        "La señora {name} vendió la viña a su vecino por {num} pesos.",
    ],
    "ru": [
        "В {year} году {name} переехала в {place} вместе с семьёй.",
        "На рынке продали {num} килограммов яблок.",
        "Старая мельница у реки давно закрыта.",
    ],
    "ja": [
        "{year}年、{name}は{place}の図書館で働いていた。",
        "川の近くに古い工場が{num}軒あった。",
        "冬になると、港はとても静かになる。",
    ],
}
ODD = [
    "It’s 20 °C — “mild”, they say. ",
    "Tab\there. ",
    "emoji 🌍🚲 too. ",
    "soft\u00adhyphen. ",
    "line\u2028separator. ",
    "next\u0085line. ",
    "C:\\temp\\new. ",
]
SLOT = re.compile(r"\{(\w+)\}")


class Texts:
    def __init__(self, rng):
        self.rng, self.count = rng, 0

    def sentence(self, lang="en"):
        rng = self.rng

        def put(m):
            k = m.group(1)
            if k == "year":
                return str(rng.randrange(1750, 2024))
            if k == "num":
                return str(rng.randrange(3, 9999))
            return rng.choice(WORDS[k])

        return SLOT.sub(put, rng.choice(TEMPLATES[lang]))

    def text(self, lang="en", lo=3, hi=11, flat=False):
        rng = self.rng
        parts = []
        for _ in range(rng.randint(lo, hi)):
            parts.append(self.sentence(lang))
            parts.append("\n\n" if rng.random() < 0.15 and not flat else " ")
        s = "".join(parts).strip()
        if rng.random() < 0.03 and not flat:
            s = rng.choice(ODD) + s
        return s

    def doc(self, lang="en", flat=False, **more):
        self.count += 1
        rng = self.rng
        return {
            "id": "%08x-%05d" % (rng.getrandbits(32), self.count),
            "text": self.text(lang, flat=flat),
            "url": "https://www.%s-%s.example/%s/%d"
            % (rng.choice(WORDS["adj"]), rng.choice(WORDS["noun"]), rng.choice(WORDS["noun"]), self.count),
            "lang": lang,
            **more,
        }

    def docs(self, lo, hi=None, lang="en", flat=False, **more):
        n = lo if hi is None else self.rng.randint(lo, hi)
        return [self.doc(lang, flat, **more) for _ in range(n)]


# --------------------------------------------------------------------------- encoders


def gz(b, level=6):
    o = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=o, mode="wb", compresslevel=level, mtime=0) as f:
        f.write(b)
    return o.getvalue()


def zst(b, level=3, checksum=True):
    return zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(b)


def xz(b):
    return lzma.compress(b, preset=0)


def bz(b):
    return bz2.compress(b, 1)


def recol(docs, col):
    if col == "text":
        return docs
    return [{(col if k == "text" else k): v for k, v in d.items()} for d in docs]


def jsonl(docs, col="text", ascii_=False, eol="\n"):
    return "".join(json.dumps(d, ensure_ascii=ascii_) + eol for d in recol(docs, col)).encode()


def json_array(docs, indent=None):
    return json.dumps(docs, ensure_ascii=False, indent=indent).encode()


def table(docs, col="text", extra=None):
    docs = recol(docs, col)
    keys = list(docs[0]) if docs else ["id", col, "url", "lang"]
    t = pa.table({k: pa.array([d[k] for d in docs], type=None if docs else pa.string()) for k in keys})
    for k, v in (extra or {}).items():
        t = t.append_column(k, v)
    return t


def parquet(docs, col="text", compression="snappy", extra=None, row_group=None, index=False):
    t = table(docs, col, extra)
    if index:
        t = t.append_column("__index_level_0__", pa.array(range(len(docs)), pa.int64()))
    o = io.BytesIO()
    pq.write_table(t, o, compression=compression, row_group_size=row_group or 1000)
    return o.getvalue()


def feath(docs, col="text", compression="lz4", extra=None):
    o = io.BytesIO()
    feather.write_feather(table(docs, col, extra), o, compression=compression)
    return o.getvalue()


def arrow_stream(docs, batch=7):
    """As datasets' save_to_disk writes it: an IPC stream, 8 bytes of end mark last."""
    t = table(docs).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": {k: {"dtype": "string", "_type": "Value"} for k in docs[0]}}})}
    )
    o = io.BytesIO()
    with pa.ipc.new_stream(o, t.schema) as w:
        for b in t.to_batches(max_chunksize=batch):
            w.write_batch(b)
    return o.getvalue()


def csv_bytes(docs, delim=",", index=True, bom=False, eol="\n"):
    o = io.StringIO()
    w = csv.writer(o, delimiter=delim, lineterminator=eol)
    keys = list(docs[0])
    w.writerow(([""] if index else []) + keys)
    for i, d in enumerate(docs):
        w.writerow(([i] if index else []) + [d[k] for k in keys])
    return o.getvalue().encode("utf-8-sig" if bom else "utf-8")


def tar(members, mode="w"):
    o = io.BytesIO()
    kw = {"compresslevel": 6} if mode == "w:gz" else {}
    with tarfile.open(fileobj=o, mode="w", format=tarfile.PAX_FORMAT) as t:
        for name, data in members:
            i = tarfile.TarInfo(name)
            i.size, i.mtime, i.mode = len(data), 1700000000, 0o644
            t.addfile(i, io.BytesIO(data))
    b = o.getvalue()
    return gz(b) if mode == "w:gz" else b


def zip_bytes(members):
    o = io.BytesIO()
    with zipfile.ZipFile(o, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members:
            z.writestr(zipfile.ZipInfo(name, (2024, 1, 2, 3, 4, 6)), data, zipfile.ZIP_DEFLATED)
    return o.getvalue()


def warc_record(rng, kind, body, ctype, uri=None):
    h = ["WARC/1.0", "WARC-Type: " + kind]
    if uri:
        h.append("WARC-Target-URI: " + uri)
    h += [
        "WARC-Date: 2023-03-2%dT0%d:12:45Z" % (rng.randrange(9), rng.randrange(9)),
        "WARC-Record-ID: <urn:uuid:%s>" % uuid.UUID(int=rng.getrandbits(128)),
        "Content-Type: " + ctype,
        "Content-Length: %d" % len(body),
    ]
    return "\r\n".join(h).encode() + b"\r\n\r\n" + body + b"\r\n\r\n"


def warcinfo(rng):
    return warc_record(
        rng, "warcinfo", b"Software-Info: ia-web-commons\r\nisPartOf: CC-MAIN-2023-14\r\n", "application/warc-fields"
    )


def wet(rng, docs):
    return b"".join(
        gz(r)
        for r in [warcinfo(rng)]
        + [warc_record(rng, "conversion", d["text"].encode(), "text/plain", d["url"]) for d in docs]
    )


def warc(rng, docs):
    out = [gz(warcinfo(rng))]
    for d in docs:
        html = "<html><body><p>%s</p></body></html>" % d["text"].replace("\n\n", "</p><p>")
        http = ("HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + html).encode()
        out.append(
            gz(warc_record(rng, "request", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request", d["url"]))
        )
        out.append(gz(warc_record(rng, "response", http, "application/http; msgtype=response", d["url"])))
    return b"".join(out)


def wat(rng, docs):
    return b"".join(
        gz(r)
        for r in [warcinfo(rng)]
        + [
            warc_record(
                rng,
                "metadata",
                json.dumps({"Envelope": {"Payload-Metadata": {"url": d["url"]}}}).encode(),
                "application/json",
                d["url"],
            )
            for d in docs
        ]
    )


def hadoop_crc(b):
    return (
        b"crc\0"
        + struct.pack(">i", 512)
        + b"".join(struct.pack(">I", zlib.crc32(b[i : i + 512])) for i in range(0, len(b), 512))
    )


def sha(b):
    return hashlib.sha256(b).hexdigest()


def md5(b):
    return hashlib.md5(b).hexdigest()


DS_STORE = b"\0\0\0\1Bud1\0\0\x10\0\0\0\x08\0\0\0\x10\0" + b"\0" * 200
APPLE = b"\0\x05\x16\x07\0\x02\0\0Mac OS X        \0\x02\0\0\0\x09\0\0\0\x32\0\0\0\xb0" + b"\0" * 90
THUMBS = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 500
SWP = b"b0VIM 9.0\0\0\0\0\x10\0\0" + b"\0" * 500
PDF = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n1 0 obj<</Type/Catalog>>endobj\nstream\n\x80\x81\xfe\xff\0\x01\nendstream\n%%EOF\n"
JPEG = b"\xff\xd8\xff\xe0\0\x10JFIF\0\x01\x01\0\0\x01\0\x01\0\0" + bytes(range(256)) + b"\xff\xd9"
HTML_ERR = (
    "<!DOCTYPE html>\n<html><head><title>{c}</title></head><body><h1>{c}</h1>"
    "<p>The resource could not be served. Please sign in and try again.</p></body></html>\n"
)
GITATTR = (
    b"*.parquet filter=lfs diff=lfs merge=lfs -text\n*.arrow filter=lfs diff=lfs merge=lfs -text\n"
    b"*.gz filter=lfs diff=lfs merge=lfs -text\n*.zst filter=lfs diff=lfs merge=lfs -text\n"
)


def pointer(b):
    return ("version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (sha(b), len(b))).encode()


# --------------------------------------------------------------------------- a data set


class DS:
    all = []

    def __init__(self, root, seed, folder, troubles=(), col="text"):
        self.root, self.folder, self.troubles, self.col = root, folder, list(troubles), col
        self.rng = random.Random("%s/%s" % (seed, folder))
        self.t = Texts(self.rng)
        self.lines, self.seen, self.data, self.late = [], set(), {}, []
        self.mtime = 1_680_000_000 + self.rng.randrange(50_000_000)
        DS.all.append(self)

    def full(self, rel):
        return os.path.join(self.root, self.folder, rel)

    def line(self, rel, kind, answer, n, why, group=None, also=None):
        assert rel not in self.seen, (self.folder, rel)
        self.seen.add(rel)
        answers = [answer] if isinstance(answer, str) else list(answer)
        d = {
            "dataset": self.folder,
            "path": self.folder + "/" + rel,
            "kind": kind,
            "answer": answers[0] if len(answers) == 1 else answers,
            "documents": n if TAKEN in answers else 0,
            "why": why,
        }
        if also:
            d["documents_also"] = also
        if group:
            d["group"] = group
        self.lines.append(d)

    def put(self, rel, data, kind, answer, n=0, why="", test=None, **kw):
        """test: what the check proves of the file: torn, html, ... (see check)."""
        self.line(rel, kind, answer, n, why, **kw)
        p = self.full(rel)
        os.makedirs(os.path.dirname(p), exist_ok=True)
        with open(p, "xb") as f:
            f.write(data)
        os.utime(p, (self.mtime, self.mtime))
        self.data[rel] = data
        if test:
            self.late.append((rel, test))
        return data

    def take(self, rel, data, n, kind="data", why="ordinary training data", **kw):
        return self.put(rel, data, kind, TAKEN, n, why, **kw)

    def meta(self, rel, data, kind="metadata", why="not training text", answer=META, **kw):
        if isinstance(data, (dict, list)):
            data = json.dumps(data, indent=2).encode()
        elif isinstance(data, str):
            data = data.encode()
        return self.put(rel, data, kind, answer, 0, why, **kw)

    def link(self, rel, target, kind, answer, n=0, why="", **kw):
        self.line(rel, kind, answer, n, why, **kw)
        p = self.full(rel)
        os.makedirs(os.path.dirname(p), exist_ok=True)
        os.symlink(target, p)

    def hard(self, rel, of, kind, answer, why, **kw):
        self.line(rel, kind, answer, 0, why, **kw)
        p = self.full(rel)
        os.makedirs(os.path.dirname(p), exist_ok=True)
        os.link(self.full(of), p)

    def special(self, rel, mode, kind, answer, why):
        self.line(rel, kind, answer, 0, why)
        p = self.full(rel)
        os.makedirs(os.path.dirname(p), exist_ok=True)
        os.mknod(p, 0o600 | mode)

    # ---- shorthands
    def docs(self, lo, hi=None, **kw):
        return self.t.docs(lo, hi, **kw)

    def readme(self, splits=None, data_files=None, name=None):
        y = ["---", "license: odc-by", "language:", "- en"]
        if splits:
            y += ["dataset_info:", "  features:", "  - name: text", "    dtype: string", "  splits:"]
            for s, n in splits.items():
                y += ["  - name: " + s, "    num_examples: %d" % n]
        if data_files:
            y += ["configs:", "- config_name: default", "  data_files:"]
            for s, paths in data_files:
                y += ["  - split: " + s, "    path:"] + ['    - "%s"' % p for p in paths]
        y += ["---", "", "# " + (name or self.folder), "", self.t.text(lo=2, hi=4), ""]
        self.meta("README.md", "\n".join(y), "dataset card", "a card, not a document")

    def sums(self, rel="SHA256SUMS", fn=sha, over=None, wrong=()):
        out = []
        for k in sorted(over if over is not None else self.data):
            h = fn(self.data[k])
            out.append("%s  %s\n" % (fn(b"earlier" + self.data[k]) if k in wrong else h, k))
        self.meta(rel, "".join(out), "checksum list", "a list of checksums")

    def txts(self, n, name, enc=lambda b: b, suffix=".txt", lang="en", folder="", **kw):
        for i in range(n):
            self.take(
                folder + name(i) + suffix,
                enc((self.t.text(lang, 4, 18) + "\n").encode()),
                1,
                "text file, one document",
                **kw,
            )

    def hexid(self, n=40):
        return "%0*x" % (n, self.rng.getrandbits(4 * n))


CLEAN, TROUBLED = [], []


def clean(folder, col="text"):
    def deco(f):
        CLEAN.append((folder, (), col, f))
        return f

    return deco


def troubled(folder, *troubles, col="text"):
    def deco(f):
        TROUBLED.append((folder, troubles, col, f))
        return f

    return deco


def slug(ds, i=None):
    r = ds.rng
    s = "%s-%s-%s" % (r.choice(WORDS["adj"]), r.choice(WORDS["noun"]), r.choice(WORDS["place"]).lower())
    return s if i is None else "%s-%03d" % (s, i)


# --------------------------------------------------------------------------- the clean ones


@clean("cc-main-2023-14-wet")
def _(d):
    paths = []
    for seg in range(2):
        s = "1679296943%d.%d" % (d.rng.randrange(100, 999), d.rng.randrange(10, 99))
        for i in range(9):
            p = "segments/%s/wet/CC-MAIN-20230320083513-20230320113513-%05d.warc.wet.gz" % (s, i)
            docs = d.docs(6, 14)
            d.take(
                p,
                wet(d.rng, docs),
                len(docs),
                "wet, a gzip member a record",
                "conversion records; the warcinfo record is no document",
            )
            paths.append("crawl-data/CC-MAIN-2023-14/" + p)
    d.meta("wet.paths.gz", gz("\n".join(paths).encode() + b"\n"), "list of paths", "paths, not text")


@clean("fineweb-sample-local")
def _(d):
    n = 0
    for i in range(24):
        docs = d.docs(5, 20)
        n += len(docs)
        p = "data/CC-MAIN-2024-10/000_%05d.parquet" % i
        extra = {
            "token_count": pa.array([d.rng.randrange(50, 400) for _ in docs]),
            "language_score": pa.array([d.rng.random() for _ in docs]),
        }
        b = d.take(p, parquet(docs, extra=extra, compression="zstd"), len(docs), "parquet")
        d.meta(
            ".cache/huggingface/download/%s.metadata" % p,
            "%s\n%s\n%d.5\n" % (d.hexid(), sha(b), d.mtime),
            "hub download metadata",
            "hidden",
        )
        d.meta(".cache/huggingface/download/%s.lock" % p, b"", "hub lock", "hidden, empty")
    d.meta(".cache/huggingface/.gitignore", "*", "hub cache", "hidden")
    d.meta(".cache/huggingface/CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n", "hub cache", "hidden")
    d.meta(".gitattributes", GITATTR, "git attributes", "hidden")
    d.readme({"train": n})


def hub(d, org, repo, files, commit, heldout=(), old=()):
    """hub cache layout; files: [(path, bytes, n)]."""
    base = "datasets--%s--%s/" % (org, repo)
    d.meta(base + "refs/main", commit, "hub ref", "a commit hash")
    done = set()
    for path, data, n in files:
        h = sha(data)
        held = path in heldout
        blob = base + "blobs/" + h
        depth = "../" * (2 + path.count("/"))
        if h not in done:
            done.add(h)
            d.put(
                blob,
                data,
                "hub blob",
                META,
                0,
                "the snapshot's link points here; count it once" + (", held-out split" if held else ""),
                group=path,
            )
        rel = base + "snapshots/%s/%s" % (commit, path)
        if n is None:
            d.link(rel, depth + "blobs/" + h, "link to a card", META, 0, "a card")
        elif held:
            d.link(
                rel,
                depth + "blobs/" + h,
                "held-out split, link to a blob",
                REFUSED,
                0,
                "a split other than train, and nothing was filtered",
                group=path,
            )
        else:
            d.link(
                rel,
                depth + "blobs/" + h,
                "snapshot link to a blob",
                TAKEN,
                n,
                "the file people mean; its blob is the same bytes",
                group=path,
            )
    d.meta("version.txt", "1", "hub cache version", "a version number")
    return base


@clean("hub-cache-train-only")
def _(d):
    files, tot = [], 0
    for i in range(8):
        docs = d.docs(8, 20)
        tot += len(docs)
        files.append(("data/train-%05d-of-00008.parquet" % i, parquet(docs), len(docs)))
    card = (
        "---\nlicense: mit\ndataset_info:\n  splits:\n  - name: train\n    num_examples: %d\n---\n# essays\n" % tot
    ).encode()
    commit = d.hexid()
    hub(d, "quietlab", "essays", files + [("README.md", card, None)], commit)
    d.meta(".locks/datasets--quietlab--essays/%s.lock" % d.hexid(64), b"", "hub lock", "hidden, empty")


def save_to_disk(d, base, n_shards, split=None, skip_eos=(), cut=(), missing=()):
    files, tot = [], 0
    for i in range(n_shards):
        docs = d.docs(10, 30)
        tot += len(docs)
        b = arrow_stream(docs)
        name = "data-%05d-of-%05d.arrow" % (i, n_shards)
        files.append({"filename": name})
        if i in missing:
            continue
        if i in skip_eos:
            d.put(
                base + name,
                b[:-8],
                "torn arrow stream",
                REFUSED,
                0,
                "the stream's end mark is gone: nobody can say that nothing else is",
                test="no eos",
            )
        elif i in cut:
            d.put(
                base + name,
                b[: int(len(b) * d.rng.uniform(0.5, 0.8))],
                "torn arrow stream",
                REFUSED,
                0,
                "cut inside a batch",
                test="torn arrow",
            )
        else:
            d.put(
                base + name,
                b,
                "arrow stream (save_to_disk)",
                [TAKEN, REFUSED, NAMED] if missing else TAKEN,
                len(docs),
                "whole, but state.json names another that is not here" if missing else "ordinary training data",
            )
    d.meta(
        base + "state.json",
        {
            "_data_files": files,
            "_fingerprint": d.hexid(16),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": split,
        },
        "datasets' state that names a missing file" if missing else "datasets' state",
        "the set is not whole" if missing else "not training text",
        [REFUSED, NAMED] if missing else META,
    )
    d.meta(
        base + "dataset_info.json",
        {
            "citation": "",
            "description": "",
            "features": {"text": {"dtype": "string", "_type": "Value"}},
            "splits": {"train": {"name": "train", "num_examples": tot}},
        },
        "datasets' info",
    )


@clean("saved-to-disk-flat")
def _(d):
    save_to_disk(d, "", 10)


@clean("saved-to-disk-dict")
def _(d):
    d.meta("dataset_dict.json", {"splits": ["train"]}, "datasets' dict")
    save_to_disk(d, "train/", 12, "train")


def spark_parts(d, base, n, lo=3, hi=12, bad_crc=(), success=True):
    u = uuid.UUID(int=d.rng.getrandbits(128))
    for i in range(n):
        docs = d.docs(lo, hi)
        name = "part-%05d-%s-c000.snappy.parquet" % (i, u)
        b = parquet(docs)
        if i in bad_crc:
            d.put(
                base + name,
                b,
                "spark part, crc differs",
                [REFUSED, NAMED],
                0,
                "its .crc was made from other bytes",
                test="crc differs",
            )
            c = hadoop_crc(parquet(d.docs(lo, hi)))
        else:
            d.take(base + name, b, len(docs), "spark parquet part")
            c = hadoop_crc(b)
        d.meta(base + "." + name + ".crc", c, "hadoop crc", "hidden checksum")
    if success:
        d.meta(base + "_SUCCESS", b"", "spark marker", "an empty marker")
        d.meta(base + "._SUCCESS.crc", hadoop_crc(b""), "hadoop crc", "hidden checksum")


@clean("spark-news-by-lang")
def _(d):
    for lang in ("en", "de", "fr"):
        spark_parts(d, "lang=%s/" % lang, 12, success=False)
    d.meta("_SUCCESS", b"", "spark marker", "an empty marker")
    d.meta("._SUCCESS.crc", hadoop_crc(b""), "hadoop crc", "hidden checksum")


@clean("databricks-export")
def _(d):
    tid = str(d.rng.randrange(10**18, 9 * 10**18))
    names = []
    for i in range(24):
        docs = d.docs(4, 14)
        name = "part-%05d-tid-%s-%s-%d-1-c000.snappy.parquet" % (i, tid, uuid.UUID(int=d.rng.getrandbits(128)), 100 + i)
        names.append(name)
        d.take(name, parquet(docs), len(docs), "spark parquet part")
    d.meta("_started_" + tid, b"", "spark marker")
    d.meta("_committed_" + tid, {"added": names, "removed": []}, "spark marker")
    d.meta("_SUCCESS", b"", "spark marker")


@clean("spark-json-gz")
def _(d):
    u = uuid.UUID(int=d.rng.getrandbits(128))
    for i in range(36):
        docs = d.docs(4, 14)
        name = "part-%05d-%s-c000.json.gz" % (i, u)
        b = d.take(name, gz(jsonl(docs)), len(docs), "json lines in gzip, called .json.gz")
        d.meta("." + name + ".crc", hadoop_crc(b), "hadoop crc", "hidden checksum")
    d.meta("_SUCCESS", b"", "spark marker")
    d.meta("._SUCCESS.crc", hadoop_crc(b""), "hadoop crc")


@clean("pandas-csv-exports")
def _(d):
    for i in range(30):
        docs = d.docs(5, 25)
        d.take("export_%02d.csv" % i, csv_bytes(docs), len(docs), "csv with an index column and line breaks in cells")
    d.meta("export.py", "import pandas as pd\n# df.to_csv(f'export_{i:02d}.csv')\n", "script")


@clean("notebook-jsonl-pickles")
def _(d):
    for i in range(25):
        docs = d.docs(5, 15)
        d.take(
            "frame_%02d.jsonl" % i, jsonl(docs, ascii_=True).replace(b"/", b"\\/"), len(docs), "pandas to_json lines"
        )
        d.meta("frame_%02d.pkl" % i, pickle.dumps(docs), "pickle beside", "the same rows as the jsonl; never load it")
    d.meta("clean.ipynb", {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, "notebook")


def datatrove(d, world, langs=(None,), torn=(), absent=(), unfinished=()):
    for r in range(world):
        lang = langs[r % len(langs)]
        rel = "output/%s%05d.jsonl.gz" % (lang + "/" if lang else "", r)
        docs = [
            {"text": x["text"], "id": x["id"], "metadata": {"url": x["url"], "dump": "CC-MAIN-2023-50"}}
            for x in d.docs(3, 12)
        ]
        b = gz(jsonl(docs))
        if r in torn:
            d.put(
                rel,
                b[: -8 - d.rng.randrange(0, 60)],
                "torn gzip",
                REFUSED,
                0,
                "the task died while writing; the gzip has no end",
                test="torn gz",
            )
        elif r in unfinished:
            d.put(
                rel,
                b,
                "output of an unfinished task",
                [REFUSED, NAMED],
                0,
                "readable, but its rank has no completion: it may be part of a shard",
            )
        elif r not in absent:
            d.take(rel, b, len(docs), "datatrove output")
        if r not in torn and r not in absent and r not in unfinished:
            d.meta("logs/completions/%05d" % r, b"", "completion marker", "empty marker")
            d.meta(
                "logs/stats/%05d.json" % r, [{"name": "Writer", "stats": {"documents": len(docs)}}], "task statistics"
            )
        d.meta("logs/logs/task_%05d.log" % r, "2024-02-0%d | INFO | Executing rank=%d\n" % (1 + r % 8, r), "log")
    d.meta(
        "logs/executor.json",
        {"world_size": world, "pipeline": ["Reader", "Filter", "JsonlWriter"]},
        "executor's settings",
    )


@clean("datatrove-base-processing")
def _(d):
    datatrove(d, 48, ("en", "de", "fr"))
    d.meta("logs/stats.json", [{"name": "Writer", "stats": {"documents": 0}}], "statistics")


@clean("datalad-annex-letters", col="body")
def _(d):
    for i in range(40):
        docs = d.docs(3, 10)
        b = jsonl(docs, "body")
        key = "MD5E-s%d--%s.jsonl" % (len(b), md5(b))
        store = ".git/annex/objects/%s/%s/%s/%s" % (d.hexid(2), d.hexid(2), key, key)
        rel = "letters/box_%02d.jsonl" % i
        d.put(store, b, "annexed object", META, 0, "hidden; the link outside is the file", group=rel)
        d.link(rel, "../" + store, "link into git-annex", TAKEN, len(docs), "the file people mean", group=rel)
    d.meta(".git/HEAD", "ref: refs/heads/main\n", "git")
    d.meta(".datalad/config", '[datalad "dataset"]\n\tid = x\n', "datalad", "hidden")


TITLES = (
    "Contest of Winds|Latest Letters|The Evaluator’s Niece|Medieval Roads|Testament of a Miller|"
    "Développement durable|Öster om bron|Dvořák a řeka|Война у моста|雨の港|Retrieval of the Bell|"
    "Devon Walks|A Trainee in Turin|Carnival"
).split("|")


@clean("gutenberg-like-books")
def _(d):
    for i in range(260):
        t = d.rng.choice(TITLES)
        lang = "ru" if "В" in t else "ja" if "雨" in t else "en"
        d.take("%d - %s.txt" % (1000 + i, t), (d.t.text(lang, 8, 40) + "\n").encode(), 1, "text file, one document")
    d.meta("LICENSE", "Public domain.\n", "licence")
    d.meta(
        "SHA256SUMS",
        "".join("%s  %s\n" % (sha(b), k) for k, b in sorted(d.data.items()) if k != "LICENSE"),
        "checksum list",
        "all of them match",
    )


@clean("medieval-letters-by-author")
def _(d):
    for name in WORDS["name"]:
        d.txts(20, lambda i: "%s/letter_%03d" % (name.lower(), i))


@clean("radio-transcripts-bz2")
def _(d):
    d.txts(140, lambda i: "2019-%02d/programme_%04d" % (1 + i % 12, i), bz, ".txt.bz2")


@clean("court-records-xz")
def _(d):
    d.txts(140, lambda i: "district_%d/case-%05d" % (i % 5, 20000 + i), xz, ".txt.xz")


@clean("pile-style-train")
def _(d):
    for i in range(30):
        docs = [{"text": x["text"], "meta": {"pile_set_name": "Books3-like"}} for x in d.docs(8, 24)]
        d.take("train/%02d.jsonl.zst" % i, zst(jsonl(docs)), len(docs), "jsonl in zstd")
    d.sums("SHA256SUMS.txt")


@clean("forum-dumps-tar")
def _(d):
    for i in range(12):
        ms, n = [], 0
        for j in range(5):
            docs = d.docs(3, 9)
            n += len(docs)
            ms.append(("forum_%02d/part-%d.jsonl" % (i, j), jsonl(docs)))
        d.take("forum_%02d.tar" % i, tar(ms), n, "tar of jsonl")


@clean("recipes-tar-gz")
def _(d):
    for i in range(12):
        ms = []
        for j in range(d.rng.randint(6, 15)):
            ms.append(("recipes_%02d/%s.txt" % (i, slug(d, j)), d.t.text().encode()))
        n = len(ms)
        why = "one document a member"
        if i % 4 == 0:
            ms = [m for a in ms for m in ((a[0].replace("/", "/._"), APPLE), a)]
            why += "; the ._ members are macOS leavings"
        d.take("recipes_%02d.tar.gz" % i, tar(ms, "w:gz"), n, "tar.gz of txt", why)


@clean("ndjson-and-jsonlines")
def _(d):
    for i in range(30):
        docs = d.docs(4, 14)
        d.take("events/%03d.ndjson" % i, jsonl(docs), len(docs), "ndjson")
    for i in range(30):
        docs = d.docs(4, 14)
        d.take("stories/%03d.jsonlines" % i, jsonl(docs)[:-1], len(docs), "jsonlines, no line end at the end")


@clean("json-three-ways")
def _(d):
    for i in range(20):
        docs = d.docs(4, 12)
        d.take("arrays/a%02d.json" % i, json_array(docs, 2 if i % 3 == 0 else None), len(docs), "json array")
    for i in range(20):
        docs = d.docs(4, 12)
        d.take("lines/l%02d.json" % i, jsonl(docs), len(docs), "json lines called .json")
    for i in range(30):
        d.take("single/s%02d.json" % i, json.dumps(d.t.doc(), indent=2).encode(), 1, "one json object, one document")


@clean("c4-like-train")
def _(d):
    for i in range(16):
        docs = [{"text": x["text"], "timestamp": "2019-04-25T12:57:54Z", "url": x["url"]} for x in d.docs(10, 30)]
        d.take(
            "en/c4-train.%05d-of-00016.json.gz" % i,
            gz(jsonl(docs)),
            len(docs),
            "json lines in gzip",
            "a whole -of-16 set",
        )


@clean("subtitle-tsv")
def _(d):
    for i in range(40):
        docs = d.docs(4, 20, flat=True)
        d.take("subs_%03d.tsv" % i, csv_bytes(docs, "\t", index=False), len(docs), "tsv with a header")


@clean("feather-and-pq")
def _(d):
    for i in range(20):
        docs = d.docs(5, 20)
        d.take(
            "f/block%02d.feather" % i,
            feath(docs, compression=("lz4", "zstd", "uncompressed")[i % 3]),
            len(docs),
            "feather",
        )
    for i in range(20):
        docs = d.docs(5, 20)
        d.take("p/block%02d.pq" % (20 + i), parquet(docs, index=True), len(docs), "parquet called .pq")


@clean("reviews-zstd")
def _(d):
    for i in range(30):
        docs = d.docs(5, 20)
        b = jsonl(docs)
        if i % 5 == 0:  # two frames, as pzstd or cat leave it
            h = b.index(b"\n", len(b) // 2 - 400) + 1
            d.take("reviews_%03d.jsonl.zstd" % i, zst(b[:h]) + zst(b[h:]), len(docs), "jsonl in two zstd frames")
        else:
            d.take("reviews_%03d.jsonl.zstd" % i, zst(b), len(docs), "jsonl in zstd, suffix .zstd")


@clean("names as people type them")
def _(d):
    names = [
        "web[2024]/part 1",
        "web[2024]/part 2",
        "web[2024]/[final]",
        "all*",
        "what?",
        "it's",
        'say "hi"',
        "данные",
        "日本語コーパス",
        "emoji 🌍",
        "-rf",
        "--help",
        "x ",
        "100%20sure",
        "#hash",
        "{a,b}",
        "$HOME",
        "`cmd`",
        "semi;colon",
        "win\\path",
        "a&b",
        "(copy of none)",
        "dots...many..dots",
        "tab\there",
        "L" * 230,
        "сл" * 55,
        "長" * 75,
        "deep/er/and/de/ep/er/ag/ain/leaf",
        "comma,name",
        "=formula",
        "@at",
        "~tilde",
        unicodedata.normalize("NFC", "café"),
        unicodedata.normalize("NFD", "café"),
        "web[2024] (1998 edition)",
    ]
    for i, n in enumerate(names):
        docs = d.docs(3, 9)
        if i % 3 == 2 and len(n.encode()) < 240:
            d.take(n + ".jsonl.gz", gz(jsonl(docs)), len(docs), "odd name")
        else:
            d.take(n + ".jsonl", jsonl(docs), len(docs), "odd name")
    for n in ("web[2024]/read*me first", "ß und ẞ", "a  b"):
        d.txts(1, lambda i: n)


@clean("from-a-mac")
def _(d):
    for i in range(50):
        docs = d.docs(3, 9)
        rel = "Archive/notes %d.jsonl" % i
        d.take(rel, jsonl(docs), len(docs))
        d.meta("Archive/._notes %d.jsonl" % i, APPLE, "macOS resource fork", "AppleDouble, not json")
        if i < 20:
            d.meta("__MACOSX/Archive/._notes %d.jsonl" % i, APPLE, "macOS resource fork")
    for f in ("", "Archive/", "__MACOSX/"):
        d.meta(f + ".DS_Store", DS_STORE, "macOS folder view")
    d.meta("Archive/Icon\r", b"", "macOS folder icon", "empty, odd name")


@clean("from-windows")
def _(d):
    for i in range(30):
        docs = d.docs(3, 9)
        d.take("Export/DATA_%02d.JSONL" % i, jsonl(docs, eol="\r\n"), len(docs), "jsonl, CRLF, capitals")
    for i in range(15):
        docs = d.docs(3, 9)
        d.take(
            "Export/Tabelle %02d.csv" % i,
            csv_bytes(docs, index=False, bom=True, eol="\r\n"),
            len(docs),
            "csv with a byte order mark",
        )
    for i in range(30):
        d.take(
            "Texte/Brief %02d.TXT" % i,
            b"\xef\xbb\xbf" + d.t.text("de").replace("\n", "\r\n").encode(),
            1,
            "txt, BOM, CRLF",
        )
    for i in range(6):
        docs = d.docs(3, 9)
        d.take("Export/OLD_%02d.JSONL.GZ" % i, gz(jsonl(docs)), len(docs), "capitals")
    for f in ("Export/", "Texte/"):
        d.meta(f + "Thumbs.db", THUMBS, "Windows thumbnails")
        d.meta(f + "desktop.ini", "[.ShellClassInfo]\r\n", "Windows folder settings")
    d.meta("Texte/~$richt.docx", b"\x06user" + b"\0" * 150, "Office lock file", "an owner file, no text")


@clean("git-clone-with-data")
def _(d):
    for i in range(30):
        docs = d.docs(3, 12)
        d.take("data/part-%02d.jsonl" % i, jsonl(docs), len(docs))
        d.meta(
            ".git/objects/%s/%s" % (d.hexid(2), d.hexid(38)), zlib.compress(b"blob 5\0hello"), "git object", "hidden"
        )
    for n, b in (
        ("HEAD", "ref: refs/heads/main\n"),
        ("config", "[core]\n\tbare = false\n"),
        ("refs/heads/main", d.hexid() + "\n"),
        ("description", "Unnamed repository\n"),
        ("logs/HEAD", "0000 1111 someone <a@b.example> clone\n"),
        ("hooks/pre-commit.sample", "#!/bin/sh\n"),
    ):
        d.meta(".git/" + n, b, "git", "hidden")
    d.meta(".github/workflows/ci.yml", "on: push\n", "ci", "hidden")
    d.meta(".gitignore", "*.tmp\n", "git")
    d.meta("LICENSE.txt", "MIT License\n\n" + d.t.text(lo=2, hi=3), "licence", "a licence, though it is a .txt")
    d.meta("requirements.txt", "datasets==2.18\nzstandard\n", "requirements", "not text, though it is a .txt")
    d.meta("scripts/build.py", "print('build')\n", "script")
    d.readme()


@clean("edited-by-hand")
def _(d):
    for i in range(40):
        docs = d.docs(3, 12)
        b = jsonl(docs)
        rel = "part-%02d.jsonl" % i
        d.take(rel, b, len(docs))
        older = jsonl(docs[:-1])
        why = "an editor's older copy of " + rel
        if i % 6 == 0:
            d.meta(rel + "~", older, "editor backup", why)
        if i % 6 == 1:
            d.meta(rel + ".bak", older, "editor backup", why)
        if i % 6 == 2:
            d.meta(rel + ".orig", older, "merge leaving", why)
        if i % 6 == 3:
            d.meta("." + rel + ".swp", SWP, "vim swap file", "hidden")
        if i % 6 == 4:
            d.meta("#%s#" % rel, older, "emacs autosave", why)
    d.meta("notes.md~", "todo\n", "editor backup")


@clean("versioned-latest")
def _(d):
    for i in range(40):
        docs = d.docs(3, 12)
        d.take("v3/chunk_%03d.jsonl.gz" % i, gz(jsonl(docs)), len(docs))
    d.link("latest", "v3", "link to a folder", META, 0, "the same files by another way; count them once")
    d.meta("CHANGELOG.md", "## v3\n- cleaned\n", "change log")
    d.meta("VERSION", "3\n", "version")


@clean("workspace-with-hidden-folders")
def _(d):
    for i in range(30):
        docs = d.docs(3, 12)
        rel = "corpus_%02d.jsonl" % i
        d.take(rel, jsonl(docs), len(docs))
        if i % 2:
            d.meta(
                ".ipynb_checkpoints/corpus_%02d-checkpoint.jsonl" % i,
                jsonl(docs[:2]),
                "notebook checkpoint",
                "hidden copy",
            )
        if i % 5 == 0:
            d.meta(".Trash-1000/files/old_%02d.jsonl" % i, jsonl(d.docs(2, 4)), "trash", "thrown away, hidden")
            d.meta(".Trash-1000/info/old_%02d.jsonl.trashinfo" % i, "[Trash Info]\nPath=old\n", "trash", "hidden")
    for i in range(15):
        d.meta(".venv/lib/python3.11/site-packages/p/m%d.py" % i, "x = %d\n" % i, "virtual environment", "hidden")
        d.meta(
            ".venv/lib/python3.11/site-packages/p-%d.dist-info/LICENSE.txt" % i,
            "BSD\n",
            "virtual environment",
            "hidden",
        )
    d.meta(".hidden_notes.txt", "remember the milk\n", "hidden note", "hidden")
    d.meta("__pycache__/prep.cpython-311.pyc", b"\xa7\r\r\n" + b"\0" * 60, "python cache")
    d.meta("prep.py", "pass\n", "script")


@clean("shards-with-md5-sidecars")
def _(d):
    for i in range(60):
        docs = d.docs(3, 12)
        rel = "shard_%04d.jsonl.gz" % i
        b = d.take(rel, gz(jsonl(docs)), len(docs), why="its md5 matches")
        d.meta(rel + ".md5", "%s  %s\n" % (md5(b), rel), "checksum", "matches")


@clean("redpajama-arxiv-like")
def _(d):
    for i in range(30):
        docs = [{"text": x["text"], "meta": {"arxiv_id": "2101.%05d" % d.rng.randrange(99999)}} for x in d.docs(5, 15)]
        d.take("arxiv_%s.jsonl" % uuid.UUID(int=d.rng.getrandbits(128)), jsonl(docs), len(docs))
    d.meta(
        "urls.txt",
        "".join("https://data.example/%d.jsonl\n" % i for i in range(30)),
        "list of urls",
        "addresses, though it is a .txt",
    )
    d.meta("download.log", "".join("%d saved\n" % i for i in range(30)), "log")
    d.sums("sha256sum.txt", over=[k for k in d.data if k.endswith(".jsonl")])


@clean("hub-convert-parquet", col="content")
def _(d):
    for c in ("default", "extra"):
        for i in range(15):
            docs = d.docs(10, 30)
            ex = {
                "score": pa.array([d.rng.random() for _ in docs]),
                "tags": pa.array([["a", "b"][: d.rng.randrange(3)] for _ in docs], pa.list_(pa.string())),
            }
            d.take(
                "%s/train/%04d.parquet" % (c, i),
                parquet(docs, "content", "zstd", ex, 6),
                len(docs),
                "parquet, several row groups, nested columns",
            )


@clean("multilingual-configs")
def _(d):
    tot = {}
    for lang in ("en", "de", "fr", "es", "ru", "ja"):
        for i in range(8):
            docs = d.docs(4, 12, lang=lang)
            tot[lang] = tot.get(lang, 0) + len(docs)
            d.take("%s/train-%05d-of-00008.parquet" % (lang, i), parquet(docs), len(docs), "parquet")
    y = (
        "---\nconfigs:\n"
        + "".join("- config_name: %s\n  data_files:\n  - split: train\n    path: %s/train-*\n" % (k, k) for k in tot)
        + "---\n# Six languages\n"
    )
    d.meta("README.md", y, "dataset card")
    d.meta(".gitattributes", GITATTR, "git attributes", "hidden")
    d.meta(
        "dataset_infos.json", {k: {"splits": {"train": {"num_examples": v}}} for k, v in tot.items()}, "datasets' info"
    )


@clean("batches-in-mixed-formats")
def _(d):
    for i in range(54):
        docs = d.docs(4, 14)
        ext, b = [
            (".jsonl.gz", lambda: gz(jsonl(docs))),
            (".jsonl.zst", lambda: zst(jsonl(docs))),
            (".parquet", lambda: parquet(docs)),
            (".jsonl", lambda: jsonl(docs)),
            (".jsonl.xz", lambda: xz(jsonl(docs))),
            (".jsonl.bz2", lambda: bz(jsonl(docs))),
            (".csv", lambda: csv_bytes(docs)),
            (".feather", lambda: feath(docs)),
            (".csv.gz", lambda: gz(csv_bytes(docs, index=False))),
        ][i % 9]
        d.take("batch_%03d%s" % (i, ext), b(), len(docs), "other documents in each")


@clean("run-with-checkpoints")
def _(d):
    for i in range(40):
        docs = d.docs(3, 12)
        d.take("data/%04d.jsonl" % i, jsonl(docs), len(docs))
    for s in range(1000, 5000, 1000):
        b = "checkpoints/step-%d/" % s
        d.meta(b + "model.safetensors", struct.pack("<Q", 2) + b"{}", "model checkpoint")
        d.meta(b + "optimizer.pt", zip_bytes([("archive/data.pkl", b"\x80\x02.")]), "model checkpoint")
        d.meta(b + "trainer_state.json", {"global_step": s, "log_history": []}, "model checkpoint")
        d.meta(b + "tokenizer.json", {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}}}, "tokenizer")
        d.meta(b + "vocab.txt", "a\nb\nc\n", "tokenizer", "a vocabulary, though it is a .txt")
        d.meta(b + "merges.txt", "#version: 0.2\na b\n", "tokenizer", "merges, though it is a .txt")
    d.meta("wandb/run-1/files/output.log", "step 1 loss 9.1\n", "log")
    d.meta("config.yaml", "lr: 1e-4\n", "settings")


@clean("sparse-output-with-empties")
def _(d):
    u = uuid.UUID(int=d.rng.getrandbits(128))
    for i in range(60):
        e = i % 5 == 3
        docs = [] if e else d.docs(3, 12)
        if i % 2:
            rel, b = "pq/part-%05d-%s-c000.snappy.parquet" % (i // 2, u), parquet(docs)
        else:
            rel, b = "json/part-%05d.jsonl.gz" % (i // 2), gz(jsonl(docs))
        if e:
            d.put(rel, b, "whole file of no rows", [TAKEN, LEFT, NAMED], 0, "an empty partition, well formed")
        else:
            d.take(rel, b, len(docs))
    for i in range(5):
        d.put(
            "plain/part-%05d.jsonl" % i,
            b"" if i == 2 else jsonl(d.docs(4)),
            "empty file" if i == 2 else "data",
            [NAMED, LEFT, TAKEN] if i == 2 else TAKEN,
            0 if i == 2 else 4,
            "no bytes: an empty partition" if i == 2 else "ordinary training data",
        )
    d.meta("_SUCCESS", b"", "spark marker")
    d.meta("pq/.keep", b"", "placeholder", "hidden")


@clean("developer-blogs-latest")
def _(d):
    for n in (
        "contest_entries",
        "devices",
        "latest_posts",
        "interval",
        "protest_news",
        "attestations",
        "evaluators_guild",
        "holdings",
        "trainspotting",
        "developers",
        "medieval",
        "greatest_hits",
    ):
        for i in range(3):
            docs = d.docs(3, 10)
            d.take(
                "%s_%d.jsonl.gz" % (n, i), gz(jsonl(docs)), len(docs), "data", "no split's name, only letters of one"
            )


# --------------------------------------------------------------------------- the troubled ones


@troubled("cc-2022-leftovers", "torn gzip (wet)", "warc and wat of the same pages beside")
def _(d):
    torn = set(d.rng.sample(range(20), 3))
    for i in range(20):
        docs = d.docs(6, 14)
        stem = "CC-MAIN-20220116093137-20220116123137-%05d.warc" % i
        b = wet(d.rng, docs)
        if i in torn:
            last = len(b) - d.rng.randrange(5, 120) if i == min(torn) else int(len(b) * d.rng.uniform(0.4, 0.9)) + 3
            d.put(
                "wet/" + stem + ".wet.gz",
                b[:last],
                "torn gzip",
                REFUSED,
                0,
                "cut while downloading, inside a gzip member",
                test="torn gz",
            )
        else:
            d.take("wet/" + stem + ".wet.gz", b, len(docs), "wet")
        if i < 6:
            d.put(
                "warc/" + stem + ".gz",
                warc(d.rng, docs),
                "warc of the same pages",
                [NAMED, REFUSED],
                0,
                "the html of pages whose text the wet files hold",
                group=stem,
            )
            d.put("wat/" + stem + ".wat.gz", wat(d.rng, docs), "wat metadata", META, 0, "link data, no text")


@troubled("pile-copy-interrupted", "torn zstd", "torn plain jsonl")
def _(d):
    for i in range(30):
        docs = d.docs(8, 20)
        rel, b = "%02d.jsonl.zst" % i, zst(jsonl(docs), checksum=i % 2 == 0)
        if i in (11, 23):
            d.put(
                rel,
                b[: int(len(b) * d.rng.uniform(0.5, 0.95))],
                "torn zstd",
                REFUSED,
                0,
                "the frame has no end",
                test="torn zst",
            )
        elif i == 29:
            d.put(rel, b"", "empty file called .zst", [REFUSED, NAMED], 0, "no frame at all: nothing arrived")
        else:
            d.take(rel, b, len(docs))
    for i in range(12):
        docs = d.docs(8, 20)
        rel, b = "extra_%02d.jsonl" % i, jsonl(docs)
        if i == 5:
            d.put(
                rel,
                b[: -d.rng.randrange(60, 200)],
                "torn jsonl",
                REFUSED,
                0,
                "the last line stops in its middle",
                test="torn jsonl",
            )
        elif i == 9:
            h = len(b) * 2 // 3
            d.put(
                rel,
                b[:h] + b"\0" * (len(b) - h),
                "zeros in a jsonl",
                REFUSED,
                0,
                "full size, zeros for its end",
                test="torn jsonl",
            )
        else:
            d.take(rel, b, len(docs))


@troubled("saved-to-disk-killed", "arrow streams without their end")
def _(d):
    save_to_disk(d, "", 16, skip_eos=(15,), cut=(6,))


@troubled("downloads-in-progress", "partial downloads", "a preallocated file with aria2's note")
def _(d):
    for i in range(40):
        docs = d.docs(6, 14)
        rel, b = "web-%04d.jsonl.gz" % i, gz(jsonl(docs))
        if i in (4, 12, 20, 28, 36):
            s = {4: ".part", 12: ".incomplete", 20: ".tmp", 28: ".crdownload", 36: ".filepart"}[i]
            d.put(
                rel + s,
                b[: int(len(b) * d.rng.uniform(0.2, 0.9))],
                "unfinished download",
                [REFUSED, NAMED],
                0,
                "the whole file is not here",
                group=rel,
                test="torn gz",
            )
        elif i == 17:
            h = len(b) // 2
            d.put(
                rel,
                b[:h] + b"\0" * (len(b) - h),
                "preallocated download",
                REFUSED,
                0,
                "full size, but its second half is zeros; aria2 was not done",
                test="torn gz",
            )
            d.meta(
                rel + ".aria2",
                b"\0\x01\0\0\0\0" + b"\0" * 40,
                "aria2 control file",
                "says that the file beside is unfinished",
            )
        else:
            d.take(rel, b, len(docs))
            if i == 8:
                d.put(
                    rel + ".part",
                    b[:100],
                    "stale partial download",
                    [NAMED, LEFT, REFUSED],
                    0,
                    "the whole file is beside it",
                )
            if i == 30:
                d.put(
                    rel + ".1",
                    b,
                    "wget's second copy",
                    [NAMED, REFUSED],
                    0,
                    "the same bytes as the file beside",
                    group=rel,
                )
            if i == 33:
                d.put(
                    "." + rel + ".Xa81bC",
                    b[:200],
                    "rsync's temporary file",
                    META,
                    0,
                    "hidden; the whole file is beside it",
                )


@troubled("suffixes-lie", "wrong suffix (compression)", "zip called .gz")
def _(d):
    for i in range(36):
        docs = d.docs(4, 12)
        j = jsonl(docs)
        why = "its bytes are not what its name says; read by its magic it is whole"
        if i in (3, 14):
            d.put(
                "a/%02d.jsonl" % i, gz(j), "gzip called .jsonl", [REFUSED, NAMED, TAKEN], len(docs), why, test="is gz"
            )
        elif i in (7, 25):
            d.put(
                "a/%02d.jsonl.gz" % i,
                j,
                "plain text called .gz",
                [REFUSED, NAMED, TAKEN],
                len(docs),
                why,
                test="not gz",
            )
        elif i == 18:
            d.put(
                "a/%02d.jsonl.zst" % i, gz(j), "gzip called .zst", [REFUSED, NAMED, TAKEN], len(docs), why, test="is gz"
            )
        elif i == 21:
            d.put(
                "a/%02d.json" % i,
                parquet(docs),
                "parquet called .json",
                [REFUSED, NAMED, TAKEN],
                len(docs),
                why,
                test="is parquet",
            )
        elif i in (29, 33):
            d.put(
                "a/%02d.jsonl.gz" % i,
                zip_bytes([("%02d.jsonl" % i, j)]),
                "zip called .gz",
                [REFUSED, NAMED],
                0,
                "a zip, and zips hold anything",
                test="is zip",
            )
        else:
            d.take("a/%02d.jsonl%s" % (i, ".gz" if i % 2 else ""), gz(j) if i % 2 else j, len(docs))


@troubled("hub-mirror-errors", "error pages saved as data", "empty parquet")
def _(d):
    for i in range(40):
        docs = d.docs(5, 15)
        rel = "data/part.%d.parquet" % i
        if i in (6, 22):
            d.put(
                rel,
                HTML_ERR.format(c=d.rng.choice(["403 Forbidden", "502 Bad Gateway"])).encode(),
                "html called .parquet",
                REFUSED,
                0,
                "an error page, not data",
                test="html",
            )
        elif i == 31:
            d.put(
                rel,
                b'{"error":"Repository is gated. You must be authenticated to access it."}',
                "json called .parquet",
                REFUSED,
                0,
                "an error message, not data",
                test="not parquet",
            )
        elif i == 35:
            d.put(
                rel, b"", "empty parquet", [REFUSED, NAMED], 0, "no bytes: not a parquet of no rows", test="not parquet"
            )
        else:
            d.take(rel, parquet(docs), len(docs), "parquet")
    docs = d.docs(5, 15)
    d.take("more/x0.jsonl.gz", gz(jsonl(docs)), len(docs))
    d.put(
        "more/x1.jsonl.gz",
        HTML_ERR.format(c="Sign in").encode(),
        "html called .jsonl.gz",
        REFUSED,
        0,
        "a login page",
        test="html",
    )
    d.put(
        "more/x2.txt",
        HTML_ERR.format(c="404 Not Found").encode(),
        "html error page called .txt",
        [REFUSED, NAMED],
        0,
        "an error page as a document",
        test="html",
    )
    d.txts(12, lambda i: "more/t%02d" % i)


@troubled("hub-cache-splits", "validation and test splits", "two revisions")
def _(d):
    files, held = [], []
    for s, n in (("train", 8), ("validation", 2), ("test", 2)):
        for i in range(n):
            docs = d.docs(5, 15)
            p = "data/%s-%05d-of-%05d.parquet" % (s, i, n)
            files.append((p, parquet(docs), len(docs)))
            if s != "train":
                held.append(p)
    commit, old = d.hexid(), d.hexid()
    files.append(("README.md", b"---\nlicense: mit\n---\n# stories\n", None))
    files.append((".gitattributes", GITATTR, None))
    base = hub(d, "opentales", "stories", files, commit, held)
    for p, b, n in files[:5]:
        d.link(
            base + "snapshots/%s/%s" % (old, p),
            "../../../blobs/" + sha(b),
            "link of an older revision",
            [LEFT, NAMED, REFUSED],
            0,
            "the same blob as in the newer revision",
            group=p,
        )
    b = parquet(d.docs(6))
    d.put(base + "blobs/" + sha(b), b, "hub blob of an older revision", META, 0, "only the older revision has it")
    d.link(
        base + "snapshots/%s/data/train-00005-of-00008.parquet" % old,
        "../../../blobs/" + sha(b),
        "link of an older revision",
        [REFUSED, NAMED, LEFT],
        0,
        "other bytes than refs/main's file of that name",
    )


@troubled("two-uploads-mixed", "mixed -of-N sets")
def _(d):
    rows = d.docs(160)
    for i in (0, 1, 3, 4, 6):
        d.put(
            "data/train-%05d-of-00008.parquet" % i,
            parquet(rows[i * 15 : (i + 1) * 15]),
            "leftover of an -of-8 set",
            REFUSED,
            0,
            "five of eight, from an upload that another replaced",
            group="-of-00008",
        )
    for i in range(6):
        r = rows[i * 26 : (i + 1) * 26]
        d.put(
            "data/train-%05d-of-00006.parquet" % i,
            parquet(r),
            "whole -of-6 set beside leftovers",
            [REFUSED, TAKEN],
            len(r),
            "a whole set, but many of its rows are in the other set too",
            group="-of-00006",
        )
    d.readme({"train": 156})
    d.meta(".gitattributes", GITATTR, "git attributes", "hidden")


@troubled("shards-of-eight-one-gone", "a shard of an -of-N set is missing")
def _(d):
    for s, n, gone in (("web", 8, {d.rng.randrange(1, 7)}), ("books", 32, set(d.rng.sample(range(31), 2)) | {31})):
        for i in range(n):
            docs = d.docs(5, 15)
            if i not in gone:
                d.put(
                    "%s/train-%05d-of-%05d.jsonl.zst" % (s, i, n),
                    zst(jsonl(docs)),
                    "shard of an incomplete set",
                    [REFUSED, NAMED],
                    0,
                    "whole itself, but of %d shards %d are not here" % (n, len(gone)),
                    group="%s-of-%05d" % (s, n),
                )
    for i in range(20):
        docs = d.docs(5, 15)
        d.take("news/train-%05d-of-00020.jsonl.zst" % i, zst(jsonl(docs)), len(docs), why="a whole -of-20 set")


@troubled("archive-with-sha256sums", "checksums that do not match")
def _(d):
    for i in range(70):
        docs = d.docs(4, 12)
        rel, b = "part_%03d.jsonl.gz" % i, gz(jsonl(docs))
        if i in (13, 47):
            d.put(
                rel,
                b,
                "checksum differs",
                REFUSED,
                0,
                "readable, but not the bytes that SHA256SUMS promises",
                test="sum differs",
            )
        else:
            d.take(rel, b, len(docs))
    d.sums("SHA256SUMS", wrong=("part_013.jsonl.gz", "part_047.jsonl.gz"))


@troubled("texts-with-md5", "an md5 that does not match", "a listed file that is missing")
def _(d):
    for i in range(60):
        rel = "story_%03d.txt" % i
        b = (d.t.text(lo=5, hi=20) + "\n").encode()
        if i == 21:
            d.put(rel, b, "checksum differs", REFUSED, 0, "not the bytes that its .md5 promises", test="sum differs")
            d.meta(rel + ".md5", "%s *%s\n" % (md5(b + b" "), rel), "checksum", "does not match")
        elif i == 40:
            d.put(
                rel + ".md5",
                ("%s *%s\n" % (md5(b), rel)).encode(),
                "checksum without its file",
                [REFUSED, NAMED],
                0,
                "the file that it is about is missing",
            )
        elif i == 52:
            d.put(rel, b, "file without a checksum", [NAMED, TAKEN, REFUSED], 1, "the only one that nobody signed")
        else:
            d.put(rel, b, "text file, one document", TAKEN, 1, "its md5 matches")
            d.meta(rel + ".md5", "%s *%s\n" % (md5(b), rel), "checksum", "matches")


@troubled("articles-with-eval-folders", "held-out folders")
def _(d):
    d.txts(150, lambda i: "articles/%s" % slug(d, i))
    for f, n in (("eval", 35), ("dev", 35), ("heldout", 30)):
        for i in range(n):
            d.put(
                "%s/%s.txt" % (f, slug(d, i)),
                d.t.text().encode(),
                "held out by its folder",
                REFUSED,
                0,
                "in %s/, and nothing was filtered" % f,
                group=f,
            )


@troubled("splits-by-file-name", "held-out files by name")
def _(d):
    for i in range(40):
        docs = d.docs(4, 12)
        d.take("chunk_%02d.jsonl" % i, jsonl(docs), len(docs))
    for n in ("latest", "devices", "contest"):
        docs = d.docs(4, 12)
        d.take(n + ".jsonl", jsonl(docs), len(docs), why="no split's name, only letters of one")
    for n, b in (
        ("valid.jsonl", jsonl(d.docs(6))),
        ("test_split.parquet", parquet(d.docs(6))),
        ("holdout.jsonl.gz", gz(jsonl(d.docs(6)))),
        ("dev-00000-of-00001.parquet", parquet(d.docs(6))),
        ("validation.csv", csv_bytes(d.docs(6))),
        ("chunk_test.jsonl", jsonl(d.docs(6))),
    ):
        d.put(n, b, "held out by its name", REFUSED, 0, "its name says another split")


@troubled("card-names-the-test-files", "held-out files by the publisher's card")
def _(d):
    names = ["shards/part_%03d.parquet" % i for i in range(40)]
    held = {names[i]: s for i, s in ((7, "test"), (19, "test"), (33, "validation"), (38, "validation"))}
    for n in names:
        docs = d.docs(5, 12)
        if n in held:
            d.put(n, parquet(docs), "held out by the card", REFUSED, 0, "README.md lists it under %s" % held[n])
        else:
            d.take(n, parquet(docs), len(docs), "parquet")
    d.readme(
        data_files=[("train", [n for n in names if n not in held])]
        + [(s, [n for n in names if held.get(n) == s]) for s in ("validation", "test")]
    )


@troubled("lists-of-heldout-files", "held-out files by the publisher's lists")
def _(d):
    held = set(d.rng.sample(range(50), 5))
    js = {"train": [], "test": []}
    for i in range(50):
        docs = d.docs(4, 12)
        rel = "corpus/%05d.jsonl.gz" % i
        js["test" if i in held else "train"].append(rel)
        if i in held:
            d.put(rel, gz(jsonl(docs)), "held out by a list", REFUSED, 0, "splits.json lists it under test")
        else:
            d.take(rel, gz(jsonl(docs)), len(docs))
    d.meta("splits.json", js, "publisher's list of splits", "a list of files")
    h2 = set(d.rng.sample(range(40), 4))
    for i in range(40):
        rel = "texts/doc_%03d.txt" % i
        if i in h2:
            d.put(rel, d.t.text().encode(), "held out by a list", REFUSED, 0, "heldout_files.txt lists it")
        else:
            d.take(rel, d.t.text().encode(), 1, "text file, one document")
    d.meta(
        "heldout_files.txt",
        "# never train on these\n" + "".join("texts/doc_%03d.txt\n" % i for i in sorted(h2)),
        "publisher's list of held-out files",
        "a list of files, though it is a .txt",
    )


@troubled("copies-of-copies", "the same content under two names", "hard links")
def _(d):
    for i in range(40):
        docs = d.docs(4, 12)
        rel, b = "crawl_%02d.jsonl" % i, jsonl(docs)
        twin = {
            3: "crawl_03 (1).jsonl",
            9: "Copy of crawl_09.jsonl",
            15: "mirror/crawl_15.jsonl",
            22: "crawl_22 - Copy.jsonl",
            27: "zz_unrelated_name.jsonl",
        }.get(i)
        hard = {30: "by-date/2021/a.jsonl", 31: "by-date/2021/b.jsonl"}.get(i)
        if twin or hard:
            d.put(
                rel, b, "one of two copies", [TAKEN, NAMED, REFUSED], len(docs), "also at " + (twin or hard), group=rel
            )
            if twin:
                d.put(twin, b, "second copy", [NAMED, REFUSED, LEFT], 0, "the same bytes as " + rel, group=rel)
            else:
                d.hard(hard, rel, "hard link", [NAMED, REFUSED, LEFT], "the same file as " + rel, group=rel)
        else:
            d.take(rel, b, len(docs))
    for i in range(10):
        docs = d.docs(4, 12)
        older = docs[:-2]
        d.put(
            "data_old/set_%d.jsonl" % i,
            jsonl(older),
            "older copy in a folder called old",
            [NAMED, REFUSED],
            0,
            "nearly the rows of data/set_%d.jsonl" % i,
            group="set_%d" % i,
        )
        d.put(
            "data/set_%d.jsonl" % i,
            jsonl(docs),
            "newer copy",
            [TAKEN, NAMED, REFUSED],
            len(docs),
            "data_old/ has an older copy",
            group="set_%d" % i,
        )


@troubled("recompressed-half-way", "the same jsonl as gz, zst and plain")
def _(d):
    for i in range(50):
        docs = d.docs(4, 12)
        stem, j = "books_%03d.jsonl" % i, jsonl(docs)
        if i % 7 == 2:
            d.put(
                stem + ".gz",
                gz(j),
                "one of two compressions",
                [TAKEN, NAMED, REFUSED],
                len(docs),
                "also as .zst",
                group=stem,
            )
            d.put(
                stem + ".zst", zst(j), "recompressed copy", [REFUSED, NAMED], 0, "the same jsonl as the .gz", group=stem
            )
        elif i % 7 == 5:
            d.put(
                stem + ".gz",
                gz(j),
                "compressed copy",
                [REFUSED, NAMED],
                0,
                "the same jsonl as the plain file",
                group=stem,
            )
            d.put(stem, j, "plain beside compressed", [TAKEN, NAMED, REFUSED], len(docs), "also as .gz", group=stem)
        else:
            d.take(stem + ".gz", gz(j), len(docs))


@troubled("cloned-without-lfs", "LFS pointers in place of data")
def _(d):
    for i in range(40):
        docs = d.docs(5, 12)
        rel, b = "data/train-%05d-of-00040.parquet" % i, parquet(docs)
        if i % 4 == 1:
            d.put(
                rel,
                pointer(b),
                "LFS pointer called .parquet",
                REFUSED,
                0,
                "three lines of text in place of the data",
                test="pointer",
            )
        else:
            d.take(rel, b, len(docs), "parquet")
    b = jsonl(d.docs(5))
    for n in ("extra.jsonl", "extra_notes.txt"):
        d.put(
            n,
            pointer(b),
            "LFS pointer called " + os.path.splitext(n)[1],
            REFUSED,
            0,
            "a pointer, not data",
            test="pointer",
        )
    d.meta(".gitattributes", GITATTR, "git attributes", "hidden")
    d.meta(".git/HEAD", "ref: refs/heads/main\n", "git", "hidden")
    d.readme()


@troubled("spark-job-died", "no _SUCCESS, _temporary left", "a part that was never committed")
def _(d):
    u = uuid.UUID(int=d.rng.getrandbits(128))
    for i in range(15):
        b = parquet(d.docs(4, 10))
        name = "part-%05d-%s-c000.snappy.parquet" % (i, u)
        d.put(
            "run1/" + name,
            b,
            "part of a job without _SUCCESS",
            [REFUSED, NAMED],
            0,
            "the job did not end; parts may be missing",
            group="run1",
        )
        d.meta("run1/.%s.crc" % name, hadoop_crc(b), "hadoop crc", "hidden")
    for i in range(15, 24):
        d.put(
            "run1/_temporary/0/_temporary/attempt_202403011200_0001_m_%06d_0/part-%05d-%s-c000.snappy.parquet"
            % (i, i, u),
            parquet(d.docs(4, 10))[:-30],
            "task attempt, torn",
            META,
            0,
            "in _temporary, never committed",
            test="not parquet",
        )
    tid, bad, names = str(d.rng.randrange(10**18, 9 * 10**18)), str(d.rng.randrange(10**18, 9 * 10**18)), []
    for i in range(20):
        t = bad if i >= 18 else tid
        docs = d.docs(4, 10)
        name = "part-%05d-tid-%s-c000.snappy.parquet" % (i, t)
        if t == bad:
            d.put(
                "run2/" + name,
                parquet(docs),
                "uncommitted part",
                [REFUSED, NAMED],
                0,
                "no _committed_ file lists it",
                group="run2",
            )
        else:
            names.append(name)
            d.take("run2/" + name, parquet(docs), len(docs), "committed part")
    d.meta("run2/_started_" + tid, b"", "spark marker")
    d.meta("run2/_started_" + bad, b"", "spark marker", "started, never committed")
    d.meta("run2/_committed_" + tid, {"added": names, "removed": []}, "spark marker")
    d.meta("run2/_SUCCESS", b"", "spark marker")


@troubled("spark-edited-after", "a .crc that does not match", "torn .pq")
def _(d):
    spark_parts(d, "out/", 30, bad_crc=(8, 19))
    for i in range(20):
        docs = d.docs(5, 12)
        rel, b = "late/extra_%02d.pq" % i, parquet(docs)
        if i == 13:
            d.put(rel, b[: len(b) * 2 // 3], "torn parquet", REFUSED, 0, "no footer", test="not parquet")
        else:
            d.take(rel, b, len(docs), "parquet called .pq")


@troubled("shared-disk-permissions", "files and a folder that cannot be read", "fifos and sockets")
def _(d):
    can = [TAKEN] if ROOT else []
    for i in range(40):
        docs = d.docs(4, 12)
        rel, b = "web_%02d.jsonl" % i, jsonl(docs)
        if i in (5, 26):
            d.put(
                rel,
                b,
                "another owner's file, mode 000",
                [REFUSED, NAMED] + can,
                len(docs),
                "it cannot be read (root can)",
                test="mode 000",
            )
        else:
            d.take(rel, b, len(docs))
    for i in range(4):
        docs = d.docs(4, 12)
        d.put(
            "private/web_%02d.jsonl" % (40 + i),
            jsonl(docs),
            "file in a folder of mode 000",
            [REFUSED, NAMED] + can,
            len(docs),
            "its folder cannot be listed (root can); silently walking past it loses data",
            group="private",
        )
    d.late.append(("private", "mode 000"))
    d.special(
        "stream.jsonl", stat.S_IFIFO, "fifo called .jsonl", [NAMED, LEFT, REFUSED], "opening it would wait for ever"
    )
    d.special("run/prep.sock", stat.S_IFSOCK, "socket", [LEFT, NAMED, REFUSED], "no file")
    d.special("run/pipe", stat.S_IFIFO, "fifo", [LEFT, NAMED, REFUSED], "opening it would wait for ever")


@troubled("links-every-way", "broken links", "cycles, aliases, and a name with a line break")
def _(d):
    for i in range(36):
        docs = d.docs(4, 12)
        d.take("2024-05/s_%02d.jsonl" % i, jsonl(docs), len(docs))
    for i in (36, 37):
        d.link(
            "2024-05/s_%02d.jsonl" % i,
            "/mnt/bigdisk-%s/s_%02d.jsonl" % (d.hexid(8), i),
            "broken link in a row of shards",
            [REFUSED, NAMED],
            0,
            "a shard that is not here",
        )
    d.link("2024-05/alias.jsonl", "s_00.jsonl", "link to a file here", [NAMED, LEFT, REFUSED], 0, "s_00.jsonl again")
    d.link("current", "2024-05", "link to a folder here", [LEFT, NAMED, REFUSED], 0, "the same files again")
    d.link("2024-05/loop", ".", "link to its own folder", [NAMED, LEFT, REFUSED], 0, "a cycle")
    d.link("2024-05/up", "..", "link to the folder above", [NAMED, LEFT, REFUSED], 0, "a cycle")
    d.link("ping.jsonl", "pong.jsonl", "link to a link to itself", [NAMED, REFUSED], 0, "resolves to nothing")
    d.link("pong.jsonl", "ping.jsonl", "link to a link to itself", [NAMED, REFUSED], 0, "resolves to nothing")
    d.link("notes", "/nonexistent/notes", "broken link", [NAMED, LEFT, REFUSED], 0, "no shard's name")
    docs = d.docs(4, 12)
    d.put(
        "2024-05/two\nlines.jsonl",
        jsonl(docs),
        "line break in its name",
        [TAKEN, NAMED, REFUSED],
        len(docs),
        "whole; lists of one name a line cannot hold it",
    )


@troubled("datatrove-timeout", "ranks without completions", "torn gzip")
def _(d):
    r = d.rng.sample(range(40), 5)
    datatrove(d, 40, torn=r[:2], absent=r[2:3], unfinished=r[3:])


@troubled("saved-to-disk-cached", "map caches beside the data", "a file of state.json is missing")
def _(d):
    save_to_disk(d, "", 12, missing=(7,))
    for i in range(5):
        d.put(
            "cache-%s.arrow" % d.hexid(16),
            arrow_stream(d.docs(10, 20)),
            "datasets' map cache",
            [NAMED, LEFT, REFUSED],
            0,
            "state.json does not list it; the same rows, worked over",
        )
    d.put(
        "tmp%s" % d.hexid(8),
        arrow_stream(d.docs(10))[:700],
        "temporary file of map",
        [NAMED, LEFT, REFUSED],
        0,
        "left by a killed job",
    )


@troubled("tars-of-two-kinds", "a torn tar", "test members inside a tar.gz")
def _(d):
    for i in range(14):
        ms = [("news_%02d/%03d.txt" % (i, j), d.t.text().encode()) for j in range(d.rng.randint(8, 20))]
        rel, b = "news_%02d.tar" % i, tar(ms)
        if i == 6:
            with tarfile.open(fileobj=io.BytesIO(b)) as t:
                m = t.getmembers()[len(ms) // 2]
            d.put(
                rel,
                b[: m.offset_data + m.size // 2],
                "torn tar",
                REFUSED,
                0,
                "cut in a member, no end blocks",
                test="torn tar",
            )
        else:
            d.take(rel, b, len(ms), "tar of txt", "one document a member")
    for i in range(8):
        ms = [("train/%03d.txt" % j, d.t.text().encode()) for j in range(10)]
        if i in (2, 5):
            ms += [("test/%03d.txt" % j, d.t.text().encode()) for j in range(4)]
            d.put(
                "bundle_%d.tar.gz" % i,
                tar(ms, "w:gz"),
                "tar.gz with test members",
                REFUSED,
                0,
                "train/ and test/ in one archive",
                test="test members",
            )
        else:
            d.take("bundle_%d.tar.gz" % i, tar(ms, "w:gz"), 10, "tar.gz of txt")


@troubled("dolma-like-attributes", "files of attributes and embeddings without text")
def _(d):
    for i in range(40):
        docs = d.docs(4, 12)
        d.take("documents/part-%03d.jsonl.gz" % i, gz(jsonl(docs)), len(docs))
        at = [{"id": x["id"], "attributes": {"toxicity": [[0, 10, round(d.rng.random(), 3)]]}} for x in docs]
        d.put(
            "attributes/toxicity/part-%03d.jsonl.gz" % i,
            gz(jsonl(at)),
            "attributes, no text",
            [NAMED, REFUSED, LEFT],
            0,
            "scores for documents/, no text column",
            group="attributes",
        )
        if i < 10:
            o = io.BytesIO()
            feather.write_feather(
                pa.table({"id": [x["id"] for x in docs], "vec": [[d.rng.random()] * 8 for _ in docs]}), o
            )
            d.put(
                "embeddings_%03d.feather" % i,
                o.getvalue(),
                "embeddings, no text",
                [NAMED, REFUSED, LEFT],
                0,
                "vectors",
                group="embeddings",
            )


@troubled("encodings-and-binaries", "text that is not utf-8", "binary files called .txt")
def _(d):
    d.txts(200, lambda i: "scans/page_%04d" % i)
    for i in range(3):
        d.put(
            "scans/utf16_%d.txt" % i,
            d.t.text("fr").encode("utf-16"),
            "utf-16 with a byte order mark",
            [NAMED, REFUSED, TAKEN],
            1,
            "readable if decoded as what its mark says, never as utf-8",
            test="not utf8",
        )
        d.put(
            "scans/latin1_%d.txt" % i,
            ("élève, à Noël: " + d.t.text("es")).encode("latin-1"),
            "latin-1",
            [REFUSED, NAMED],
            0,
            "not utf-8, and nothing says what it is",
            test="not utf8",
        )
    d.put(
        "scans/page_0200.txt",
        PDF,
        "pdf called .txt",
        [REFUSED, NAMED],
        0,
        "a pdf's bytes are no document",
        test="not utf8",
    )
    d.put("scans/page_0201.txt", JPEG, "jpeg called .txt", [REFUSED, NAMED], 0, "a picture", test="not utf8")
    d.put("scans/page_0202.txt", b"", "empty txt", [NAMED, LEFT, TAKEN, REFUSED], 0, "an empty document is none")
    d.put(
        "scans/" + os.fsdecode(b"caf\xe9.txt"),
        d.t.text().encode(),
        "a name that is not utf-8",
        [TAKEN, NAMED, REFUSED],
        1,
        "utf-8 text under a latin-1 name",
    )


@troubled("wiki-extract-no-suffix", "files without a suffix", "documents of kinds no text tool reads")
def _(d):
    for f in ("AA", "AB", "AC"):
        for i in range(20):
            docs = d.docs(3, 8)
            d.put(
                "text/%s/wiki_%02d" % (f, i),
                jsonl(docs),
                "json lines without a suffix",
                [TAKEN, NAMED, REFUSED],
                len(docs),
                "wikiextractor's names; silence would lose it",
            )
    for i in range(15):
        docs = d.docs(3, 8)
        d.take("extra/wiki_%02d.jsonl" % i, jsonl(docs), len(docs))
    d.put(
        "extra/wiki_15.pkl",
        pickle.dumps(d.docs(5)),
        "pickle in a row of jsonl",
        [REFUSED, NAMED],
        0,
        "data that nothing else holds, in a form nobody should load",
    )
    for n, b in (
        ("report.pdf", PDF),
        ("minutes.docx", zip_bytes([("word/document.xml", b"<w/>")])),
        ("novel.epub", zip_bytes([("mimetype", b"application/epub+zip")])),
        ("posts.sqlite", b"SQLite format 3\0" + b"\0" * 500),
        ("dump.sql", b"INSERT INTO posts VALUES (1,'text');\n"),
        ("more.zip", zip_bytes([("a.txt", d.t.text().encode())])),
        ("page.html", b"<html><body><p>" + d.t.text().encode() + b"</p></body></html>"),
    ):
        d.put(
            "extra/" + n,
            b,
            "%s, text inside" % n.rsplit(".")[-1],
            [NAMED, REFUSED],
            0,
            "holds text perhaps; must not vanish silently",
        )


def make_tree(out, seed=0, only=()):
    """Write OUT/tree; return the data sets with their lines. `only`: names of data sets."""
    DS.all.clear()
    root = os.path.join(out, "tree")
    os.makedirs(root)
    for folder, troubles, col, f in CLEAN + TROUBLED:
        if not only or folder in only:
            f(DS(root, seed, folder, troubles, col))
    for ds in DS.all:  # at last, what would stand in our own way
        for rel, test in ds.late:
            if test == "mode 000":
                os.chmod(ds.full(rel), 0)
    return list(DS.all)
