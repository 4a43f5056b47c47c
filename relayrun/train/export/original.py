"""The original of a model: the Hugging Face folder that its training began with, without the weights.

    CKPT/original/    of `relayrun import`     RUN/original/    a copy, of the run's first submit

It has config.json, generation_config.json and the files of the tokenizer. An export takes over what training does not
change, and lists the rest. No code in such a folder is run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.config.compose import yaml_file
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError
from relayrun.files import leads_out, read_json
from relayrun.leftovers import temporary_name

ORIGINAL_NAME = "original"
CONFIG_NAMES = ("config.json", "generation_config.json")
_TABLES: Mapping[str, list[str]] = yaml_file.read_yaml(Path(__file__).with_suffix(".yaml")).values
_QUOTED = re.compile(r"""["'](?:[\w./-]+--)?([\w./-]+)["']""")
_IMPORTED = re.compile(r"^\s*(?:from\s+\.(\w+)\s+import|from\s+\.\s+import\s+(\w+))", re.M)


def carried_files(folder: Path, *, links: bool = True) -> list[str]:
    """Return the files of the tokenizer in a folder of Hugging Face, and of its code, by relative name: files with
    usual names, and files that its configs or its code name (`auto_map`, file names, relative imports). `links`: follow
    symbolic links, which a cache of the hub consists of."""

    def is_there(name: str) -> bool:
        path = folder / name
        weights = name.endswith(tuple(_TABLES["weights"]))
        return not (leads_out(name) or weights) and path.is_file() and (links or _is_inside(folder, name))

    found = {str(path.relative_to(folder)) for pattern in _TABLES["tokenizer"] for path in folder.glob(pattern)}
    todo = [name for name in ("tokenizer_config.json", *CONFIG_NAMES) if is_there(name)]
    while todo:
        text = (folder / todo.pop()).read_text(encoding="utf-8", errors="replace")
        named = {each for pair in _IMPORTED.findall(text) for each in pair if each}
        named |= {each.partition(".")[0] for each in _QUOTED.findall(text)}
        names = {*_QUOTED.findall(text), *(f"{each}.py" for each in named)}
        new = {name for name in names - found if is_there(name)}
        todo += [name for name in new if name.endswith(".py")]
        found |= new
    return sorted(name for name in found if name not in CONFIG_NAMES and is_there(name))


def _is_inside(folder: Path, name: str) -> bool:
    """True if no symbolic link leads to a file of this folder: another user may have written it."""
    return (folder / name).resolve() == folder.parent.resolve() / folder.name / name


def copy_files(folder: Path, names: list[str], target: Path) -> None:
    """Copy files of a folder by relative name."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)


def keep_original(folder: Path, target: Path, *, links: bool = True) -> None:
    """Copy config and tokenizer of a Hugging Face folder into the new folder `target`."""
    there = [name for name in CONFIG_NAMES if (folder / name).is_file() and (links or _is_inside(folder, name))]
    if names := [*there, *carried_files(folder, links=links)]:
        copy_files(folder, names, made := temporary_name(target))
        made.rename(target)


def original_of_run(run: Run, generations: int = 16) -> Path | None:
    """Return the folder of a run's original; None if it began with random weights, or its original is unknown."""
    if (own := run.path / ORIGINAL_NAME).is_dir():
        return own
    begins = (run.attempt(number).read_begin() for number in run.attempt_numbers())
    begin = next((each for each in begins if each is not None), None)
    return None if begin is None or not generations else _original_of_checkpoint(begin.base_path, generations - 1)


def _original_of_checkpoint(folder: str | None, generations: int = 16) -> Path | None:
    if folder is None or (own := Path(folder) / ORIGINAL_NAME).is_dir():
        return None if folder is None else own
    return original_of_run(Run(Path(folder).parent.parent), generations)


def keep_original_of(checkpoint: str | None, run: Run) -> None:
    """Copy the original of the checkpoint that a run begins with into the run's directory."""
    target = run.path / ORIGINAL_NAME
    if not target.exists() and (found := _original_of_checkpoint(checkpoint)) is not None:
        keep_original(found, target, links=False)


@dataclass
class Original:
    """Values of an original, and the differences of an export from it."""

    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    same_tokenizer: bool = True
    eod: int | None = None
    """Id that ends the run's documents."""
    vocab_size: int = 0
    """Rows of the exported embeddings."""
    differences: list[str] = field(default_factory=list)
    """One line each."""

    @classmethod
    def read(cls, folder: Path | None, made: Mapping[str, Any], padded: int) -> Original:
        """Read an original for an export with the config.json `made`, whose checkpoint has `padded` rows of embeddings.
        All rows of the original are exported, if the checkpoint has them."""
        rows, eod = made["vocab_size"], made["eos_token_id"]
        if folder is None:
            return cls(vocab_size=rows, eod=eod)
        config, generation = read_huggingface_config(folder), {}
        if (folder / CONFIG_NAMES[1]).is_file():
            generation = read_huggingface_config(folder, CONFIG_NAMES[1])
        for name in _TABLES["shapes"]:
            if (there := config.get(name, made[name])) != made[name]:
                words = f"nothing of the original is kept: its {name} is {there!r}, not {made[name]!r}"
                return cls(vocab_size=rows, eod=eod, differences=[words])
        rows = there if rows <= (there := config.get("vocab_size", 0)) <= padded else rows
        return cls(config, generation, folder, vocab_size=rows, eod=eod)

    def complete_config(self, made: dict[str, Any], seq_length: int, *, dtype_asked: bool) -> dict[str, Any]:
        """Return config.json with the original's values that training does not change."""
        old, rope = self.config, _rope(made)
        kept = {name: old[name] for name in old.keys() - (made.keys() - {*_TABLES["undecided"]}) - {*_TABLES["apart"]}}
        if old and _rope(old) == rope:
            kept["max_position_embeddings"] = max(seq_length, old.get("max_position_embeddings", 0))
        elif old:
            self.differences.append(f"config.json: rotary positions are {rope}, not {_rope(old)}")
        dtype = old.get("dtype") or old.get("torch_dtype")
        if dtype not in (None, made["torch_dtype"]) and not dtype_asked:
            self.differences.append(f"config.json: dtype is {made['torch_dtype']}, not {dtype}")
        return self._completed("config.json", made | kept, old)

    def complete_generation(self, made: dict[str, Any]) -> dict[str, Any]:
        """Return generation_config.json in the same way."""
        found = self._completed("generation_config.json", made | self.generation | made, self.generation)
        return {name: value for name, value in found.items() if value is not None}

    def _completed(self, file: str, made: dict[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with the original's special ids, if they are rows of the embeddings; the run's end of
        document is among the ids that end a text. Add the differences."""
        for name in [name for name in old if name.endswith("_token_id")]:
            ids: list[Any] = old[name] if isinstance(old[name], list) else [old[name]]
            if not self.same_tokenizer or not all(isinstance(each, int) and each < self.vocab_size for each in ids):
                made = {key: value for key, value in made.items() if key != name or value != old[name]}
            elif name != "bos_token_id" or made.get(name) is None:
                ends = name == "eos_token_id" and self.eod is not None and self.eod not in ids
                made[name] = [self.eod, *ids] if ends else old[name]
        for name in sorted(old.keys() - {*_TABLES["apart"], *_TABLES["left_out"]}):
            if old[name] not in (None, made.get(name)):
                self.differences.append(f"{file}: {name} is {made.get(name)!r}, not {old[name]!r}")
        return {name: value for name, value in made.items() if name not in _TABLES["left_out"]}


def read_huggingface_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Read a config of a Hugging Face folder. Raises InputError."""
    try:
        config = read_json(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"this is no Hugging Face folder: it has no {name}", where=folder) from None
    except ValueError as error:
        raise InputError(f"is no JSON: {error}", where=folder / name) from None
    if not isinstance(config, dict):
        raise InputError("is no JSON object", where=folder / name)
    return config


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary positions of a config.json of transformers 4 or 5, in one form."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kinds = found.pop("rope_type", None), found.pop("type", None), "default"
    base = found.pop("rope_theta", None) or config.get("rope_theta") or 10_000
    return {"rope_type": next(filter(None, kinds)), "rope_theta": float(base)} | found
