"""Everything that writes to the database. Each function is one short transaction unless it says otherwise."""

from rollouts.services.encoded import drop_arrays, encode_trajectories
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
from rollouts.services.retokenized import keep_retokenized
from rollouts.services.runs import (
    beat,
    cancel_run,
    choose_tokenizer,
    create_run,
    delete_run,
    end_active_run,
    end_run,
    fail_run,
    is_cancelled,
    recount,
    reopen_run,
    start_run,
    take_figures,
)
from rollouts.services.shares import create_share, revoke, token_hash
from rollouts.services.token_moves import fill_origins, move_arrays
from rollouts.services.tokenizers import (
    byte_table,
    byte_table_of,
    find_tokenizer,
    hub_tokenizer,
    load_tokenizer,
    register_chat_template,
    register_tokenizer,
)
from rollouts.services.trajectories import save_trajectories
