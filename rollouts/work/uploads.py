"""Uploaded files: kept in a folder for each run until the run's import has ended."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from django.conf import settings
from django.core.files.uploadedfile import TemporaryUploadedFile, UploadedFile

from rollouts import models
from rollouts.services.text import tidy_name


def uploads_folder() -> Path:
    """Where uploaded files are kept, in a folder for each run, until they are read."""
    return Path(settings.INSPECTOR_DATA) / "uploads"


def uploads_of(run: models.Run) -> Path:
    return uploads_folder() / run.code


def drop_uploads(run: models.Run) -> None:
    """Remove what was uploaded for a run."""
    shutil.rmtree(uploads_of(run), ignore_errors=True)


def keep_files(files: Sequence[UploadedFile], folder: Path) -> list[Path]:
    """Move uploads into ``folder`` under their own names, made safe. A second file of the same name gets a number."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept: list[Path] = []
    for file in files:
        target = folder / tidy_file(file.name or "")
        number = 2
        while target.exists():
            target = folder / f"{number}-{tidy_file(file.name or '')}"
            number += 1
        if isinstance(file, TemporaryUploadedFile):
            shutil.move(file.temporary_file_path(), target)
        else:
            with target.open("wb") as out:
                for chunk in file.chunks():
                    out.write(chunk)
        kept.append(target)
    return kept


def tidy_file(name: str) -> str:
    """A file's name with its suffixes, without characters that are unsafe in a path."""
    plain = Path(name.replace("\\", "/")).name
    suffixes = "".join(Path(plain).suffixes[-3:])[:40] if plain else ""
    stem = plain.removesuffix(suffixes) if suffixes else plain
    return tidy_name(stem) + "".join(letter for letter in suffixes if letter.isalnum() or letter in "._-")
