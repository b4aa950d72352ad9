"""The remedies of refusals, in the words of commands: their options."""

from rollout_inspector.refusal import Refusal, Remedy, Words, worded

WORDS: Words = {
    Remedy.LEAVE_OUT: "Leave such trajectories out with --leave-out, or write them all the same with --force.",
    Remedy.OTHER_STRATEGY: "Choose another --strategy, or leave such trajectories out with --leave-out.",
    Remedy.CHOOSE_TOKENIZER: "Give it one: manage.py diagnose RUN --tokenizer NAME.",
    Remedy.REPLAY_BY_COMMAND: "There is no limit for: manage.py replay TRAJECTORY.",
    Remedy.OWN_FORMAT: "With --output-format own_jsonl they are written in our own format, which holds all of them.",
    Remedy.ADOPT_FILES: "If that database is no longer used, --adopt-files takes its files over.",
}


def sentence_of(error: Exception) -> str:
    """An error for a terminal: of a refusal also its remedy and, in front, the option that is to blame."""
    if not isinstance(error, Refusal):
        return str(error)
    option = f"--{error.field.replace('_', '-')}: " if error.field else ""
    return option + worded(str(error), error.remedy, WORDS)
