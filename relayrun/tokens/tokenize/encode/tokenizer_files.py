"""Files of tokenizers: found on the hub, converted, written for bytes, and cached on this machine.

The hub is asked once and with a short limit, before transformers is imported: transformers retries for a minute if the
hub does not answer, even for a name that is a mistyped path.

The user's cache keeps facts about tokenizers and proofs of engines. The cache key is a hash of everything that the
value depends on: its input, this package's code, the installed libraries, Python's Unicode tables, and the processor.

The byte tokenizer needs no training: every byte of a text is a token, whose id is the byte. Its ids are those of genome
models (ASCII, with EOS 0, PAD 1, BOS 2 and UNK 3). Bytes 0 to 3 become UNK; text does not hold them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from relayrun.errors import InputError, did_you_mean_path, refuse_urls
from relayrun.files import write_atomic, write_json
from relayrun.leftovers import rename_no_replace
from relayrun.publishing import MADE_RECORD, InputFiles, output_lock, published_folder, refuse_existing, work_folder
from relayrun.tokens.stores.urls import first_line

BYTE_SPECIAL_TOKENS = {"eos_token": "<EOS>", "pad_token": "<PAD>", "bos_token": "<BOS>", "unk_token": "<UNK>"}
"""Special tokens by their names in transformers, in the order of their ids."""


def write_byte_tokenizer(output: Path) -> Path:
    """Write the tokenizer as a folder that `transformers.AutoTokenizer.from_pretrained` opens; return `output`. The
    tokenizer adds nothing to a text. Raises InputError if `output` holds a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids = {token: number for number, token in enumerate(BYTE_SPECIAL_TOKENS.values())}
    known = {letter: byte for byte, letter in enumerate(byte_letters()) if byte >= len(ids)}
    tokenizer = Tokenizer(models.BPE(ids | known, [], unk_token=BYTE_SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*ids])
    with new_tokenizer_folder(output, InputFiles((), BYTE_SPECIAL_TOKENS)) as made:
        if made is not None:
            write_tokenizer_folder(made, tokenizer, BYTE_SPECIAL_TOKENS)
    return output


