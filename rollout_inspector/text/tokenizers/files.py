"""A tokenizer's folder: its files, and their limits. Nothing is parsed here."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from rollout_inspector.refusal import Refusal

WANTED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""The files of a folder that are read and kept. All others are ignored."""
MAX_JSON_BYTES = 64_000_000  # The largest tokenizer.json in use has 35 MB.
MAX_TEMPLATE_BYTES = 2_000_000


class TokenizerUnusable(Refusal):
    """The folder holds no tokenizer that can be read. The message names the file and what is wrong with it."""


def size_limit(name: str) -> int:
    """Bytes that one of the ``WANTED`` files may have."""
    return MAX_TEMPLATE_BYTES if name.endswith(".jinja") else MAX_JSON_BYTES


def tokenizer_folder(path: str | Path) -> Path:
    """The folder that holds tokenizer.json, from the path of the folder or of the file. Raises
    :class:`TokenizerUnusable` when there is none."""
    path = Path(path)
    folder = path.parent if path.name == "tokenizer.json" else path
    if not folder.is_dir():
        raise TokenizerUnusable(f"There is no folder {folder}. Name a folder that holds a tokenizer.json.")
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerUnusable(
            f"The folder {folder} has no tokenizer.json. Save the model's fast tokenizer there (save_pretrained)."
        )
    return folder


def file_marks(folder: Path, names: Iterable[str]) -> tuple[object, ...]:
    """For each of these files of a folder what changes when the file changes; None for a file that is missing."""
    stats = [path.stat() if (path := folder / name).is_file() else None for name in names]
    return tuple(stat and (stat.st_mtime_ns, stat.st_size) for stat in stats)


def copy_wanted(source: Path, target: Path) -> None:
    """Copy the wanted files of a folder to another one, which is made if it is missing. Links become plain files."""
    target.mkdir(parents=True, exist_ok=True)
    for name in WANTED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
