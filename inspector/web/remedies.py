"""The remedies of refusals, in the words of pages."""

from rollout_inspector.refusal import Remedy, Words

WORDS: Words = {
    Remedy.LEAVE_OUT: (
        "Leave such trajectories out by choosing “leave out”, or write them all the same by choosing “write too”."
    ),
    Remedy.OTHER_STRATEGY: "Choose another strategy, or leave such trajectories out by choosing “leave out”.",
    Remedy.CHOOSE_TOKENIZER: "Choose one under “Diagnose again” on the page of the run.",
    Remedy.REPLAY_BY_COMMAND: "On a command line there is no limit: manage.py replay, with the code of the trajectory.",
    Remedy.OWN_FORMAT: "Write the trajectories in our own format, which holds all of them.",
    Remedy.ADOPT_FILES: "If that database is no longer used, run `manage.py doctor --adopt-files` on the server.",
}
