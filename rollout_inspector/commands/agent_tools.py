"""What an agent may ask a server: each public method is a tool, and its docstring is what the agent reads of it.

A line ``* name: ...`` of it describes an argument. A tool returns text: metadata as a line of JSON, then content behind
a fence where ``content`` asks for it. Errors are :class:`ToolRefused` with a sentence.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from rollout_inspector.client.client import ENDED, Client, ServerError
from rollout_inspector.commands.fence import Sentence, answer_text, shown_text
from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.diagnose.gap.cause_kinds import CAUSES, TEACHER_CAUSES
from rollout_inspector.diagnose.kinds import KINDS

MAX_ITEMS = 100  # Items of a list in one answer.
MAX_COMPARED = 6
SHOWN_ITEMS = 20  # Tokens, steps and lines of each table of a gap, questions of a comparison, and training steps.
MAX_WAIT_SECONDS = 300.0
POLL_SECONDS = 1.0
VALUES: dict[str, tuple[str, ...]] = {
    "kind": ("", *KINDS), "finding": ("", *KINDS), "severity": ("", *map(str, Severity)),
    "status": ("", "queued", "running", "done", "failed", "cancelled"),
    "sort": ("index", "training_step", "-training_step", *(sign + column for column in (
        "reward", "n_tokens", "n_findings", "n_rows", "n_sampled", "n_trained", "n_lost") for sign in ("", "-"))),
}
"""Argument -> the values that the schema of a tool lists. The server refuses others, and says which there are."""
OWN_TEXTS = ("evidence", *CAUSES, *TEACHER_CAUSES)  # Keys of a gap report whose texts the product wrote.
CODE = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
RUN_FIELDS = (
    "code", "name", "kind", "status", "error", "created_at", "model", "environment", "format", "trajectories",
    "finished", "failed", "steps", "rows", "rows_per_call", "tokens", "sampled", "reward_mean", "findings",
)
TRAJECTORY_FIELDS = (
    "code", "external_id", "group", "status", "stop_reason", "reward", "training_step", "steps", "rows", "tokens",
    "trained", "findings", "worst_severity",
)
FINDING_FIELDS = (
    "trajectory", "number", "kind", "title", "severity", "step", "row", "start", "stop", "remedy", "missing",
    "trained_tokens_lost", "trained_tokens_wrong", "muted",
)
FORK_FIELDS = (
    "run", "status", "row", "offset", "token_id", "side", "finding", "expected", "finished", "failed", "reward_mean",
    "length_mean", "calls_mean", "parts_at",
)
SAMPLE_FIELDS = ("code", "status", "seed", "reward", "n_tokens", "n_sampled", "n_steps")
STEP_FIGURES = (
    "training_step", "version", "trajectories", "reward_mean", "broken", "truncated", "lost", "sampled", "repaid",
    "rows_per_call", "tokens_per_trajectory", "groups", "same_reward",
)
CHECK_FIELDS = ("code", "status", "error", "progress", "tokenizer", "label", "verdicts", "prefix_preserving")
PROBE_FIELDS = ("name", "title", "status", "void", "decisive", "line")
REPAIR_FIELDS = ("verified", "scope", "fixes", "still_broken", "changed_conversations")


class ToolRefused(Exception):
    """A tool cannot answer; the message says why, and what to do."""


class AgentTools:
    """The tools over one server. ``client``: makes the client of the caller, whose token says what may be read."""

    def __init__(self, client: Callable[[], Client], pause: Callable[[float], object] = time.sleep) -> None:
        self._client, self._pause = client, pause

    def list_runs(self, text: str = "", status: str = "", limit: int = 20) -> str:
        """List runs, newest first, with their sizes and findings by kind.

        * text: a part of the name or of the model, or a whole code.
        * status: only runs in this state.
        * limit: the most runs of the answer, 1 to 100.
        """
        client = self._client()
        runs = client.runs(text=text, status=status, limit=_asked(limit))
        return _listed("runs", runs, limit, lambda one: _of(one, RUN_FIELDS) | _at(client, one["url"]))

    def get_run(self, run: str) -> str:
        """One run: its origin, sizes, rewards, and its findings by kind with counts.

        * run: its code.
        """
        client = self._client()
        whole, summary = client.get_run(_code(run)), client.summary(_code(run))
        kinds = [
            {
                "kind": kind, "findings": n, "trajectories": summary["finding_trajectories"].get(kind),
                "severities": summary["finding_severities"].get(kind), "tokens": summary["finding_tokens"].get(kind),
            }
            for kind, n in sorted(summary["finding_counts"].items(), key=lambda item: -item[1])
        ]
        figures = ("by_status", "n_rewards", "reward_mean", "reward_min", "reward_max", "reward_std", "stop_reasons")
        run_said = {name: value for name, value in _of(whole, RUN_FIELDS).items() if name != "findings"}
        return answer_text({**run_said, **_of(summary, figures), "kinds": kinds, **_at(client, whole["url"])})

    def list_trajectories(
        self, run: str, finding: str = "", severity: str = "", text: str = "", sort: str = "index",
        training_min: int | None = None, training_max: int | None = None, limit: int = 20,
    ) -> str:
        """List trajectories of a run, without their content.

        * run: its code.
        * finding: only those with a finding of this kind.
        * severity: only those with a finding of this severity.
        * text: a part of the external id.
        * sort: the order; a minus sign means descending.
        * training_min: the first training step.
        * training_max: the last training step.
        * limit: the most trajectories of the answer, 1 to 100.
        """
        client = self._client()
        trajectories = client.trajectories(
            _code(run), finding=finding, severity=severity, text=text, sort=sort, training_min=training_min,
            training_max=training_max, limit=_asked(limit),
        )
        return _listed("trajectories", trajectories, limit, lambda one: _of(one, TRAJECTORY_FIELDS))

    def list_findings(
        self, run: str = "", trajectory: str = "", kind: str = "", severity: str = "", limit: int = 20
    ) -> str:
        """List findings of a run, or of one trajectory: what is wrong where, what it costs and the remedy.

        * run: code of a run; name a run or a trajectory.
        * trajectory: code of a trajectory.
        * kind: only findings of this kind of the run.
        * severity: only findings of this severity of the run.
        * limit: the most findings of the answer, 1 to 100.
        """
        client = self._client()
        if bool(run) == bool(trajectory):
            raise ToolRefused("Name a run, or a trajectory: one of the two.")
        if trajectory and (kind or severity):
            raise ToolRefused("kind and severity narrow the findings of a run. Leave them out for a trajectory.")
        if trajectory:
            findings = client.findings(trajectory=_code(trajectory), limit=_asked(limit))
        else:
            findings = client.findings(_code(run), kind=kind, severity=severity, limit=_asked(limit))
        return _listed("findings", findings, limit, lambda finding: _finding(client, finding))

    def get_finding(self, trajectory: str, number: int, content: bool = False) -> str:
        """One finding by its number in its trajectory, from 1, with a link to its tokens.

        * trajectory: its code.
        * number: of the finding, as list_findings tells it.
        * content: also the evidence, the texts and the token ids, which quote the rollout and are untrusted.
        """
        client = self._client()
        whole = client.finding(_code(trajectory), _count(number, "number"))
        finding = whole["finding"]
        answer = _finding(client, finding) | {"places": finding["places"]}
        if not content:
            return answer_text(answer)
        quoted = _of(finding, ("evidence", "expected_text", "actual_text"))
        return answer_text(answer, _json({**quoted, **_of(whole, ("expected_ids", "actual_ids"))}))

    def get_step(self, trajectory: str, step: int, content: bool = False, start: int = 0) -> str:
        """One engine call of a trajectory: lengths, sampling, why it ended.

        * trajectory: its code.
        * step: the engine call, counted from 0.
        * content: also its new messages, tools and reply, which are untrusted.
        * start: the character of the content to go on from.
        """
        whole = self._client().step(_code(trajectory), _count(step, "step"))
        answer = {"trajectory": trajectory, **whole["step"], "recorded": sorted(whole["recorded"])}
        return answer_text(answer, _json(whole["recorded"]) if content else None, _count(start, "start"))

    def compare_runs(self, runs: list[str], questions: bool = False) -> str:
        """Two to six runs side by side: figures, settings that differ, findings by kind.

        Its differences say what differs over the training steps, a sentence for each figure.

        * runs: codes, the first one first.
        * questions: also the prompts that the runs share, with their rewards.
        """
        if not 2 <= len(runs) <= MAX_COMPARED:
            raise ToolRefused(f"Name 2 to {MAX_COMPARED} runs; these are {len(runs)}.")
        client = self._client()
        comparison = client.compare([_code(run) for run in runs])
        fields = ("trained", "lost", "foreign", "template", "rows_template", "flawed", "muted")
        return answer_text({
            "runs": [_of(item["run"], RUN_FIELDS) | _of(item, fields) for item in comparison["runs"]],
            "settings": comparison["settings"],
            "kinds": [
                {**_of(kind, ("kind", "title")), "trajectories": [run["trajectories"] for run in kind["counts"]]}
                for kind in comparison["kinds"]
            ],
            **({"questions": comparison["questions"][:SHOWN_ITEMS]} if questions else {}),
            "differences": {
                chart["title"]: Sentence(chart["difference"])
                for chart in (comparison["overlay"] or {"charts": []})["charts"]
            },
            "url": f"{client.url}/runs/compare?" + "&".join(f"run={run}" for run in runs),
        })

    def get_training(self, run: str, training_min: int | None = None, training_max: int | None = None) -> str:
        """A run by training step: what changed and when, since when it has each kind of finding, causes, alarms.

        Ask this when a run gets worse. Its steps are all, or 20 evenly spaced ones.

        * run: its code.
        * training_min: the first training step.
        * training_max: the last training step.
        """
        client = self._client()
        training = client.training(_code(run), training_min=training_min, training_max=training_max)
        steps, alarms = training["steps"], client.alarms(run)["alarms"]
        spaced = sorted({round(n * (len(steps) - 1) / (SHOWN_ITEMS - 1)) for n in range(SHOWN_ITEMS)} if steps else ())
        gaps = [step["gap"] or {} for step in steps]
        return answer_text({
            "run": run, "n_steps": len(steps), "without_training_step": training["without"],
            "changes": [Sentence(sentence) for sentence in training["changes"]],
            "began": [
                {"kind": kind, "training_step": step, "remedy": Sentence(KINDS[kind].remedy) if kind in KINDS else ""}
                for kind, step in training["began"].items()
            ],
            "gap_causes": [_of(cause, ("cause", "title", "from_step")) for cause in training["gap_causes"]],
            "alarms": [
                {"sentence": Sentence(alarm["sentence"]), **_of(alarm, ("kind", "first_step", "worst_step", "holds"))}
                for alarm in alarms
            ],
            "notices": [Sentence(sentence) for sentence in training["notices"]],
            "steps": [{**_of(steps[n], STEP_FIGURES), "gap": gaps[n].get("mean_abs")} for n in spaced],
            **_at(client, f"/runs/{run}/training"),
        })

    def get_gap(self, run: str, tables: bool = False, content: bool = False) -> str:
        """How far trainer and sampler of a run are apart, which causes were found, and which are not decided.

        Its why_not says why there is no report.

        * run: its code.
        * tables: also the worst tokens, and the gap by training step and by part of the run.
        * content: also the texts of the worst tokens, which are untrusted.
        """
        client = self._client()
        gap = client.gap(_code(run))
        report = gap["report"]
        tokens = [] if report is None else [*report.get("worst", []), *report.get("ids", [])]
        texts = [_of(token, ("id", "text", "trajectory", "row", "offset")) for token in tokens if "text" in token]
        plain = {
            name: value for name, value in (report or {}).items()
            if tables or name in ("causes", "undecided", "measures") or not isinstance(value, list | dict)
        }
        return answer_text(
            {
                "run": run, "why_not": Sentence(gap["why_not"]), "stale": gap["stale"], "made_at": gap["made_at"],
                "job": gap["job"] and Sentence(gap["job"]["sentence"]),
                "report": None if report is None else _without_texts(plain), **_at(client, f"/runs/{run}/gap"),
            },
            _json(texts) if content else None,
        )

    def check_template(
        self, chat_template: str = "", tokenizer: str = "", label: str = "", wait_seconds: float = 60.0
    ) -> str:
        """Have the server check a chat template, and wait for the verdict. The token needs the scope launch.

        Call it again with the same question while progress is not empty: nothing is done twice.

        * chat_template: Jinja text; empty = the tokenizer's own.
        * tokenizer: a name that is registered on the server; empty = characters are compared.
        * label: what the chat template is called.
        * wait_seconds: how long to wait, 0 to 300.
        """
        client = self._client()
        check = self._waited(
            lambda: client.check_template(chat_template=chat_template, tokenizer=tokenizer, label=label),
            lambda check: client.check(check["code"]),
            lambda check: check["status"] in ENDED and not check["progress"], wait_seconds,
        )
        return answer_text(_checked(client, check))

    def propose_repair(self, check: str, content: bool = True) -> str:
        """The smallest verified change of a checked chat template: which probes it mends, and the change as a diff.

        * check: the code that check_template returned.
        * content: also the diff, which quotes the template: untrusted.
        """
        client = self._client()
        check_value = client.check(_code(check))
        repair = check_value["repair"]
        answer = _checked(client, check_value) | {
            "repair": repair and _of(repair, REPAIR_FIELDS), "repair_detail": check_value["repair_detail"],
            "wider": bool(repair and repair.get("wider")),
        }
        return answer_text(answer, repair["diff"] if repair and content else None)

    def fork(
        self, trajectory: str, row: int = 0, at: int = 1, token: int | None = None, finding: int | None = None,
        samples: int = 16, wait_seconds: float = 60.0,
    ) -> str:
        """Let the policy go on from a token of a row, and wait. The API key needs the scope launch.

        Of a finding both sides are continued with the same seeds; effects are broken - sampled, with 95 % intervals.

        * trajectory: its code.
        * row: the training row, counted from 0.
        * at: offset of the first token that is sampled again.
        * token: an id that stands at this place instead; null = none.
        * finding: number of a finding, in place of row and token; null = none.
        * samples: how many continuations, of each side.
        * wait_seconds: how long to wait, 0 to 300.
        """
        client = self._client()
        arguments = {"row": row, "at": at, "token": token, "finding": finding, "samples": samples}
        settings = {name: _count(value, name) for name, value in arguments.items() if value is not None}
        answer = self._waited(
            lambda: client.fork(_code(trajectory), **settings),
            lambda work: _only(client.forks(trajectory), [fork["run"] for fork in work["forks"]]),
            lambda work: all(fork["status"] in ENDED for fork in work["forks"]), wait_seconds,
        )
        return _forks_told(client, trajectory, answer)

    def get_forks(self, trajectory: str) -> str:
        """The forks of a trajectory with rewards, lengths and calls, and what breaks did to the policy.

        * trajectory: its code.
        """
        client = self._client()
        return _forks_told(client, trajectory, client.forks(_code(trajectory)))

    def _waited(
        self, ask: Callable[[], Mapping[str, Any]], look: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        has_ended: Callable[[Mapping[str, Any]], bool], wait_seconds: float,
    ) -> Mapping[str, Any]:
        """What is asked for, looked at until it has ended or the caller has waited long enough."""
        if not 0 <= wait_seconds <= MAX_WAIT_SECONDS:
            raise ToolRefused(f"wait_seconds is 0 to {MAX_WAIT_SECONDS:.0f}.")
        work, waited = ask(), 0.0
        while not has_ended(work) and waited < wait_seconds:
            self._pause(POLL_SECONDS)
            waited += POLL_SECONDS
            work = look(work)
        return work

    def link(self, trajectory: str, row: int = 0, start: int = 0, stop: int = 1) -> str:
        """The address of a range of tokens, for a person.

        * trajectory: its code.
        * row: the training row, counted from 0.
        * start: offset of the first token.
        * stop: offset behind the last token.
        """
        client = self._client()
        code, row = _code(trajectory), _count(row, "row")
        start, stop = _count(start, "start"), _count(stop, "stop")
        if stop <= start:
            raise ToolRefused(f"The range is empty: stop is {stop}, and start is {start}.")
        rows = client.rows(code)
        if row >= len(rows):
            raise ToolRefused(f"This trajectory has {len(rows)} rows, counted from 0; there is no row {row}.")
        if stop > rows[row]["n_tokens"]:
            raise ToolRefused(f"Row {row} has {rows[row]['n_tokens']:,} tokens, so stop is at most that.")
        url = f"{client.url}/trajectories/{code}?row={row}&view=tokens&t={start}-{stop}"
        return answer_text({"trajectory": code, "row": row, "url": url})


def tools_of(tools: AgentTools) -> Iterator[tuple[str, Callable[..., str]]]:
    """Name and method of each tool, in the order of this file."""
    for name in vars(AgentTools):
        if not name.startswith("_"):
            yield name, getattr(tools, name)


def refusal_of(error: ServerError) -> ToolRefused:
    """What a tool says where the server refuses: its sentence, on one line."""
    return ToolRefused(shown_text(str(error))[:500])


def _of(held: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: held[name] for name in names if name in held}


def _listed(
    noun: str, found: Iterator[dict[str, Any]], limit: int, line: Callable[[dict[str, Any]], dict[str, Any]]
) -> str:
    """The first items of a list, and whether there are more."""
    items = list(islice(found, limit + 1))
    return answer_text({noun: [line(item) for item in items[:limit]], "more": len(items) > limit})


def _asked(limit: int) -> int:
    """How many items the server is asked for: one more says that there are more."""
    if not 1 <= limit <= MAX_ITEMS:
        raise ToolRefused(f"limit is 1 to {MAX_ITEMS}.")
    return limit + 1


def _count(value: int, name: str) -> int:
    if not 0 <= value < 2**31:
        raise ToolRefused(f"{name} is a whole number, 0 or more.")
    return value


def _code(text: str) -> str:
    """A code as it stands in addresses: anything else could name another address of the server."""
    if not text or len(text) > 64 or set(text) - set(CODE):
        raise ToolRefused(f"{shown_text(text[:40])!r} is no code. Codes come from list_runs and list_trajectories.")
    return text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1)


def _at(client: Client, path: str) -> dict[str, str]:
    return {"url": f"{client.url}{path}"}


def _finding(client: Client, finding: Mapping[str, Any]) -> dict[str, Any]:
    """A finding without what it quotes. Its remedy is a sentence of the product."""
    url = finding["url"].removeprefix(client.url)
    return {**_of(finding, FINDING_FIELDS), "remedy": Sentence(finding["remedy"]), **_at(client, url)}


def _checked(client: Client, check: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict of a template check, without renders."""
    probes = [_of(probe, PROBE_FIELDS) for probe in check["probes"]]
    return {**_of(check, CHECK_FIELDS), "probes": probes, "has_repair": check["repair"] is not None,
            **_at(client, check["url"])}


