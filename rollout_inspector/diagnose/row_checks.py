"""Checks one training row: lengths, logprobs, advantages, shifts. ``mask_checks`` checks the mask. A check returns a
:class:`Fault` or None. Offsets count in the row."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.finding import Fault, Severity
from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS
from rollout_inspector.streams.snippets import counted
from rollout_inspector.streams.token_origins import mask_runs
from rollout_inspector.streams.trajectory import REWARD_COLUMNS, Floats, Mask, Row, Step

_LOGPROBS = ("logprob", "log_prob")
ROUTING = ("routed_experts", "rollout_expert_indices", "routing")
# Rounding of float16 and bfloat16 sums may raise the logprob of a certain token a little above 0.
_ROUNDING = 1e-3
# log(1e-45), the least of float32, is -103. Engines write -9999 or -1e30 in place of -inf.
_LEAST = -1000
MAX_REWARDS = 100  # Misplaced rewards that a fault marks.
LAGS = (1, -1, 2, -2)  # The shifts that are looked for: by how many tokens a column is behind its place.


def length_mismatch(row: Row) -> Fault | None:
    """A column and the ids differ in length."""
    n = len(row.ids)
    own = {"logprobs": row.logprobs, "origin": row.origin}
    columns = {"loss_mask": row.loss_mask, **row.columns, **{name: v for name, v in own.items() if v is not None}}
    wrong = {name: len(values) for name, values in columns.items() if len(values) != n}
    # A reader keeps a column of another length as it found it.
    for name, value in row.extra.items():
        if "advantage" in name or any(word in name for word in _LOGPROBS):
            values = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
            if isinstance(values, list) and len(values) > 1 and all(isinstance(v, int | float) for v in values[:4]):
                wrong[name] = len(values)
    if not wrong:
        return None
    what = ", ".join(f"{name} has {size}" for name, size in wrong.items())
    return Fault("length_mismatch", f"The row has {n} ids, but {what}.", min(n, *wrong.values()), n, wrong=n)


def mask_overrun(row: Row, has_other_roles: bool) -> Fault | None:
    """The mask is 1 on a whole row that has other roles, or is 1 nowhere."""
    n, trained = len(row.ids), row.n_trained
    if n and trained == n and has_other_roles:
        return Fault("mask_overrun", f"All {n} tokens of the row are under the gradient.", 0, n, wrong=n)
    if n and not trained and not _left_out(row):
        return Fault("mask_overrun", f"None of the {n} tokens of the row is under the gradient.", 0, n, lost=n)
    return None


def _left_out(row: Row) -> bool:
    """Whether the source says that the whole row is not trained."""
    value = row.extra.get("sample_loss_mask", row.extra.get("sample_mask"))
    while isinstance(value, list) and value:
        value = value[0]
    return value is not None and not value


def nonzero(values: Floats) -> Mask:
    """Where a column has a value other than 0. NaN counts as 0."""
    says: Mask = np.nan_to_num(values, nan=0.0, posinf=1.0, neginf=-1.0) != 0
    return says


def recorded(logprobs: Floats) -> Mask:
    """``[T]``: where a possible logprob other than 0 stands."""
    possible: Mask = (logprobs != 0) & _is_possible(logprobs)
    return possible


def _is_possible(logprobs: Floats) -> Mask:
    return (logprobs <= _ROUNDING) & (logprobs > _LEAST)


def columns_shifted(row: Row) -> Fault | None:
    """A column's zeros fit the mask's zeros, but at a lag other than 0."""
    for name, values in columns_of(row):
        says = nonzero(values)
        if says.all() or not says.any() or row.loss_mask.all() or not row.loss_mask.any():
            continue
        lag = _lag(says, row.loss_mask)
        if lag:
            return shift_fault(row, says, f"The {name} fit the mask exactly", lag)
    return None


def shift_fault(row: Row, right: Mask, what: str, lag: int) -> Fault:
    """The fault of a row whose mask differs from the ``right`` one by a shift. ``what`` begins the sentence."""
    places = np.flatnonzero(right != row.loss_mask)
    behind = "behind" if lag > 0 else "before"
    return Fault(
        "columns_shifted",
        f"{what} {counted(abs(lag), 'token')} {behind} {'its' if what.startswith('The mask') else 'their'} place.",
        int(places[0]), int(places[-1]) + 1,
        wrong=row.n_trained, places=tuple(mask_runs(right != row.loss_mask)) if what.startswith("The mask") else (),
    )


def columns_of(row: Row) -> Iterator[tuple[str, Floats]]:
    """The columns that have values on trained tokens only: sampling logprobs and advantages."""
    if row.logprobs is not None:
        yield "logprobs", row.logprobs
    for name, values in row.columns.items():
        if "advantage" in name:
            yield name, values


def _lag(says: Mask, mask: Mask) -> int:
    """By how many tokens the column is behind the mask. 0 when it fits in place, or fits nowhere better."""
    at_home = _misfit(says, mask, 0)
    if at_home < 2 or not (says & ~mask).any():
        return 0  # zeros at the start of a completion are certain tokens; a shift also moves values past its end
    best = min(LAGS, key=lambda lag: _misfit(says, mask, lag))
    there, here = _beside(says, mask, best)
    if (there & ~here).any():
        return 0  # a shift moves every value by the same lag
    # A shift shows at the edges of the mask. A certain token inside has a logprob of exactly 0 and fits at no lag.
    return best if (at_home - _misfit(says, mask, best)) * 5 >= _misfit(mask, mask, best) * 3 else 0


def _beside(says: Mask, mask: Mask, lag: int) -> tuple[Mask, Mask]:
    """The column, moved back by the lag, beside the mask, without what a shift moves over the row's ends."""
    n = len(mask)
    return says[max(lag, 0) : n + min(lag, 0)], mask[max(-lag, 0) : n - max(lag, 0)]


