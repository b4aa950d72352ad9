"""A PostgreSQL database with as many trajectories as a team has after months, written by the database itself.

Lists read no arrays, so only the trajectories whose pages are opened have tokens. What is skewed in use is skewed
here: few runs hold most trajectories, few kinds most findings, and a rare stop reason or kind stands in a handful.
"""

import json
from typing import Any

from django.db import connection, models, transaction

from rollout_inspector.diagnose import KINDS, VERSION
from rollout_inspector.streams.trajectory import ids_array
from rollouts.store.models import (
    ApiToken, ChatTemplate, Job, Rejection, Run, ShareLink, StepTokens, StoredFinding, StoredRow, StoredStep,
    StoredTrajectory, TemplateCheck, Tokenizer
)
from rollouts.store.runs.runs import take_figures

SIZES = ((200_000, 3), (50_000, 4), (5_000, 20), (500, 100), (10, 5_000))
"""(trajectories of a run, runs of that size), together a million."""
TOKENS_EVERY = 500
"""One in so many trajectories has tokens."""
N_CHECKS = 20_000
N_JOBS = 50_000
N_SHARES = 5_000
FILLED = (Run, StoredTrajectory, StoredStep, StoredRow, StoredFinding)


def literal(value: Any) -> str:
    """A value of a column as SQL."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int | float):
        return str(value)
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return "'" + text.replace("'", "''") + "'"


def insert_from(model: type[models.Model], source: str, /, **expressions: str) -> None:
    """Insert the rows of a ``FROM`` clause: each column by its expression, or else its default."""
    quote, meta = connection.ops.quote_name, model._meta
    values = {}
    for field in meta.concrete_fields:
        if field.attname in expressions:
            values[field.column] = expressions[field.attname]
        elif isinstance(field, models.DateTimeField) and not field.null:
            values[field.column] = "now()"
        elif not field.primary_key:
            values[field.column] = literal(field.get_default())
    columns = ", ".join(quote(str(name)) for name in values)
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {quote(meta.db_table)} ({columns}) SELECT {', '.join(values.values())} {source}")


def bulk_indexes() -> list[str]:
    """Drop indexes and foreign keys of the tables that are filled; returns the statements that make them again."""
    again = []
    with connection.cursor() as cursor:
        for table in (model._meta.db_table for model in FILLED):
            cursor.execute(
                "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = %s::regclass AND "
                "contype IN ('f', 'u')",
                [table],
            )
            for name, definition in cursor.fetchall():
                again.append(f'ALTER TABLE "{table}" ADD CONSTRAINT "{name}" {definition}')
                cursor.execute(f'ALTER TABLE "{table}" DROP CONSTRAINT "{name}"')
            cursor.execute(
                "SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = "
                "%s::regclass AND NOT indisprimary",
                [table],
            )
            for name, definition in cursor.fetchall():
                again.append(definition)
                cursor.execute(f"DROP INDEX {name}")
    # An index that carries a constraint goes and comes with it; other indexes first, because foreign keys read them.
    return sorted(again, key=lambda one: ("FOREIGN KEY" in one, not one.startswith("ALTER")))


def choose(shares: dict[str, float], column: str) -> str:
    """SQL that chooses a text by a column that is even in [0, 1)."""
    total, cases = 0.0, []
    *some, last = shares
    for text in some:
        total += shares[text]
        cases.append(f"WHEN {column} < {total:.6f} THEN {literal(text)}")
    return f"(CASE {' '.join(cases)} ELSE {literal(last)} END)"


def fill(scale: float = 1.0) -> None:
    """Fill an empty, migrated database; ``scale`` 1 = a million trajectories."""
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = off")
        cursor.execute("SET work_mem = '256MB'")
        cursor.execute("SET maintenance_work_mem = '512MB'")
        cursor.execute("SELECT setseed(0.5)")
    with transaction.atomic():
        again = bulk_indexes()
        _fill_runs(scale)
        _fill_trajectories()
        _fill_parts()
        with connection.cursor() as cursor:
            for statement in again:
                cursor.execute(statement)
    _fill_others()
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")
        cursor.execute(_TOTALS)
        cursor.execute("VACUUM ANALYZE rollouts_run")
    for run in Run.objects.order_by("-n_trajectories").filter(status=Run.Status.DONE)[:200]:
        take_figures(run)
    with connection.cursor() as cursor:
        cursor.execute("RESET ALL")


_TOTALS = """
    UPDATE rollouts_run SET n_trajectories = t.n, n_finished = t.done, n_failed = t.failed, n_steps = t.steps, n_rows =
    t.rows, n_tokens = t.tokens, n_sampled = t.sampled, n_rewards = t.rewards, reward_sum = t.reward, finding_counts =
    coalesce(f.counts, '{}') FROM (SELECT run_id, count(*) AS n, count(*) FILTER (WHERE status = 'done') AS done,
    count(*) FILTER (WHERE status = 'failed') AS failed, sum(n_steps) AS steps, sum(n_rows) AS rows, sum(n_tokens) AS
    tokens, sum(n_sampled) AS sampled, count(reward) AS rewards, coalesce(sum(reward), 0) AS reward FROM
    rollouts_trajectory GROUP BY run_id) AS t LEFT JOIN (SELECT run_id, jsonb_object_agg(kind, n) AS counts FROM (SELECT
    run_id, kind, count(*) AS n FROM rollouts_finding GROUP BY run_id, kind) AS kinds GROUP BY run_id) AS f USING
    (run_id) WHERE id = t.run_id
