# Makes before_the_release.tar.xz, a backup of the last database that was made by the migrations 0001 to 0041.
# Run it in a checkout of 88f811f that has its .venv: sh before_the_release.sh EMPTY_FOLDER
set -e
export INSPECTOR_DATA="$1/data" DATABASE_URL=
manage=".venv/bin/python manage.py"
$manage migrate -v 0
$manage load_gallery
zcat rollouts/gallery/training/temperature.jsonl.gz | head -n 16 > "$1/steps.jsonl"
echo 'no JSON' >> "$1/steps.jsonl"
$manage import_rollouts "$1/steps.jsonl" --run segments --tokenizer demo
$manage check_template --all
$manage api_token "a trainer"
$manage shell <<'PYTHON'
from rollouts.models import Run
from rollouts.services import comments, seen, shares
from rollouts.services.users import make_account
from rollouts.token_store.stores import SegmentTokens
from rollouts.work.token_moves import move_run

ada = make_account("ada", "a long password")
run = Run.objects.get(name="segments")
trajectory = run.trajectories.order_by("index").first()
comments.add_comment(trajectory, ada, "Look at this é.")
seen.mark_seen(trajectory, ada)
shares.create_share(ada, run)
SegmentTokens.min_tokens = 1
list(move_run(run, "segments"))
PYTHON
$manage backup "$1/before_the_release"
tar -cJf "$1/before_the_release.tar.xz" -C "$1" before_the_release