def _misfit(says: Mask, mask: Mask, lag: int) -> int:
    return int(np.count_nonzero(np.not_equal(*_beside(says, mask, lag))))


def logprob_invalid(row: Row) -> Fault | None:
    """A value under the gradient cannot be a logprob."""
    return None if row.logprobs is None else impossible_logprobs(row.logprobs, row.loss_mask, "trained")


def impossible_logprobs(logprobs: Floats, at: Mask, tokens: str) -> Fault | None:
    """Logprobs ``[T]`` that are impossible, or all 0, where ``at`` is true. ``tokens``: which these are, in a word."""
    bad, n = at & ~_is_possible(logprobs), int(np.count_nonzero(at))
    if bad.any():
        place = int(bad.argmax())
        return Fault(
            "logprob_invalid",
            f"The logprob at offset {place} is {logprobs[place]:g}; {int(bad.sum())} of "
            f"{n} {tokens} tokens have an impossible value.",
            place, place + 1, wrong=int(bad.sum()), places=tuple(mask_runs(bad)),
        )
    if n > 1 and not logprobs[at].any():
        return Fault(
            "logprob_invalid", f"The logprobs of all {n} {tokens} tokens are exactly 0.", int(at.argmax()),
            len(logprobs), wrong=n,
        )
    return None


def doubled_bos(row: Row, bos_id: int | None, stop_ids: frozenset[int]) -> Fault | None:
    """BOS stands twice where a document begins: at the start of the row, or behind a stop token in a packed one."""
    if bos_id is None or bos_id in stop_ids:
        return None
    places = [
        (start + 1, stop) for start, stop in mask_runs(row.ids == bos_id)
        if stop - start == 2 and (not start or int(row.ids[start - 1]) in stop_ids)  # more of them are padding
    ]
    if not places:
        return None
    what = f"BOS (id {bos_id}) stands twice where a document begins, at offset {places[0][0]}."
    return Fault("bos_mismatch", what, *places[0], places=tuple(places[1:] and places))


_CUT = frozenset((
    "length", "truncated", "max_tokens", "max_new_tokens", "max_output_tokens", "max_length", "max_model_len",
    "max_response_length", "context_length", "overlong",
))
_REASONS = frozenset(("finish_reason", "finish_reasons", "stop_reason", "stop_reasons", "stop_condition", "status"))
_FLAGS = frozenset(("truncated", "is_truncated", "overlong", "is_overlong"))
_HOLDERS = frozenset(("extra_fields", "extra_info", "metadata", "meta_info", "info"))


def was_cut(fields: Mapping[str, Any], stop_reason: str = "") -> bool:
    """Whether the source says that a limit cut the last completion: by a reason, or by a flag."""
    if stop_reason.lower() in _CUT:
        return True
    for name, value in fields.items():
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
        if name in _HOLDERS and isinstance(value, Mapping):
            if was_cut({key: item for key, item in value.items() if key not in _HOLDERS}):
                return True
        elif name in _REASONS:
            value = value.get("type") if isinstance(value, Mapping) else value
            if isinstance(value, str) and value.lower() in _CUT:
                return True
        elif name in _FLAGS and type(value) in (bool, int, float) and value == 1:
            return True
    return False


