"""The mark of the file storage: which database its files belong to. Two installations may be given one bucket and
prefix by mistake. Each would take the other's files for leftovers."""

from io import BytesIO

from rollouts.store import files
from rollouts.store.database import database_identity

MARK = "machines/database"
WAY_OUT = (
    "Give each installation an INSPECTOR_FILES of its own. If the database was copied or moved and the other one is no "
    "longer used, adopt the files: the command doctor does it."
)


def owner() -> str:
    """The identity of the database that the files belong to. A storage without a mark becomes this database's. Raises
    :class:`rollouts.store.files.StorageDown`."""
    return marked() or adopt()


def marked() -> str:
    """What the mark says; empty = there is none. Raises :class:`rollouts.store.files.StorageDown`."""
    try:
        with files.open_file(MARK) as file:
            return file.read(64).decode(errors="replace")
    except FileNotFoundError:
        return ""


def adopt() -> str:
    """Say that the files belong to this database. Returns its identity."""
    identity = database_identity()
    files.put(MARK, BytesIO(identity.encode()))
    return identity


def fault() -> str:
    """Why this database may delete none of the files, as sentences; empty = they belong to it. Raises
    :class:`rollouts.store.files.StorageDown`."""
    return sentence_of(owner(), database_identity())


def sentence_of(marked_as: str, database: str) -> str:
    """The same for a mark and a database; empty = they agree."""
    if marked_as == database:
        return ""
    return f"The file storage belongs to another database ({marked_as[:20]}; this one is {database}). {WAY_OUT}"