def write_tokenizer_folder(output: Path, tokenizer: Any, special_tokens: Mapping[str, str]) -> None:
    """Write tokenizer.json and the two settings files of transformers, with the special tokens by their names there."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special_tokens}
    write_json(output / "special_tokens_map.json", special_tokens)
    write_json(output / "tokenizer_config.json", settings)
    write_atomic(output / "tokenizer.json", tokenizer.to_str(pretty=True))


@contextlib.contextmanager
def new_tokenizer_folder(output: Path, read: InputFiles) -> Iterator[Path | None]:
    """Yield a folder to write a tokenizer into, whose files appear in `output` afterwards, tokenizer.json last; None if
    a tokenizer of the same inputs is there. Raises InputError if there is another one, or one is being made."""
    refuse_urls(output)
    if (output / "tokenizer.json").exists():
        if not read.was_made(output):
            raise InputError("there is a tokenizer", where=output, hint="move it away, or choose another folder")
        yield None
    elif not output.is_dir():
        with published_folder(output, read=read) as made:
            yield made
    else:  # it may hold other files
        with output_lock(Path(os.path.realpath(output))), work_folder(output) as folder:
            yield folder
            read.check()
            read.write_record(folder)
            for path in sorted(folder.iterdir(), key=lambda path: path.name == "tokenizer.json"):
                _add_new(path, output / path.name)


def _add_new(made: Path, final: Path) -> None:
    """Rename a file. Raises InputError if there is another one; the same bytes, and a record, a killed command left."""
    try:
        (os.replace if final.name == MADE_RECORD else rename_no_replace)(made, final)
    except FileExistsError:
        if made.read_bytes() != final.read_bytes():
            refuse_existing(final)


def byte_letters() -> list[str]:
    """Return the letter for each byte in a byte-level vocabulary: the character itself if visible (GPT-2's table)."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
"""First line of a tiktoken file: a token in base64, and its rank."""

_CONVERTIBLE_FILES = (
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)

_SAVE_COMMAND = (
    'python -c \'from transformers import AutoTokenizer as A; A.from_pretrained("IN").save_pretrained("OUT")\''
)


def check_convertible(folder: Path) -> None:
    """Raise InputError with the way out, unless transformers can make a tokenizer.json from the files in `folder`."""
    if (tekken := folder / "tekken.json").is_file():
        refuse_unconvertible(tekken)
    if not (folder / "tokenizer_config.json").is_file() and not (folder / "config.json").is_file():
        found = [name for name in _CONVERTIBLE_FILES if (folder / name).is_file()]
        alone = f"; {', '.join(found)} alone do not say how to split" if found else ""
        hint = "give the folder with tokenizer_config.json, too: from it transformers converts the tokenizer"
        raise InputError(f"there is no tokenizer.json here{alone}", where=folder, hint=hint)
    for file in sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")]):
        refuse_unconvertible(file, in_folder=True)


def refuse_unconvertible(file: Path, *, in_folder: bool = False) -> None:
    """Raise InputError with the way out for a tiktoken or SentencePiece file that cannot be converted exactly here. A
    SentencePiece model in a folder with its configuration can be converted if its package is installed."""
    if file.name == "tekken.json":
        way = "transformers.integrations.mistral.convert_tekken_tokenizer(...).backend_tokenizer.save(...)"
        hint = f"convert it with {way}, or take a tokenizer.json of the same model"
        raise InputError("this is a tokenizer of Mistral (tekken), not a tokenizer.json", where=file, hint=hint)
    with open(file, "rb") as opened:
        first = opened.readline(1000)
    if _TIKTOKEN.fullmatch(first):
        # transformers would apply the pattern of Llama 3 to every such file
        raise InputError(
            "this is a tiktoken file, which does not say how text is split into words; there is no tokenizer.json",
            where=file,
            hint="convert it with the pattern of its model, transformers.convert_slow_tokenizer.TikTokenConverter("
            "vocab_file=..., pattern=...).converted().save(...), or take a tokenizer.json of the same model",
        )
    if file.suffix == ".model" and not in_folder:
        hint = "give the folder that holds it and tokenizer_config.json"
        raise InputError("this is a model of SentencePiece, not a tokenizer.json", where=file, hint=hint)
    if file.suffix == ".model" and importlib.util.find_spec("sentencepiece") is None:
        words = "there is no tokenizer.json, and to convert this model takes the package sentencepiece"
        hint = f"`pip install sentencepiece`, or convert it where it is installed: {_SAVE_COMMAND}"
        raise InputError(words, where=file, hint=hint)


USUAL_HINT = "give a tokenizer.json, a folder that holds one, or a name on the Hugging Face hub"
HUB_TIMEOUT_SECONDS = 5.0
"""Time limit of the hub's answer."""

_HUB_NAME_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_NAME = re.compile(rf"(?:{_HUB_NAME_PART}/)?{_HUB_NAME_PART}")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", *_CONVERTIBLE_FILES)
"""A copy of a tokenizer on this machine has at least one of these files."""


def is_hub_name(text: str) -> bool:
    """True for a valid name on the hub: `gpt2`, `org/name`."""
    return _HUB_NAME.fullmatch(text) is not None and ".." not in text and "--" not in text and len(text) <= 96


def check_hub(name: str, cache_dir: str | None) -> bool:
    """Return whether the hub is away, and this machine has a copy. Raises InputError if neither has the tokenizer."""
    from huggingface_hub import HfApi, constants, get_token, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    copies = cache_dir or constants.HF_HUB_CACHE
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_SECONDS)
        return False
    except OfflineModeIsEnabled:
        why = f"the hub is switched off (HF_HUB_OFFLINE), and {copies} has no copy"
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code not in (401, 403, 404):
            return False  # the hub is busy: transformers retries
        shown = "" if get_token() is not None else ", or shows it to nobody without a token (HF_TOKEN)"
        why = f"{constants.ENDPOINT} has none of this name{shown}"
    except Exception as error:  # of httpx or requests, by the version of huggingface_hub
        why = f"{constants.ENDPOINT} does not answer ({first_line(error)}), and {copies} has no copy"
    if any(isinstance(try_to_load_from_cache(name, file, cache_dir=cache_dir), str) for file in _TOKENIZER_FILES):
        return True
    hint = "; ".join(filter(None, [did_you_mean_path(name), USUAL_HINT]))
    raise InputError(f"no such tokenizer: there is no such file or folder, and {why}", where=name, hint=hint)


def fetch_tokenizer_json(name: str, cache_dir: str | None, *, only_here: bool) -> Path | None:
    """Return the local folder of a hub tokenizer's tokenizer.json and configuration; None without a tokenizer.json, or
    if it cannot be fetched: transformers says why."""
    from huggingface_hub import hf_hub_download

    found: list[str] = []
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        try:
            found.append(hf_hub_download(name, file, cache_dir=cache_dir, local_files_only=only_here))
        except Exception:  # of the hub, of the network or of the disk
            if not found:
                return None
    return Path(found[0]).parent


_CODE_FOLDER = Path(__file__).resolve().parents[2]


def cache_key(what: str, parts: Iterable[bytes], packages: Iterable[str]) -> str:
    """Return the key of a value that depends on `parts` and on these packages, besides this code and this machine."""
    known = hashlib.sha256()
    for part in (what.encode(), _code_and_machine(), *map(_package_record, sorted(packages)), *parts):
        known.update(len(part).to_bytes(8, "little") + part)
    return known.hexdigest()


@functools.cache
def _code_and_machine() -> bytes:
    """Return a hash of the code of tokenization, Python's tables and the processor."""
    known = hashlib.sha256()
    for file in sorted(_CODE_FOLDER.rglob("*.py")):
        known.update(file.relative_to(_CODE_FOLDER).as_posix().encode() + b"\0" + file.read_bytes())
    processor = f"{unicodedata.unidata_version} {platform.machine()} {platform.python_version()}"
    with contextlib.suppress(OSError):  # Linux only
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
        processor += "".join(line for line in lines if line.split("\t")[0] in ("model name", "flags", "Features"))
    return known.digest() + processor.encode()


@functools.cache
def _package_record(package: str) -> bytes:
    """Return the installed version, and the hashes of its files as its record lists them."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return b"none"
    return f"{found.version} {found.read_text('RECORD')}".encode()
