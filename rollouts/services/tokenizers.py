"""Registering tokenizers and chat templates."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from django.conf import settings
from django.db import IntegrityError, transaction

from rollouts import models, tokenizers
from rollouts.selectors.registered import tokenizers_of
from rollouts.services.projects import key_of
from rollouts.tokenizers import ByteTable
from rollouts.tokenizers.files import WANTED, copy_wanted, whole_folder
from rollouts.tokenizers.validate import check_file


def tokenizers_folder() -> Path:
    """Where registered tokenizers are kept."""
    return Path(settings.INSPECTOR_DATA) / "tokenizers"


def byte_tables_folder() -> Path:
    """Where byte tables are kept: the ``cache_dir`` of ``rollouts.tokenizers.byte_table``."""
    return Path(settings.INSPECTOR_DATA) / "byte_tables"


def byte_table_of(run: models.Run) -> ByteTable | None:
    """The bytes of the tokens of a run; None when the run has no tokenizer or the tokenizer's folder is gone."""
    if run.tokenizer is not None:
        with suppress(OSError, ValueError):
            return tokenizers.byte_table(run.tokenizer.path, byte_tables_folder())
    return None


def register_chat_template(text: str, label: str = "", project: models.Project | None = None) -> models.ChatTemplate:
    """Keep a chat template under the hash of its bytes, and the name that a project has for it.

    One that the project knows keeps its name unless it had none. ``project``: None = the default one.
    """
    if "\0" in text:
        raise ValueError("A chat template cannot hold the character U+0000.")
    key = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    template, _ = models.ChatTemplate.objects.get_or_create(sha256=key, defaults={"text": text})
    known, created = models.ProjectTemplate.objects.get_or_create(
        project_id=key_of(project), chat_template=template, defaults={"label": label[:200]}
    )
    if label and not created and not known.label:
        known.label = label[:200]
        known.save(update_fields=["label"])
    return template


def register_tokenizer(
    path: str | Path,
    name: str | None = None,
    source: str = "",
    revision: str = "",
    project: models.Project | None = None,
) -> models.Tokenizer:
    """Copy a tokenizer's JSON and chat template, build its byte table, and give it a name in a project.

    The folder is named by its contents. Without a ``name`` it is the folder's name, with a suffix when another
    tokenizer of the project has it; a ``name`` that another one has raises ``ValueError``. If the same is registered
    there already, it is returned. ``project``: None = the default one.
    Raises :class:`rollouts.tokenizers.TokenizerUnusable` (a ``ValueError``) when the folder holds no usable tokenizer.
    """
    path = Path(path).expanduser()
    with tempfile.TemporaryDirectory(prefix="inspector-tokenizer-") as scratch:
        if path.is_file() and path.name != "tokenizer.json":
            is_zip = zipfile.is_zipfile(path)
            folder = tokenizers.unpack_zip(path, Path(scratch) / "unpacked") if is_zip else _single(path, scratch)
        else:
            folder = path.parent if path.is_file() else path
        loaded = tokenizers.examined(folder)
        kept = _keep(folder)
        loaded.close()  # the process of the copy is started when somebody asks for it
    tokenizers.keep_table(kept, loaded.table, byte_tables_folder())
    named = (path.parent if path.name == "tokenizer.json" and path.is_file() else path).resolve()
    label = name or (named.stem if named.is_file() else named.name)
    template = register_chat_template(loaded.chat_template, label, project) if loaded.chat_template else None
    of_project = {"project_id": key_of(project)}
    fields = {
        "sha256": loaded.sha256,
        "path": str(kept),
        "source": (source or str(path.resolve()))[:500],
        "revision": revision[:100],
        "vocab_size": loaded.vocab_size,
        "encoder": loaded.encoder,
        "chat_template": template,
    }
    wanted = (name or named.name).strip()[:180] or "tokenizer"
    for candidate in (wanted, f"{wanted} ({kept.name[:8]})"):
        try:
            with transaction.atomic():
                record, _ = models.Tokenizer.objects.get_or_create(name=candidate, **of_project, defaults=fields)
        except IntegrityError:
            record = models.Tokenizer.objects.get(name=candidate, **of_project)
        if record.path == str(kept) or Path(record.path).name == kept.name:
            return record
        if name is not None:
            raise ValueError(f"Another tokenizer is registered as {name!r} already. Choose another name.")
    raise ValueError(f"Another tokenizer is registered as {wanted!r} already. Choose a name.")


def find_tokenizer(named: str, project: models.Project | None = None) -> models.Tokenizer:
    """A tokenizer by its registered name, a folder or file, or a hub id (``org/name@revision``) where that is allowed.

    What is not registered in the project yet is. For commands alone: who calls one may read any folder of this machine.
    ``project``: None = the default one. Raises ``ValueError`` with a sentence.
    """
    known = tokenizers_of(key_of(project))
    registered = known.filter(name=named).first()
    if registered is not None:
        return registered
    if Path(named).expanduser().exists():
        return register_tokenizer(named, project=project)
    hub_id, _, revision = named.partition("@")
    if hub_id.count("/") == 1 and not named.startswith((".", "/", "~")) and settings.HUB_ALLOWED:
        return hub_tokenizer(hub_id, revision or "main", project)
    names = ", ".join(known.values_list("name", flat=True)[:10]) or "none yet"
    raise ValueError(
        f"There is no tokenizer {named!r}. Name a registered one ({names}), or a folder that holds a tokenizer.json."
    )


def hub_tokenizer(hub_id: str, revision: str, project: models.Project | None = None) -> models.Tokenizer:
    """The tokenizer of a model on the hub at one revision. It is registered as ``org/name@revision``.

    ``project``: None = the default one. Raises ``ValueError`` with a sentence. The id is never taken for a path.
    """
    name = f"{hub_id}@{revision}"
    if (registered := tokenizers_of(key_of(project)).filter(name=name, source=hub_id).first()) is not None:
        return registered
    folder = tokenizers.from_hub(hub_id, revision, Path(settings.INSPECTOR_DATA) / "hub", settings.HUB_ALLOWED)
    return register_tokenizer(folder, name=name, source=hub_id, revision=revision, project=project)


def _single(path: Path, scratch: str) -> Path:
    """A tokenizer.json that was uploaded under another name. Raises :class:`tokenizers.TokenizerUnusable`."""
    if problems := check_file(path):
        raise tokenizers.TokenizerUnusable(" ".join(problems))
    folder = Path(scratch) / path.stem
    folder.mkdir()
    shutil.copyfile(path, folder / "tokenizer.json")
    return folder


def _keep(folder: Path) -> Path:
    """Copy the wanted files to a folder named by their contents; whole or not at all."""
    digest = hashlib.sha256()
    for name in WANTED:
        if (folder / name).is_file():
            digest.update(f"{name}\0".encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    target = tokenizers_folder() / digest.hexdigest()
    if (target / "tokenizer.json").is_file():
        return target
    with whole_folder(target, "tokenizer.json") as draft:
        copy_wanted(folder, draft)
    return target
