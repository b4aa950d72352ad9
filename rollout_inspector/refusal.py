"""What cannot be done, as a sentence for a user, and what the user can do about it. A sentence knows no door. It names
no button, option or field, because pages, API and commands show the same one. Each door has a table that words every
remedy as its own."""

from collections.abc import Mapping
from enum import StrEnum


class Remedy(StrEnum):
    """What a user can do. The value is stored beside the sentence, so it is never renamed."""

    LEAVE_OUT = "leave_out"  # Leave out the trajectories with faulty rows, or write these rows all the same.
    OTHER_STRATEGY = "other_strategy"
    """Write the rows of another strategy, or leave out the trajectories that this one refuses."""
    CHOOSE_TOKENIZER = "choose_tokenizer"  # Diagnose the run again with a registered tokenizer, which it then has.
    REPLAY_BY_COMMAND = "replay_by_command"  # Replay the trajectory by the command, which has no limit.
    OWN_FORMAT = "own_format"  # Write trajectories in our own format, which holds all of them.
    ADOPT_FILES = "adopt_files"  # Say that the files belong to this database, and not to one that is no longer used.


Words = Mapping[Remedy, str]  # How a door words each remedy, as a sentence.


class Refusal(ValueError):
    """Something cannot be done, with a sentence for the user. Its subclasses are caught apart, or hold more."""

    def __init__(self, sentence: str, remedy: Remedy | None = None, field: str = "") -> None:
        """``field``: of a form or a body, the one to blame; empty = none."""
        super().__init__(sentence)
        self.sentence, self.remedy, self.field = sentence, remedy, field


def worded(sentence: str, remedy: str | None, words: Words) -> str:
    """A sentence with its remedy in the words of a door. ``remedy``: as it is stored; empty = there is none."""
    return f"{sentence} {words[Remedy(remedy)]}" if remedy else sentence
