"""Everything that writes to the database. Each function is one short transaction unless it says otherwise."""

from rollouts.services.figures import take_figures
from rollouts.services.findings import note_diagnosed, replace_findings
from rollouts.services.jobs import ask_job, cancel_job
from rollouts.services.launched import (
    NewTrajectory,
    add_queued_trajectories,
    cancel_remaining,
    fail_trajectory,
    finish_trajectories,
    lease_trajectories,
    release_trajectories,
    renew_lease,
    resume_run,
    save_steps,
)
from rollouts.services.runs import (
    beat,
    cancel_run,
    choose_tokenizer,
    create_run,
    delete_run,
    delete_trajectories,
    end_active_run,
    end_run,
    fail_run,
    is_cancelled,
    recount,
    start_run,
)
from rollouts.services.shares import create_share, revoke_share, token_hash
from rollouts.services.tokenizers import (
    byte_table_of,
    byte_tables_folder,
    find_tokenizer,
    register_chat_template,
    register_tokenizer,
    tokenizers_folder,
)
from rollouts.services.trajectories import fill_origins, save_trajectories

__all__ = [
    "NewTrajectory",
    "add_queued_trajectories",
    "ask_job",
    "beat",
    "byte_table_of",
    "byte_tables_folder",
    "cancel_job",
    "cancel_remaining",
    "cancel_run",
    "choose_tokenizer",
    "create_run",
    "create_share",
    "delete_run",
    "delete_trajectories",
    "end_active_run",
    "end_run",
    "fail_run",
    "fail_trajectory",
    "fill_origins",
    "find_tokenizer",
    "finish_trajectories",
    "is_cancelled",
    "lease_trajectories",
    "note_diagnosed",
    "recount",
    "register_chat_template",
    "register_tokenizer",
    "release_trajectories",
    "renew_lease",
    "replace_findings",
    "resume_run",
    "revoke_share",
    "save_steps",
    "save_trajectories",
    "start_run",
    "take_figures",
    "token_hash",
    "tokenizers_folder",
]
