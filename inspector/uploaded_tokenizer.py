"""An uploaded tokenizer.json or zip becomes a checked folder, named after the upload."""

from __future__ import annotations

import zipfile
from pathlib import Path, PurePath

from django.core.files.uploadedfile import UploadedFile

from rollouts import tokenizers
from rollouts.tokenizers.validate import WANTED


def keep_upload(upload: UploadedFile, scratch: Path) -> Path:
    """The folder under `scratch` that an upload becomes.

    Raises `TokenizerUnusable` with a sentence for anything but a tokenizer.json or a zip that holds one.
    """
    arrived = scratch / ("upload.zip" if upload.read(4) == b"PK\x03\x04" else "upload.json")
    upload.seek(0)
    with arrived.open("wb") as file:
        for chunk in upload.chunks():
            file.write(chunk)
    folder = scratch / "tokenizer" / tidy_name(upload.name or "")
    if zipfile.is_zipfile(arrived):
        return tokenizers.unpack_zip(arrived, folder)
    problems = tokenizers.check_folder(arrived)
    if problems:
        raise tokenizers.TokenizerUnusable(" ".join(problems).replace(arrived.name, upload.name or "The file"))
    folder.mkdir(parents=True)
    arrived.rename(folder / "tokenizer.json")
    return folder


def with_template(folder: Path, text: str, scratch: Path) -> Path:
    """A copy of a tokenizer's files under `scratch` whose chat template is `text`."""
    target = scratch / "with-template" / folder.name
    target.mkdir(parents=True)
    for name in WANTED:
        if (folder / name).is_file():
            (target / name).write_bytes((folder / name).read_bytes())
    (target / "chat_template.jinja").write_text(text, encoding="utf-8")
    return target


def tidy_name(name: str) -> str:
    """A folder's name from a file's: without the suffix, and with nothing that a path could stumble over."""
    stem = PurePath(name.replace("\\", "/")).name.removesuffix(".zip").removesuffix(".json")
    kept = "".join(letter if letter.isalnum() or letter in "._- " else "-" for letter in stem).strip(". ")[:100]
    return kept or "tokenizer"