def advantage_misplaced(row: Row) -> Fault | None:
    """Masked tokens have advantages, or trained tokens have none."""
    for name, values in row.columns.items():
        if "advantage" not in name or len(values) != len(row.loss_mask):
            continue
        says = nonzero(values)
        none, extra = row.loss_mask & ~says, ~row.loss_mask & says
        # One value for every token is how some trainers write it. A masked loss ignores the masked ones.
        if not says.any() or not (none.any() or extra.any()) or (values == values[0]).all():
            continue
        n_none, n_extra = int(none.sum()), int(extra.sum())
        place = int((none | extra).argmax())
        parts = [f"{counted(n_none, 'trained token')} without one"] * bool(n_none)
        parts += [f"{counted(n_extra, 'masked token')} with one"] * bool(n_extra)
        return Fault(
            "advantage_misplaced", f"By {name}: {' and '.join(parts)}.",
            place, int(np.flatnonzero(none | extra)[-1]) + 1, wrong=n_none,
        )
    return None


def reward_misplaced(row: Row, is_last_step: bool | None = None) -> Fault | None:
    """A reward stands on a token at which no turn ends.

    ``is_last_step``: of a row of a step-wise batch, where the last token of the last step alone has a reward (SkyRL,
    https://docs.skyrl.ai/docs/tutorials/step-wise-training). None = of another row: each turn may have its own. Rewards
    on half of the trained tokens are of a process, or hold a penalty, and have no place.
    """
    for name in REWARD_COLUMNS:
        values = row.columns.get(name)
        if values is None or len(values) != len(row.ids) or not row.loss_mask.any():
            continue
        says, ends = nonzero(values), np.zeros(len(row.ids), np.bool_)
        if is_last_step is None and int((says & row.loss_mask).sum()) * 2 > row.n_trained > 2:
            continue
        runs = mask_runs(row.loss_mask)[-1 if is_last_step else None :]
        ends[[len(row.ids) - 1, *(stop - 1 for _, stop in runs)]] = True
        wrong, severity = np.flatnonzero(says if is_last_step is False else says & ~ends), None
        if not wrong.size and is_last_step is None and not row.loss_mask[-1]:  # a sum reads it, and GAE does not
            wrong, severity = np.flatnonzero(says[-1:]) + len(row.ids) - 1, Severity.INFO
        if wrong.size:
            where = "which is not the last step" if is_last_step is False else "where no turn ends"
            place = int(wrong[0])
            return Fault(
                "reward_misplaced",
                f"The {name} have {values[place]:g} at offset {place}, {where}. "
                + ("SkyRL reads the reward of the last step alone." if is_last_step is False else
                   f"The last trained token stands at {int(np.flatnonzero(row.loss_mask)[-1])}."),
                place, place + 1, places=tuple((offset, offset + 1) for offset in wrong[:MAX_REWARDS].tolist()),
                severity=severity,
            )
    return None


def logprobs_other_distribution(row: Row) -> Fault | None:
    """The trainer's logprobs are a multiple of the sampler's, or off by a constant: another temperature or filter."""
    if row.logprobs is None:
        return None
    name = next((name for name in TRAINER_LOGPROBS if name in row.columns), None)
    if name is None or len(row.columns[name]) != len(row.logprobs):
        return None
    use = row.loss_mask & np.isfinite(row.logprobs) & np.isfinite(row.columns[name]) & (row.logprobs < 0)
    if int(use.sum()) < 16:
        return None
    sampled: NDArray[np.float64] = row.logprobs[use].astype(np.float64)
    trained: NDArray[np.float64] = row.columns[name][use].astype(np.float64)
    shift = float(np.median(trained - sampled))
    spread = float(np.std(trained - sampled))
    slope = float(trained @ sampled / (sampled @ sampled))
    start, stop = int(use.argmax()), int(np.flatnonzero(use)[-1]) + 1
    if abs(shift) > 0.2 and spread < abs(shift) / 4:
        what = f"differ from the sampler's by a constant {shift:+.2f}"
    elif abs(slope - 1) > 0.15 and np.corrcoef(sampled, trained)[0, 1] > 0.97:
        what = f"are {slope:.2f} times the sampler's, as another temperature makes them"
    else:
        return None
    return Fault("logprobs_other_distribution", f"The trainer's {name} {what}.", start, stop, wrong=int(use.sum()))