def _only(answer: Mapping[str, Any], runs: list[str]) -> dict[str, Any]:
    """Of the forks of a trajectory those of some runs."""
    return {
        "forks": [fork for fork in answer["forks"] if fork["run"] in runs],
        "effects": [effect for effect in answer["effects"] if effect["sampled"] in runs],
    }


def _forks_told(client: Client, trajectory: str, answer: Mapping[str, Any]) -> str:
    """Forks without texts of the rollout, and the effects of breaks."""
    forks = [
        {
            **_of(fork, FORK_FIELDS),
            "samples": [
                {**_of(sample, SAMPLE_FIELDS), "error": shown_text(sample["error"])} for sample in fork["samples"]
            ],
        }
        for fork in answer["forks"]
    ]
    place = _at(client, f"/trajectories/{trajectory}/forks")
    return answer_text({"forks": forks, "effects": answer["effects"], **place})


def _without_texts(value: Any) -> Any:
    """A report without the texts of tokens, each list with its first items."""
    if isinstance(value, Mapping):
        return {
            name: Sentence(item) if name in OWN_TEXTS and isinstance(item, str) else _without_texts(item)
            for name, item in value.items() if name != "text"
        }
    if isinstance(value, list):
        return [_without_texts(item) for item in value[:SHOWN_ITEMS]]
    return value
