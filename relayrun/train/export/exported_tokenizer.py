"""The tokenizer of an exported folder: the files of the run's tokenizer, and those that only the original has."""

from __future__ import annotations

from filecmp import cmp
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import Sequence, TemplateProcessing

from relayrun.errors import InputError
from relayrun.files import read_json, write_json
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.train.export.original import Original, carried_files, copy_files
from relayrun.train.export.source_and_target import CheckpointSource


def write_tokenizer(source: CheckpointSource, folder: Path, original: Original) -> int | None:
    """Write the run's tokenizer for transformers. Return the token that begins a text, None without one."""
    given = Path(source.config.data.tokenizer)
    beside = given.parent if given.is_file() and given.name == "tokenizer.json" else given
    if beside.is_dir():
        copy_files(beside, carried_files(beside), folder)
    elif given.is_file():
        copy_files(given.parent, [given.name], folder)
        (folder / given.name).rename(folder / "tokenizer.json")
    else:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source.config.data.tokenizer).save_pretrained(folder)
    _add_files_of_original(source, folder, original)
    file, eod = folder / "tokenizer.json", source.manifest.eod
    if file.exists() and (definition := read_json(file)).get("model", {}).get("dropout"):  # no training text had it
        definition["model"]["dropout"] = None
        write_json(file, definition)
    if not (folder / "tokenizer_config.json").exists():
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": None if eod is None else source.tokenizer.tokenizer.id_to_token(eod),
        }
        write_json(folder / "tokenizer_config.json", settings)
    return _frame_texts(source, folder, original)


def _add_files_of_original(source: CheckpointSource, folder: Path, original: Original) -> None:
    names = [] if original.folder is None else carried_files(original.folder, links=False)
    if original.folder is None or not names:
        return
    try:
        options = TokenizeOptions(tokenizer=str(original.folder), append_eod="no")
        original.same_tokenizer = load_tokenizer(options).ids_fingerprint == source.tokenizer.ids_fingerprint
    except InputError:
        original.same_tokenizer = False
    changed = [
        name
        for name in names
        if (folder / name).exists() and not cmp(folder / name, original.folder / name, shallow=False)
    ]
    if original.same_tokenizer:
        copy_files(original.folder, [name for name in names if not (folder / name).exists()], folder)
    if changed or not original.same_tokenizer:
        why = "as in data.tokenizer" if original.same_tokenizer else "the tokenizer is another one"
        original.differences.append(f"{why}, not as in the original: {', '.join(changed or names)}")


def _frame_texts(source: CheckpointSource, folder: Path, original: Original) -> int | None:
    """Let the tokenizer begin a text as the run's documents begin. Return the token that begins a text."""
    try:
        bos = load_tokenizer(TokenizeOptions(tokenizer=str(folder), append_eod="no", bos=True)).bos_id
    except InputError:  # it has no such token
        bos = None
    cuts = {cut.bos for cut in source.config.data.cut_by_document.values() if cut.bos is not None}
    bos = cuts.pop() if len(cuts) == 1 else bos
    if bos is None or not (folder / "tokenizer.json").exists():
        return bos
    definition, path = Tokenizer.from_file(str(folder / "tokenizer.json")), folder / "tokenizer_config.json"
    begins, token = source.begins_with(bos), definition.id_to_token(bos)
    if token is None:
        return None
    framed = definition.encode("").tokens
    added = framed[:1] == [token]
    if begins and not added:
        if framed:
            words = f"the tokenizer frames a text by {' '.join(framed)}; the run's documents begin with {token}"
            original.differences.append(words)
            return bos
        single, pair = f"{token}:0 $A:0", f"{token}:0 $A:0 {token}:1 $B:1"
        parts = [definition.post_processor, TemplateProcessing(single, pair, [(token, bos)])]
        definition.post_processor = Sequence([part for part in parts if part is not None])
        definition.save(str(folder / "tokenizer.json"))
    if begins:
        write_json(path, read_json(path) | {"bos_token": token, "add_bos_token": True})
    elif begins is False and added:
        original.differences.append(f"the tokenizer begins a text with {token}; no document of the run begins so")
    return bos