def prompt_split_wrong(row: Row, written: Mask | None = None) -> Fault | None:
    """The prompt's length is the count of masked tokens, or of tokens that the assistant did not write. ``written``:
    what the assistant wrote ``[T]``, None when that is not known."""
    length = row.extra.get("prompt_length", row.extra.get("n_prompt"))
    if not isinstance(length, int) or not row.loss_mask.any():
        return None
    for mask, what, which in (
        (row.loss_mask, "masked tokens", "trained token"),
        (written, "tokens that the assistant did not write", "token of the assistant"),
    ):
        if mask is None or not (first := int(mask.argmax())) < length == len(row.ids) - int(np.count_nonzero(mask)):
            continue
        return Fault(
            "prompt_split_wrong",
            f"The prompt is said to be {length} ids long, which is the number of {what}; the first {which} stands at "
            f"{first}.",
            first, length, wrong=length - first,
        )
    return None


RowRule = Callable[[Row], Fault | None]
ROW_RULES: tuple[RowRule, ...] = (logprob_invalid, logprobs_other_distribution)
"""The checks that need nothing but the row and depend on no other check, in reading order."""


def routing_misaligned(extra: Mapping[str, Any], n_tokens: int) -> Fault | None:
    """Expert routing has neither ``n - 1`` rows nor ``n`` (padded)."""
    for name in ROUTING:
        n = routing_rows(extra.get(name))
        if n is not None and n not in (n_tokens - 1, n_tokens):
            return Fault(
                "routing_misaligned", f"{name} has {n} rows for {n_tokens} tokens; {n_tokens - 1} rows are right.",
                min(n, n_tokens), n_tokens,
            )
    return None


def routing_rows(value: Any) -> int | None:
    """How many rows of expert routing a source recorded. None when the value is not such a record."""
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim):
        return len(value)
    if isinstance(value, Mapping):  # the summary that an import keeps (rollout_inspector.formats.engine_fields)
        return value["length"] if type(value.get("length")) is int else None
    if isinstance(value, str) and value.startswith("nrlre1:"):  # nrlre1:<dtype>:<rows>x<layers>x<experts>:<base64>
        parts = value.split(":", 3)
        rows = parts[2].split("x")[0] if len(parts) > 2 else ""
        return int(rows) if rows.isascii() and rows.isdigit() and len(rows) < 10 else None
    return None


RUN_LENGTHS = "version_rle"  # The key in ``extra`` with pairs (version, tokens) over the row, as AReaL writes them.
OF_TOKENS = "policy_versions"  # The key in ``extra`` with one version for each token, or with such pairs.


def run_lengths(value: Any) -> list[tuple[str, int]] | None:
    """Pairs (version, tokens), also of spans as vLLM and SGLang write them; None = it is something else."""
    if not isinstance(value, list) or not value:
        return None
    pairs: list[tuple[str, int]] = []
    for item in value:
        if isinstance(item, Mapping) and all(type(item.get(bound)) is int for bound in ("start", "end")):
            item = item.get("version", ""), max(item["end"] - item["start"], 0)
        if not isinstance(item, list | tuple) or len(item) != 2 or not isinstance(item[1], int) or item[1] < 0:
            return None
        pairs.append((str(item[0]), item[1]))
    return pairs


def step_versions(step: Step) -> list[str]:
    """The distinct versions that sampled a completion, in order of appearance; empty = not recorded. ``extra`` of the
    step holds runs of (version, tokens) where the weights changed during the call."""
    runs = run_lengths(step.extra.get(OF_TOKENS)) or run_lengths(step.extra.get("weight_versions")) or []
    versions = [version for version, count in runs if version and count]
    return list(dict.fromkeys(versions)) or [step.policy_version] * bool(step.policy_version)


def trained_versions(row: Row) -> list[str]:
    """The distinct versions that sampled the tokens under the loss mask, in order of appearance. What is recorded is as
    long as the row or as its trained tokens; in another length, or without a mask for each token, it tells nothing.
    Empty = not recorded."""
    n, n_trained = len(row.ids), row.n_trained
    if len(row.loss_mask) != n:
        return []
    for key in (RUN_LENGTHS, OF_TOKENS):
        value = row.extra.get(key)
        pairs = run_lengths(value)
        if pairs is None and isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
            pairs = [("" if item is None else str(item), 1) for item in value]
        total = sum(count for _, count in pairs or ())
        if not pairs or total not in (n, n_trained):
            continue
        at = accumulate((count for _, count in pairs), initial=0)
        return list(dict.fromkeys(
            version for (version, count), start in zip(pairs, at, strict=False)
            if version and count and (total == n_trained or row.loss_mask[start : start + count].any())
        ))
    return []
