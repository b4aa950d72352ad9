"""Nothing in the database is a path of a machine: tokenizers, uploads and exports move into the file storage.

Run it on the machine that holds the data folder. What it does not find there is lost to the storage, and pages say so.
The old files go after the commit: where the storage fails halfway, the installation stays as it was.
"""

import re
import shutil
from functools import partial
from pathlib import Path, PurePath

from django.conf import settings
from django.db import migrations, models, transaction
from django.utils import timezone

from rollouts.store import files

DIGEST = re.compile(r"[0-9a-f]{64}")


def move(apps, schema_editor):
    data, old = Path(settings.INSPECTOR_DATA), []
    for folder in (data / "tokenizers").glob("*"):
        if DIGEST.fullmatch(folder.name) and (folder / "tokenizer.json").is_file():
            # tokenizer.json is put last: where it is, the tokenizer is whole.
            held = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
            for path in sorted(held, key=lambda path: path.name == "tokenizer.json"):
                files.put(f"tokenizers/{folder.name}/{path.name}", path)
            old.append(folder)
    for one in apps.get_model("rollouts", "Tokenizer").objects.all():
        digest = PurePath(one.path).name
        one.files_sha256 = digest if DIGEST.fullmatch(digest) else ""
        one.source = PurePath(one.source).name if one.source.startswith("/") else one.source
        one.save(update_fields=["files_sha256", "source"])
    old.append(data / "byte_tables")  # made again from the tokenizers
    jobs = apps.get_model("rollouts", "Job").objects
    for job in jobs.filter(kind="import").exclude(run=None).select_related("run"):
        paths = [Path(name) for name in job.options.get("files", [])]
        if paths and all(path.is_absolute() for path in paths):
            job.options["files"] = [moved(job.run.code, number, path, old) for number, path in enumerate(paths)]
            job.save(update_fields=["options"])
    for job in jobs.filter(kind="export", expires_at__gt=timezone.now()):
        for path in (data / "exports").glob(f"{job.code}.*"):
            if not path.name.endswith(".part"):
                files.put(f"exports/{job.code}/run{path.name.removeprefix(job.code)}", path)
                old.append(path)
    transaction.on_commit(partial(remove, old, data), schema_editor.connection.alias)


def remove(old, data):
    """Remove what lies in the storage now, and folders that held nothing else."""
    for path in old:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for name in ("tokenizers", "exports", "uploads"):
        if (data / name).is_dir() and not any(path.is_file() for path in (data / name).rglob("*")):
            shutil.rmtree(data / name, ignore_errors=True)


def moved(code, number, path, old):
    """The key of a file of an import. An upload is put into the storage, another file is read where it lies."""
    safe = re.sub(r"[^\w.-]", "-", path.name).lstrip(".-")[-60:] or "file"
    key = f"uploads/{code}/{number}-{safe}"
    if path.is_file() and path.parent == Path(settings.INSPECTOR_DATA) / "uploads" / code:
        files.put(key, path)
        old.append(path)
    elif path.is_file():
        link = Path(settings.INSPECTOR_DATA) / "in_place" / code / f"{number}-{safe}"
        link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    return key


class Migration(migrations.Migration):
    dependencies = [("rollouts", "0021_large_lists")]

    operations = [
        migrations.AddField(
            model_name="tokenizer",
            name="files_sha256",
            field=models.CharField(
                default="", help_text="Names its files in the storage; empty = they are lost.", max_length=64
            ),
            preserve_default=False,
        ),
        migrations.RunPython(move, migrations.RunPython.noop),
        migrations.RemoveField(model_name="tokenizer", name="path"),
        migrations.AlterField(
            model_name="tokenizer",
            name="source",
            field=models.CharField(
                help_text="Where it came from: name of a folder, upload, or hub id.", max_length=500
            ),
        ),
    ]