"""


def _fill_runs(scale: float) -> None:
    kinds = {"import": 0.6, "launch": 0.4}
    users = "(SELECT min(id) FROM auth_user)"
    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMP TABLE sizes (n integer, times integer) ON COMMIT DROP")
        cursor.executemany("INSERT INTO sizes VALUES (%s, %s)", [(max(int(n * scale), 2), times) for n, times in SIZES])
    # The largest run is a launch that works; the others have ended.
    insert_from(
        Run,
        "FROM (SELECT n, random() AS kind, row_number() OVER (ORDER BY n DESC, i) AS place FROM sizes, "
        "generate_series(1, times) AS i) AS one",
        code="substr(md5('run' || place), 1, 12)",
        name="'grpo ' || (ARRAY['math', 'code', 'search', 'tools', 'web'])[1 + place % 5] || ' ' || place",
        model="(ARRAY['qwen3-8b', 'llama-3.1-8b', 'demo', 'glm-4.5', ''])[1 + place % 5]",
        kind=f"CASE WHEN place = 1 THEN 'launch' ELSE {choose(kinds, 'kind')} END",
        status="CASE WHEN place = 1 THEN 'running' WHEN place % 50 = 0 THEN 'failed' ELSE 'done' END",
        created_by_id=users,
        created_at="now() - place * 37 * interval '1 minute'",
        started_at="now() - place * 36 * interval '1 minute'",
        n_expected="n",
    )


def _fill_trajectories() -> None:
    checks = [{"prefix": "passed", "mask": "passed"}, {"prefix": "failed", "mask": "passed"}, {"prefix": ["tokenizer"]}]
    stops = {"answered": 0.7, "max_turns": 0.2, "length": 0.0949, "cancelled": 0.005, "context_full": 0.0001}
    state = choose({"done": 0.989, "failed": 0.01, "cancelled": 0.001}, "b")
    ended = "(status IN ('done', 'failed', 'cancelled'))"
    columns = {
        "code": "substr(md5(run || ':' || i), 1, 12)",
        "run_id": "run",
        "external_id": "'t-' || lpad(i::text, 7, '0')",
        "index": "i",
        "group": "'prompt ' || i / 8",
        "status": "status",
        "stop_reason": f"CASE WHEN status = 'done' THEN {choose(stops, 'a')} ELSE '' END",
        "reward": "CASE WHEN status <> 'done' OR c > 0.98 THEN NULL WHEN run % 2 = 0 THEN round(c) ELSE c / 0.98 END",
        "created_at": "now() - run * 37 * interval '1 minute'",
        "n_steps": f"CASE WHEN {ended} THEN 1 + floor(6 * d * d)::int ELSE 0 END",
        "n_rows": f"CASE WHEN {ended} THEN 1 ELSE 0 END",
        "n_tokens": f"CASE WHEN {ended} THEN 200 + floor(exp(9 * d))::int ELSE 0 END",
        "n_sampled": f"CASE WHEN {ended} THEN 100 + floor(exp(8 * d))::int ELSE 0 END",
        "n_trained": f"CASE WHEN {ended} THEN 100 + floor(exp(8 * d))::int ELSE 0 END",
        "n_lost": "0",
        "n_findings": f"CASE WHEN {ended} THEN n_findings ELSE 0 END",
        "checks": f"CASE WHEN {ended} THEN (ARRAY[{', '.join(map(literal, checks))}])[1 + i % 3]::jsonb END",
    }
    insert_from(
        StoredTrajectory,
        "FROM (SELECT *, CASE WHEN working AND i >= n * 0.41 THEN 'queued' WHEN working AND i >= n * 0.4 "
        f"THEN 'running' ELSE {state} END AS status, (ARRAY[0, 0, 0, 0, 0, 0, 1, 1, 2, 4])[1 + floor(10 * e)::int] AS "
        "n_findings FROM (SELECT id AS run, n_expected AS n, status = 'running' AS working, i, random() AS a, random() "
        "AS b, random() AS c, random() AS d, random() AS e FROM rollouts_run, generate_series(0, n_expected - 1) AS i "
        "ORDER BY id, i) AS dice) AS one",
        **columns,
    )


def _fill_parts() -> None:
    """Steps, rows, findings, and the tokens of a few trajectories."""
    trajectory, step = StoredTrajectory._meta.db_table, StoredStep._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TEMP TABLE firsts ON COMMIT DROP AS SELECT id, index, run_id, n_steps, n_tokens, n_findings, "
            f"sum(n_steps) OVER (ORDER BY id) - n_steps AS first FROM {trajectory} WHERE n_steps > 0"
        )
    length = "120 * (s + 1)"
    insert_from(
        StoredStep,
        "FROM firsts, generate_series(0, n_steps - 1) AS s",
        id="1 + first + s",
        trajectory_id="id",
        index="s",
        parent_id="CASE WHEN s > 0 THEN first + s END",
        shared_length="CASE WHEN s > 0 THEN 120 * s ELSE 0 END",
        parent_length="CASE WHEN s > 0 THEN 120 * s ELSE 0 END",
        prompt_length=f"{length} - 60",
        completion_length="60",
        finish_reason="'stop'",
    )
    insert_from(
        StoredRow,
        "FROM firsts",
        trajectory_id="id",
        index="0",
        last_step_id="first + n_steps",
        n_tokens="120 * n_steps",
        n_trained="60 * n_steps",
        step_indices="to_jsonb(ARRAY(SELECT generate_series(0, n_steps - 1)))",
    )
    names = ", ".join(map(literal, sorted(KINDS)[:24]))
    ids = f"'\\x{ids_array(range(4)).tobytes().hex()}'::bytea"
    sentence = literal("The prompt of step 3 leaves the stream of step 2 at offset 1,204. " * 3)
    insert_from(
        StoredFinding,
        # Each kind is half as frequent as the one before; the last ones are a handful.
        "FROM (SELECT *, random() AS a, 1 + least(23, floor(-ln(random() + 1e-9) / ln(2)))::int AS kind FROM firsts, "
        "generate_series(1, n_findings) AS f) AS one",
        trajectory_id="id",
        run_id="run_id",
        step_index="floor(n_steps * a)::int",
        row_index="0",
        axis="'stream'",
        kind=f"(ARRAY[{names}])[kind]",
        severity="(ARRAY['error', 'warning', 'info'])[1 + kind % 3]",
        start="10",
        stop="12",
        expected_ids=ids,
        actual_ids=ids,
        evidence=sentence,
        remedy=sentence,
        trained_tokens_lost="2",
        prompt_tokens_repaid="300",
        version=str(VERSION),
    )
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {trajectory} SET worst_severity = worst FROM (SELECT trajectory_id, CASE WHEN "
            "bool_or(severity = 'error') THEN 'error' WHEN bool_or(severity = 'warning') THEN 'warning' ELSE 'info' "
            "END AS worst FROM rollouts_finding GROUP BY trajectory_id) AS f WHERE trajectory_id = id"
        )
    tokens = ids_array(range(100, 160)).tobytes().hex()
    insert_from(
        StepTokens,
        f"FROM {step} JOIN firsts ON trajectory_id = firsts.id WHERE firsts.index % {TOKENS_EVERY} = 0",
        step_id=f"{step}.id",
        delta_ids=f"'\\x{tokens}'::bytea",
        completion_ids=f"'\\x{tokens}'::bytea",
    )
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT setval(pg_get_serial_sequence('{step}', 'id'), (SELECT max(id) FROM {step}))")


def _fill_others() -> None:
    """Checks, jobs, share links, API keys, rejected lines."""
    series = "FROM generate_series(1, {}) AS i"
    user = "(SELECT min(id) FROM auth_user)"
    run = "(SELECT id FROM rollouts_run ORDER BY id OFFSET {} LIMIT 1)"
    check = TemplateCheck._meta.db_table
    insert_from(
        ChatTemplate,
        series.format(200),
        sha256="md5('template' || i) || md5('' || i)",
        label="'template ' || i",
        text="repeat('{{ messages }} ', 400)",
    )
    insert_from(
        TemplateCheck,
        series.format(N_CHECKS),
        code="substr(md5('check' || i), 1, 12)",
        chat_template_id="md5('template' || 1 + i % 200) || md5('' || 1 + i % 200)",
        report="jsonb_build_object('probes', (SELECT jsonb_agg(md5((i * j)::text)) FROM generate_series(1, 100) AS j))",
        created_by_id=user,
        created_at="now() - i * interval '1 minute'",
    )
    insert_from(
        Job,
        f"FROM {check} AS one",
        code="substr(md5('job' || id), 1, 12)",
        template_check_id="id",
        kind="'check_template'",
        status="'done'",
        n_done="1",
        created_by_id=user,
        finished_at="now()",
    )
    insert_from(
        Job,
        f"FROM (SELECT id AS run, j FROM (SELECT id FROM rollouts_run LIMIT {N_JOBS // 10}) AS r, "
        "generate_series(1, 10) AS j) AS one",
        code="substr(md5('job of run' || run || ':' || j), 1, 12)",
        run_id="run",
        kind="(ARRAY['export', 'diagnose', 'replay'])[1 + j % 3]",
        status="CASE WHEN j < 4 AND run % 500 = 0 THEN 'queued' WHEN j % 9 = 0 THEN 'failed' ELSE 'done' END",
        created_by_id=user,
    )
    insert_from(
        ShareLink,
        f"FROM (SELECT id AS run, row_number() OVER (ORDER BY id) AS i FROM rollouts_run LIMIT {N_SHARES}) AS one",
        token_sha256="md5('share' || i) || md5('' || i)",
        hint="'abc'",
        run_id="run",
        created_by_id=user,
        expires_at="now() + interval '7 days'",
    )
    insert_from(
        ApiToken,
        series.format(300),
        token_sha256="md5('token' || i) || md5('' || i)",
        hint="'abc'",
        name="'trainer ' || i",
        created_by_id=user,
    )
    insert_from(
        Rejection,
        series.format(20_000),
        run_id=run.format(1),
        file="'train.jsonl'",
        line="i",
        reason="'This line is no JSON.'",
    )
    Tokenizer.objects.bulk_create(
        Tokenizer(name=f"tokenizer {i}", sha256=f"{i:064}", source="", vocab_size=100, encoder="tokenizers")
        for i in range(50)
    )
