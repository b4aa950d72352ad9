"""The remedies of refusals, in the words of the API: fields of bodies and addresses."""

from rollout_inspector.refusal import Remedy, Words

WORDS: Words = {
    Remedy.LEAVE_OUT: "Leave such trajectories out with `leave_out`, or write them all the same with `force`.",
    Remedy.OTHER_STRATEGY: "Name another `strategy`, or leave such trajectories out with `leave_out`.",
    Remedy.CHOOSE_TOKENIZER: "POST /api/v1/runs/CODE/diagnose with a `tokenizer` gives it one.",
    Remedy.REPLAY_BY_COMMAND: "On a command line there is no limit: manage.py replay, with the code of the trajectory.",
    Remedy.OWN_FORMAT: "Ask for the `format` own_jsonl, which holds all of them.",
    Remedy.ADOPT_FILES: "If that database is no longer used, run `manage.py doctor --adopt-files` on the server.",
}
