"""What the history of a run warns of: the Echo Trap's three symptoms (RAGEN, arXiv:2504.20073), hacking, echo and cut turns.

A history is a run's metric rows, as in metrics.jsonl. Promises:
- pure and deterministic: the same rows give the same alarms, so a resumed run needs no memory of its own;
- nothing raises: a missing, non-finite or non-numeric value is as if the row did not have it, and what is no row as if it
  were not there; a step that is there again, after a resume, counts once, and the rows that it replaces not at all;
- constant metrics never raise an alarm, nor do fewer than `min_rows` rows;
- a call looks at the newest `memory` steps only, whatever the length of the run: a few milliseconds; all it asks of those
  before is whether success was ever low.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from troupe.learner.health.remedies import Kind, advice
from troupe.learner.health.settings import HealthConfig
from troupe.learner.rewards import Array

Row: TypeAlias = Mapping[str, Any]
Detector: TypeAlias = Callable[[Sequence[Row], HealthConfig], "Alarm | None"]

_EARLY = " — the Echo Trap's early sign"
_FEW = 0.1
"""The extremes of a column are those without this share of its values at the end, one at least: an outlier sets none."""
_LASTED = 0.2
"""The share of a short history that a level must have held to count as one."""
_ABSURD = 1e100
"""Values beyond it are treated as not finite, because their squares are not; gradients below its inverse as 0."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A warning.

    since_step: the last step at which all was well (of hacking: the first of the steps looked at). seen: what, in numbers.
    advice: what to do; the settings as data are in `REMEDIES[kind]`.
    """

    kind: Kind
    since_step: int
    seen: str
    advice: str

    def __str__(self) -> str:
        return f"{self.seen}. See docs/health.md; {self.advice}."


def alarms(rows: Sequence[Row], config: HealthConfig | None = None) -> list[Alarm]:
    """All alarms that hold at the newest of `rows`."""
    config = config or HealthConfig()
    return [alarm for detect in DETECTORS if (alarm := detect(rows, config)) is not None]


def fresh(rows: Sequence[Row], config: HealthConfig | None = None) -> list[Alarm]:
    """The alarms at the newest row whose kind has been quiet over the `window` rows before: those to tell somebody."""
    config = config or HealthConfig()
    now = alarms(rows, config)
    before = {alarm.kind for back in range(1, config.window + 1) for alarm in (alarms(rows[:-back], config) if now else [])}
    return [alarm for alarm in now if alarm.kind not in before]


# -- the detectors ---------------------------------------------------------------------------------------------------


def reward_variance_cliff(rows: Sequence[Row], config: HealthConfig) -> Alarm | None:
    """The deviation of rewards within groups fell to `variance_ratio` of what it was, and success does not explain it.

    A deviation falls by itself when rewards come near their best: with a mean m between the lowest and the highest reward
    it can be at most √((high − m)(m − low)) (Bhatia and Davis, 2000; √(p(1 − p)) for a success rate p). So what is compared
    is the share of that which the groups show. Rewards within `margin` of the best or worst raise no alarm.
    A deviation that falls before success does is the Echo Trap's earliest sign (section 3 of the paper).
    """
    history, rows = rows, _tidy(rows, config)
    steps, sigma, room = _room(rows)
    shares = np.divide(sigma, room, out=np.zeros_like(sigma), where=room > 0)
    shift = _fall(steps, shares, config)
    if shift is None or _mastered(history, config) or _place(rows, config) <= config.margin:
        return None
    if shift.before < config.variance_floor or shift.now > config.variance_ratio * shift.before:
        return None
    if shares[-config.window :].max() > config.variance_peak * shift.before:
        return None
    then, now = _around(steps, sigma, shift, config)
    seen = f"reward σ fell from {_n(then)} to {_n(now)} {shift.when}"
    success = _told_success(rows, shift, config)
    return _alarm("reward_variance_cliff", shift, seen + success + _EARLY * success.startswith(" while"))


def entropy_collapse(rows: Sequence[Row], config: HealthConfig) -> Alarm | None:
    """Entropy fell to `entropy_ratio` of what it was, and there is something left to win."""
    history, rows = rows, _tidy(rows, config)
    shift = _fall(*_column(rows, "entropy"), config)
    if shift is None or _mastered(history, config):
        return None
    if shift.before < config.entropy_floor or shift.now > config.entropy_ratio * shift.before:
        return None
    seen = f"entropy fell from {_n(shift.before)} to {_n(shift.now)} nats {shift.when}"
    return _alarm("entropy_collapse", shift, seen + _told_success(rows, shift, config))


def gradient_spike(rows: Sequence[Row], config: HealthConfig) -> Alarm | None:
    """One of the newest `window` gradient norms lies far above those before it, on a logarithmic scale.

    Norms of 0 (nothing trained) do not count. A norm that is not finite never gets here: the trainer refuses it.
    """
    steps, norms = _column(_tidy(rows, config), "grad_norm")
    steps, norms = steps[norms > 1 / _ABSURD], norms[norms > 1 / _ABSURD]
    if len(norms) < config.min_rows + config.window:  # the median deviation of fewer is too rough
        return None
    logs, new = np.log(norms[: -config.window]), np.log(norms[-config.window :])
    median = float(np.median(logs))
    deviation = 1.4826 * float(np.median(np.abs(logs - median)))
    above = new - median
    beyond = np.flatnonzero((above > config.gradient_z * deviation) & (above > math.log(config.gradient_factor)))
    if not len(beyond):
        return None
    first, highest = len(logs) + int(beyond[0]), len(logs) + int(new.argmax())
    seen = (
        f"the gradient norm jumped to {_n(math.exp(new.max()))} at step {int(steps[highest])}, "
        f"{_n(math.exp(new.max() - median))} times its usual {_n(math.exp(median))}"
    )
    return Alarm("gradient_spike", int(steps[first - 1]), seen, advice("gradient_spike"))


def reward_hacking(rows: Sequence[Row], config: HealthConfig) -> Alarm | None:
    """A part of the reward rises while the outcome falls, both clearly, over `hacking_rows` rows.

    The outcome is the part "outcome" if the world names one, else success. Of several parts the clearest is told.
    """
    rows = _tidy(rows, config)
    prefix = "reward_part_"
    names = sorted({name for row in rows for name in row if isinstance(name, str) and name.startswith(prefix)})
    goal = f"{prefix}outcome" if f"{prefix}outcome" in names else "success"
    found: list[tuple[float, Alarm]] = []
    for name in names:
        steps, part, outcome = _together(rows, name, _column(rows, goal))
        if name == goal or len(part) < config.hacking_rows:
            continue
        steps, part, outcome = (x[-config.hacking_rows :] for x in (steps, part, outcome))
        up, down = _trend(part), _trend(outcome)
        if up < config.hacking_z or down > -config.hacking_z:
            continue
        third = len(part) // 3
        (p, q), (a, b) = ((float(x[:third].mean()), float(x[-third:].mean())) for x in (part, outcome))
        if q - p >= config.hacking_share * np.abs(part).max() and a - b >= config.hacking_share * np.abs(outcome).max():
            goal_name = goal.removeprefix(prefix)
            seen = (
                f"the reward part '{name.removeprefix(prefix)}' rose from {_n(p)} to {_n(q)} {_when(steps[0], steps[-1])} "
                f"while {goal_name} fell from {_n(a)} to {_n(b)}"
            )
            what = f"weigh it less (learner.reward_parts), gate it behind the outcome, {advice('reward_hacking')}"
            found.append((min(up, -down), Alarm("reward_hacking", int(steps[0]), seen, what)))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def echo(rows: Sequence[Row], config: HealthConfig) -> Alarm | None:
    """Responses to different tasks grew alike, and success did not rise with it."""
    history, rows = rows, _tidy(rows, config)
    steps, similarity = _column(rows, "self_similarity")
    shift = _fall(steps, 1 - similarity, config)  # the distance falls
    if shift is None or _mastered(history, config):
        return None
    if shift.before - shift.now < config.echo_rise or shift.now > config.echo_ratio * shift.before:
        return None
    then, now = _around(*_column(rows, "success"), shift, config)
    if now - then >= config.echo_gain:
        return None
    seen = f"self-similarity of the responses rose from {_n(1 - shift.before)} to {_n(1 - shift.now)} {shift.when}"
    return _alarm("echo", shift, seen + _told_success(rows, shift, config))


def overlong_turns(rows: Sequence[Row], config: HealthConfig) -> Alarm | None:
    """The share of turns cut by a token limit rose by `cut_rise`, whatever success does: answers no longer come to an end."""
    rows = _tidy(rows, config)
    steps, cut = _column(rows, "cut_turns")
    shift = _fall(steps, 1 - cut, config)  # the share that ends by itself falls
    if shift is None or shift.before - shift.now < config.cut_rise:
        return None
    seen = f"turns cut by a token limit rose from {_n(1 - shift.before)} to {_n(1 - shift.now)} of all {shift.when}"
    what = "punish overlong episodes (learner.overlong) or allow more tokens (rollout.max_tokens)"
    return Alarm("overlong_turns", shift.since, seen + _told_success(rows, shift, config), what)


DETECTORS: tuple[Detector, ...] = (
    reward_variance_cliff,
    entropy_collapse,
    gradient_spike,
    reward_hacking,
    echo,
    overlong_turns,
)


# -- how they look at rows -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shift:
    """A level that moved from `before` to `now`; since: the last step at which it was still nine tenths up."""

    before: float
    now: float
    since: int
    last: int

    @property
    def when(self) -> str:
        return _when(self.since, self.last)


def _fall(steps: Array, values: Array, config: HealthConfig) -> _Shift | None:
    """From the level before to the newest. A level has lasted: of the means over `window`, as many as two windows hold are at
    or above it (a fifth of them, while they are few). So no lucky mean sets it, and a level long left is not forgotten."""
    w = config.window
    if len(values) < config.min_rows:
        return None
    means = np.convolve(values, np.full(w, 1 / w), "valid")
    held = min(2 * w, math.ceil(_LASTED * (len(means) - w)))
    before, now = float(np.sort(means[:-w])[-held]), float(means[-1])
    if not now < before < math.inf:
        return None
    high = int(np.flatnonzero(means >= now + 0.9 * (before - now))[-1])
    return _Shift(before, now, int(steps[high + w - 1]), int(steps[-1]))


def _around(steps: Array, values: Array, shift: _Shift, config: HealthConfig) -> tuple[float, float]:
    """Means of `values` over the window that ends at the beginning of `shift`, and over the newest; NaN without any."""
    then, now = values[steps <= shift.since][-config.window :], values[-config.window :]
    return (float(then.mean()) if len(then) else math.nan, float(now.mean()) if len(now) else math.nan)


def _room(rows: Sequence[Row]) -> tuple[Array, Array, Array]:
    """Steps, σ within groups, and the most that it can be given the mean reward; 1 where nothing is known about it."""
    low, high = _extremes(rows)
    center = _column(rows, "reward_mean" if high > low else "success")
    if not len(center[0]):
        steps, sigma = _column(rows, "group_reward_std")
        return steps, sigma, np.ones(len(sigma))
    steps, sigma, mean = _together(rows, "group_reward_std", center)
    if high > low:  # a row that σ shows to have room has rewards beyond the extremes
        return steps, sigma, np.maximum(np.sqrt(np.maximum((high - mean) * (mean - low), 0.0)), sigma)
    return steps, sigma, np.sqrt(np.maximum((1 - mean) * mean, 0.0))


def _place(rows: Sequence[Row], config: HealthConfig) -> float:
    """Where the newest rewards lie between the worst, 0, and the best, 1; one half if nobody knows."""
    low, high = _extremes(rows)
    name, low, high = ("reward_mean", low, high) if high > low else ("success", 0.0, 1.0)
    _, mean = _column(rows, name)
    return (float(mean[-config.window :].mean()) - low) / (high - low) if len(mean) else 0.5


def _mastered(history: Sequence[Row], config: HealthConfig) -> bool:
    """Whether nothing is left to win: rewards near their best, or nearly every episode a success, where that says something,
    because more than half a `window` of the run's steps had fewer. Where luck decides what is paid, rewards stay far from
    their best."""
    rows = _tidy(history, config)
    if _place(rows, config) >= 1 - config.margin:
        return True
    _, success = _column(rows, "success")
    if not len(success) or float(success[-config.window :].mean()) < 1 - config.margin:
        return False
    all_of_them = (_number(row.get("success")) for row in history if isinstance(row, Mapping))
    return sum(value is not None and value < 1 - config.margin for value in all_of_them) > config.window // 2


def _extremes(rows: Sequence[Row]) -> tuple[float, float]:
    low, high = _column(rows, "reward_min")[1], _column(rows, "reward_max")[1]
    return (_lowest(low), -_lowest(-high)) if len(low) and len(high) else (0.0, 0.0)


def _lowest(values: Array) -> float:
    """The lowest of `values`, without a few."""
    return float(np.quantile(values, _FEW, method="higher"))


def _trend(values: Array) -> float:
    """Mann-Kendall: how far the rises among all pairs outnumber the falls, in deviations of chance."""
    n = len(values)
    rises = float(np.triu(np.sign(values[None, :] - values[:, None])).sum())
    return rises / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


def _tidy(rows: Sequence[Row], config: HealthConfig) -> Sequence[Row]:
    """The newest `memory` rows in the order of their steps; of a step that was taken again, the later."""
    kept: list[Row] = []
    earliest = math.inf
    for row in reversed(rows):
        step = _number(row.get("step")) if isinstance(row, Mapping) else None
        if step is not None and step < earliest:
            kept.append(row)
            earliest = step
        if len(kept) == config.memory:
            break
    return kept[::-1]


def _column(rows: Sequence[Row], name: str) -> tuple[Array, Array]:
    """Steps and values of the rows that have a usable number called `name`."""
    found = [(float(row["step"]), value) for row in rows if (value := _number(row.get(name))) is not None]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, np.float64), np.array(values, np.float64)


def _together(rows: Sequence[Row], name: str, other: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Steps, column `name` and the `other` column at the steps where both have a value."""
    steps, values = _column(rows, name)
    both, mine, theirs = np.intersect1d(steps, other[0], assume_unique=True, return_indices=True)
    return both, values[mine], other[1][theirs]


def _number(value: Any) -> float | None:
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < _ABSURD else None


def _alarm(kind: Kind, shift: _Shift, seen: str) -> Alarm:
    return Alarm(kind, shift.since, seen, advice(kind))


def _told_success(rows: Sequence[Row], shift: _Shift, config: HealthConfig) -> str:
    """How success fares meanwhile, for the end of a sentence."""
    then, now = _around(*_column(rows, "success"), shift, config)
    if math.isnan(then) or math.isnan(now):
        return ""
    if then - now > 0.25 * abs(then):
        return f" and success with it, from {_n(then)} to {_n(now)}"
    return f" while success is {'still ' if now <= then else ''}{_n(now)}"


def _when(first: float, last: float) -> str:
    return f"in {int(last - first)} steps"


def _n(value: float) -> str:
    """A number for people: .42, 1.3, 170, 2e-05."""
    if abs(value) >= 0.995 or value == 0:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) >= 0.01 else f"{value:.1g}"
