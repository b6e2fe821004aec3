"""RUN/timeline.json and the sums over a run: a trace that opens whatever was killed, bounded, in which nothing is twice."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.actors.test_env_pool import Trouble, ask, folder, pool_of
from tests.laws.conftest import SimulatedRun, model_folder, simulated_run
from troupe.actors import timeline, trace_file
from troupe.actors.trace_file import TraceFile, pid_of
from troupe.cluster.run import Run
from troupe.protocol.messages import GetSpans, Span, Spans
from troupe.protocol.spans import InFlight, SpanLog

assert simulated_run and model_folder and pool_of and folder  # fixtures


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def check(events: list[dict[str, Any]]) -> None:
    """Holds a trace to the format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    tracks: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    pairs: defaultdict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    named: defaultdict[str, set[int]] = defaultdict(set)
    for event in events:
        assert event["ph"] in ("M", "X", "C", "b", "e") and isinstance(event["name"], str) and isinstance(event["pid"], int)
        assert json.dumps(event).isascii()
        assert not any(isinstance(value, list | dict) for value in event.get("args", {}).values())
        if event["ph"] == "M":
            named[event["name"]].add(event.get("tid", event["pid"]))
            continue
        assert isinstance(event["ts"], int) and isinstance(event["tid"], int)
        assert event["tid"] in named["thread_name"] and event["pid"] in named["process_name"]
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        else:
            pairs[event["cat"], event["id"]].append((event["ph"], event["ts"]))
    assert len({tid for _, tid in tracks}) == len(tracks), "a thread belongs to one process"
    for spans in tracks.values():
        open_until: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "spans of one track nest"
            open_until.append(end)
    for (first, begin), (second, end) in pairs.values():
        assert (first, second) == ("b", "e") and begin <= end


def episodes(events: list[dict[str, Any]]) -> Counter[str]:
    """How often each attempt is in the trace."""
    return Counter(event["args"]["id"] for event in events if event["ph"] == "b" and event["name"] == "episode")


# -- the file --------------------------------------------------------------------------------------------------------


def answer(log: SpanLog, file: TraceFile) -> Spans:
    born, count = file.heard.get("learner", (0.0, 0))
    return log.told("learner", GetSpans(count if born == log.born else 0))


@settings(max_examples=150)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.floats(0, 1), st.integers(0, 3))
def test_a_file_that_was_cut_anywhere_goes_on_with_each_span_in_it_once(looks: list[int], where: float, more: int) -> None:
    log, made = SpanLog(), itertools.count()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "timeline.json"
        file = TraceFile(str(path))

        def work(count: int) -> None:
            for number in itertools.islice(made, count):
                log.add(f"work {number}", log.born + number, log.born + number + 0.5)

        for count in looks:
            work(count)
            file.append([answer(log, file)])
            check(read(path))
        whole = path.read_bytes()
        path.write_bytes(whole[: round(where * len(whole))])
        file = TraceFile(str(path))
        work(more)
        file.append([answer(log, file)])
        check(read(path))
        found = [event["name"] for event in read(path) if event["ph"] == "X"]
        assert sorted(found) == sorted(f"work {number}" for number in range(sum(looks) + more))


def test_a_file_is_bounded_and_what_it_leaves_behind_opens_too(tmp_path: Path) -> None:
    path, limit = tmp_path / "timeline.json", 20_000
    file, log = TraceFile(str(path), limit), SpanLog()
    for number in range(100):
        for _ in range(10):
            log.add("work", log.born + number, log.born + number + 0.5)
        file.append([answer(log, file)])
        assert path.stat().st_size <= limit
        check(read(path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["timeline.json", "timeline.old.json"]
    old = read(tmp_path / "timeline.old.json")
    check(old)
    assert max(e["ts"] for e in old if "ts" in e) < min(e["ts"] for e in read(path) if "ts" in e), "the newest is kept"
    assert TraceFile(str(path), limit).heard == {"learner": (log.born, 1000)}


def test_of_what_would_not_fit_the_newest_is_written(tmp_path: Path) -> None:
    path, limit = tmp_path / "timeline.json", 20_000
    file = TraceFile(str(path), limit)
    for born in (0.0, 1000.0):
        learner = Spans("learner", born, 500, [Span("work", born + n, born + n + 0.5) for n in range(500)], {})
        store = Spans("store", born, 500, [Span("commit", born + n, born + n + 0.5) for n in range(500)], {})
        file.append([learner, store])
        events = read(path)
        check(events)
        assert path.stat().st_size <= limit
        for name in ("work", "commit"):
            begun = [event["ts"] / 1e6 - born for event in events if event["name"] == name]
            assert begun == list(range(500 - len(begun), 500)) and len(begun) > 50
    assert file.heard == {"learner": (1000.0, 500), "store": (1000.0, 500)}


def test_a_file_of_something_else_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    for content in (b"", b"{}", b'[\n{"name":"heard"', b'{"name":"heard","args":{"spans":"learner=x/y"}}\n', b"\x00\xff"):
        path.write_bytes(content)
        file = TraceFile(str(path))
        assert file.heard == {}
        file.append([Spans("store", 1.0, 1, [Span("commit", 1.0, 2.0)], {})])
        check(read(path))


def test_every_actor_of_a_run_has_a_number_of_its_own() -> None:
    names = ["director", "learner", "dispatcher", "store", "evaluator"]
    names += [f"{kind}-{number}" for kind in ("generator", "env") for number in range(2_000)]
    assert len({pid_of(name) for name in names}) == len(names)


# -- a whole run -----------------------------------------------------------------------------------------------------


def test_a_run_tells_what_everybody_did_when(simulated_run: Any) -> None:
    run: SimulatedRun = simulated_run()
    run.play(0)
    events = read(run.folder / "timeline.json")
    check(events)
    seen = {(event["pid"], event["name"]) for event in events if event["ph"] != "M"}
    wanted: dict[str, tuple[str, ...]] = {
        "director": ("start actors", "demonstrations", "cold start", "step", "wait for batch", "train", "sync weights"),
        "learner": ("cold start", "train", "snapshot", "save"),
        "store": ("commit", "read batch"),
        "generator-1": ("sampling", "requests in flight", "load weights"),
        "env-1": ("playing", "episode", "running episodes"),
    }
    wanted["director"] += ("evaluate", "checkpoint", "measure", "staleness")
    assert {(pid_of(name), span) for name, spans in wanted.items() for span in spans} <= seen
    ran = Run(run.folder).trajectories().select(["id", "attempt"]).to_pylist()
    assert episodes(events) == Counter(f"{row['id']}/{row['attempt']}" for row in ran)
    told = run.summary()["time"]
    assert sum(told["shares"].values()) == pytest.approx(1.0) and min(told["shares"].values()) >= 0
    assert told["seconds"]["granted"] == len(ran), "of the time before the first look, too"
    assert told["seconds"]["episodes"] == len(ran) and told["seconds"]["wall"] <= run.summary()["wall_s"] + 1
    assert told["episode"]["world"] == pytest.approx(0.4), "two turns of 0.2 s"
    parts = sum(seconds for name, seconds in told["episode"].items() if name != "seconds")
    assert 0.9 * told["episode"]["seconds"] < parts <= told["episode"]["seconds"] + 1e-6
    for row in Run(run.folder).metrics():
        parts = [row[f"{name}_s"] for name in ("training", "sync", "evaluation", "checkpoint", "measuring")]
        assert row["waited_s"] + sum(parts) <= row["interval_s"] + 1e-6


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_whoever_dies_the_trace_opens_and_has_nothing_twice(simulated_run: Any, seed: int) -> None:
    run: SimulatedRun = simulated_run(steps=6)
    run.play(seed, crashes=6, until_s=25.0)
    events = read(run.folder / "timeline.json")
    check(events)
    assert max(episodes(events).values()) == 1
    assert sum(run.summary()["time"]["shares"].values()) == pytest.approx(1.0)


def test_a_director_that_dies_loses_only_what_it_did_itself(simulated_run: Any) -> None:
    run: SimulatedRun = simulated_run(steps=6)
    deaths = 0

    original = timeline.Timeline.look

    async def look(self: timeline.Timeline, *args: Any) -> dict[str, float]:
        nonlocal deaths
        found = await original(self, *args)
        if deaths < 3:  # what was heard is in the file, and nobody acted on it
            deaths += 1
            run.simulation.crash("director")
            await asyncio.sleep(0)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline.Timeline, "look", look)
        run.play(1)
    assert deaths == 3 and run.summary()["finished"]
    events = read(run.folder / "timeline.json")
    check(events)
    ran = Run(run.folder).trajectories().select(["id", "attempt"]).to_pylist()
    assert episodes(events) == Counter(f"{row['id']}/{row['attempt']}" for row in ran)
    assert run.summary()["time"]["seconds"]["granted"] < len(ran), "what was for directors before is not counted again"
    looked = Counter((e["name"], e["args"]["step"]) for e in events if e["pid"] == pid_of("learner") and e["name"] == "train")
    assert looked == {("train", step): 1 for step in range(1, 7)}


# -- what is told of it ----------------------------------------------------------------------------------------------


def test_learning_beside_sampling_is_the_share_of_training_in_which_generators_had_work() -> None:
    def of(name: str, *moments: tuple[float, float]) -> Spans:
        return Spans(name, 0.0, 0, [], {}, list(moments))

    learner = of("learner", (0.0, 4.0), (10.0, 14.0))
    others = [of("generator-0", (1.0, 3.0)), of("generator-1", (2.0, 5.0), (13.0, 20.0))]
    assert timeline._together([learner, *others, of("store", (0.0, 30.0))]) == (4.0, 8.0)
    assert timeline._together([learner]) == (0.0, 8.0)
    assert timeline._together(others) == (0.0, 0.0)


class Actors:
    """The context of a director with very many actors, of which each has worked for ten minutes, with two pauses a second."""

    def __init__(self) -> None:
        self.name, self.clock, self.moment = "director", self, 1000.0
        self.logs = {name: SpanLog(self.now, busy=busy) for name, busy in (("learner", "train"), ("generator-0", "sampling"))}
        requests = InFlight(self.logs["generator-0"], "sampling", "requests in flight")
        for _ in range(1200):
            with requests:
                self.moment += 0.45
            self.moment += 0.05
        requests.cut()
        self.logs["learner"].add("train", 1000.0)

    def now(self) -> float:
        return self.moment

    def ref(self, name: str, cls: Any) -> Any:
        log = self.logs.get(name, self.logs["generator-0"])

        async def spans(message: GetSpans) -> Spans:
            return log.told(name, message)

        return SimpleNamespace(spans=spans)


@pytest.mark.parametrize("pools", [2, 1008])
async def test_overlap_is_true_in_long_steps_and_large_companies_and_the_trace_is_bounded(tmp_path: Path, pools: int) -> None:
    context: Any = Actors()
    heard = timeline.Timeline(context, str(tmp_path / "timeline.json"), {})
    heard.own.add("step", 1000.0)
    heard._looked = 1000.0
    found = await heard.look(["learner", "generator-0", *(f"env-{number}" for number in range(pools))], None)
    assert found["overlap"] == pytest.approx(0.9, abs=1e-3)
    lines = sum(event["ph"] in "XC" for event in read(tmp_path / "timeline.json"))
    assert lines <= timeline.SPANS and (tmp_path / "timeline.json").stat().st_size < trace_file.LIMIT


async def test_a_turn_notes_nothing_and_sends_nothing(pool_of: Any) -> None:
    counts = []
    for turns in (1, 3):
        pool, context = await pool_of("fine")
        await pool.run_episode(ask(0, max_turns=turns))
        assert len(context.deposits[0].steps) == turns
        found = await pool.spans(GetSpans())
        counts.append(sum(span.value is None for span in found.spans))
    assert counts == [2, 2], "the episode, and that the pool was playing"


async def test_an_episode_tells_where_its_time_went(pool_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trouble, "close", lambda self: time.sleep(0.05))
    pool, _ = await pool_of("fine")
    await pool.run_episode(ask(0))
    found = await pool.spans(GetSpans())
    (episode,) = [span for span in found.spans if span.name == "episode"]
    assert episode.labels["id"] == "e0/0" and episode.labels["turns"] == 3 and episode.labels["world_s"] >= 0.05
    parts = sum(episode.labels[f"{name}_s"] for name in ("generating", "world", "verifying", "storing"))
    assert parts <= episode.end - episode.begin + 1e-3
    assert found.totals["episodes"] == 1 and found.totals["world"] >= 0.05
