"""Search: what is asked can be found and only by searching, answers are judged as they should, held-out entities stay so."""

import asyncio
import json
import sqlite3

import numpy as np
import pytest

from troupe.actors.loops.base import Outcome, Stage
from troupe.actors.loops.react import react
from troupe.actors.recorder import Recorder
from troupe.envs import check, fiction, search
from troupe.envs.base import Task
from troupe.envs.drive import Driver
from troupe.envs.search import Search
from troupe.protocol.errors import BadArguments, ConfigError, InvalidAction, TaskFailed
from troupe.protocol.messages import Generated, Limits, RunEpisode, Sampling
from troupe.protocol.trajectory import POLICY

WORDS = {"town": "town in the province", "person": "who was born", "publisher": "publishing house", "book": "book by"}
R1_SEARCHER = {"outcome": "f1", "retrieval": 0.5, "format": 0.5, "penalty": 2.0}


async def opened(split="train", seed=0, **options):
    driver = Driver(Search(**options))
    return driver, await driver.reset(Task("x", "search", split, seed))


async def looked_up(driver):
    """One search for each entity on the way to the answer; whether each was found."""
    path = driver.world.question.path
    found = [(await driver.call("search", {"query": f"{one.name} {WORDS[one.kind]}"})).text for one in path]
    return all(one.text in text for one, text in zip(path, found, strict=True))


@pytest.mark.parametrize("split", ["train", "heldout"])
async def test_as_many_searches_as_hops_are_enough_for_every_question(split):
    hops = set()
    for seed in range(60):
        driver, _ = await opened(split, seed)
        assert await looked_up(driver)
        hops.add(driver.world.searches)
        turn = await driver.step(f"<answer>{driver.world.question.answer}</answer>")
        assert (turn.done, turn.success, turn.reward, turn.parts) == (True, True, 1.0, {"outcome": 1.0})
    assert hops == {1, 2}


async def test_a_question_of_two_hops_is_not_answered_by_searching_for_it_once():
    answered = 0
    for seed in range(60):
        driver, question = await opened(seed=seed, hops=2)
        assert len(driver.world.question.path) == 2
        answered += driver.world.question.path[1].text in (await driver.call("search", {"query": question})).text
    assert answered < 3


def test_no_fact_of_a_held_out_entity_is_asked_for_in_training():
    train, heldout = (search._questions(0, 0, split) for split in ("train", "heldout"))
    held_out = {q.path[0].name for q in heldout} - {q.path[0].name for q in train}
    assert not {entity.name for q in train for entity in q.path} & held_out and len(held_out) > 40
    assert len(train) + len(heldout) == len(list(fiction.questions(fiction.write(0))))
    assert not {q.text for q in train} & {q.text for q in heldout}


async def test_another_split_is_no_task():
    with pytest.raises(TaskFailed, match="unknown split 'test'"):
        await opened("test")


@pytest.mark.parametrize(
    ("said", "exact", "f1"),
    [
        ("<answer>{}</answer>", 1, 1),
        ("I looked it up. <answer> The {}. </answer>\n", 1, 1),
        ("<answer>in {}</answer>", 0, 2 / 3),
        ("<answer>nowhere</answer><answer>{}</answer>", 1, 1),  # the last one is meant, but it is not well-formed
        ("<answer>{}</answer> I think", 1, 1),
        ("{}", 0, 0),
        ("<answer>{}", 0, 0),
        ("<answer></answer>", 0, 0),
        ("<answer>nowhere</answer>", 0, 0),
        ("", 0, 0),
        pytest.param("x" * 5_000 + "<answer>{}</answer>", 0, 0, id="beyond what is read"),
    ],
)
async def test_an_answer_is_worth_what_stands_between_the_marks(said, exact, f1):
    for outcome, worth in (("exact", exact), ("f1", f1)):
        driver, question = await opened(seed=4, outcome=outcome)
        assert question.startswith("In which town") and " " not in driver.world.question.answer
        turn = await driver.step(said.format(driver.world.question.answer))
        assert turn.done and turn.reward == pytest.approx(worth) and turn.success is bool(exact)


@pytest.mark.parametrize(
    ("said", "formed"),
    [
        ("<answer>x</answer>", True),
        ("well: <answer>x</answer> \n", True),
        ("<answer>x</answer> y", False),
        ("<answer>x</answer><answer>y</answer>", False),
        ("<answer> </answer>", False),
        ("x", False),
    ],
)
@pytest.mark.parametrize("searches", [0, 1, 3])
async def test_searching_and_form_are_named_parts_of_the_reward(said, formed, searches):
    driver, question = await opened(**R1_SEARCHER)
    for _ in range(searches):
        await driver.call("search", {"query": question})
    turn = await driver.step(said)
    parts = {"outcome": 0.0, "retrieval": 0.5 * bool(searches), "format": 0.5 * formed, "penalty": 0.0 if formed else -2.0}
    assert turn.parts == parts and turn.reward == sum(parts.values()) and turn.success is False


async def test_an_episode_that_a_limit_ends_has_no_answer():
    driver, question = await opened(**R1_SEARCHER)
    await driver.call("search", {"query": question})
    assert (await driver.verify()).parts == {"outcome": 0.0, "retrieval": 0.5, "format": 0.0, "penalty": -2.0}


async def test_a_search_gives_the_best_passages_first_and_as_many_as_are_asked_for():
    driver, _ = await opened(passages=5)
    one = next(entity for entity in fiction.write(0) if entity.kind == "book")
    lines = (await driver.call("search", {"query": one.name})).text.splitlines()
    assert [line[:4] for line in lines] == [f"[{n}] " for n in range(1, 6)] and lines[0] == f"[1] {one.text}"
    assert (await driver.call("search", {"query": "zebra crossing"})).text == "Nothing was found."
    assert driver.world.searches == 2


@pytest.mark.parametrize("query", ["", " ", "?!", "\u202e", "_ _"])
async def test_a_query_without_words_is_told_and_is_no_search(query):
    driver, _ = await opened(**R1_SEARCHER)
    with pytest.raises(InvalidAction, match="no words"):
        await driver.call("search", {"query": query})
    with pytest.raises(BadArguments):
        await driver.call("search", {})
    assert driver.world.searches == 0


@pytest.mark.parametrize("query", ['"', "a AND b", "NEAR(a b)", "name : x*", "x' OR '1'='1", "-x ^y {z}", "\x00x", "\ud800x"])
async def test_the_engines_own_syntax_is_only_words(query):
    driver, _ = await opened()
    try:
        assert (await driver.call("search", {"query": query})).text
    except InvalidAction as error:
        assert "no words" in str(error)


async def test_the_state_key_is_what_is_known():
    driver, _ = await opened()
    first = driver.state_key()
    await looked_up(driver)
    other, _ = await opened()
    assert first == other.state_key() != driver.state_key()


async def test_another_library_is_another_world():
    questions = {(await opened(seed=seed, library=library))[1] for library in (0, 1) for seed in range(3)}
    assert len(questions) == 6


@pytest.mark.parametrize(
    "options",
    [{"hops": 3}, {"passages": 0}, {"passages": 21}, {"outcome": "F1"}, {"retrieval": -1}, {"penalty": float("nan")}],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="it is"):
        Search(**options)


def test_a_python_without_full_text_search_is_told_in_one_line(monkeypatch):
    class Without:
        def execute(self, *_):
            raise sqlite3.OperationalError("no such module: fts5")

    monkeypatch.setattr(search.sqlite3, "connect", lambda *_, **__: Without())
    with pytest.raises(ConfigError, match=r"no such module: fts5.*use a Python whose sqlite3 has FTS5"):
        search.Index(fiction.write(0))


@pytest.mark.parametrize("hops", [1, 2])
def test_the_scripted_player_searches_hop_by_hop_and_is_right_unless_it_plays_at_random(hops):
    score = check.player_score(Search, {"hops": hops}, n=40)
    assert (score.success, score.reward, score.turns) == (1.0, 1.0, hops + 1)
    assert check.player_score(Search, {"hops": hops}, n=40, noise=1.0).success < 0.1


def test_it_conforms():
    report = check.check(Search, R1_SEARCHER, episodes=6)
    assert report.ok, str(report)


class Agent:
    """Speaks as an engine does: searches for what is asked, then answers."""

    def __init__(self, rendering, driver):
        self.rendering, self.driver, self.turn = rendering, driver, 0

    async def generate(self, request):
        question = self.driver.world.question
        asked = json.dumps({"name": "search", "arguments": {"query": question.text}})
        said = [f"<tool_call>\n{asked}\n</tool_call>", f"<answer>{question.answer}</answer>"][self.turn]
        self.turn += 1
        ids = [*self.rendering.encode_marks(said), self.rendering.stop_ids[0]]
        return Generated(np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")


@pytest.mark.parametrize("name", ["tiny", "qwen3"])
async def test_retrieved_text_is_an_observation_and_only_what_the_agent_said_is_trained(renderings, name):
    rendering, driver = renderings[name], Driver(Search(hops=1))
    task = Task("train/0", "search", "train", 0)
    limits, outcome = Limits(max_turns=6, max_episode_tokens=100_000), Outcome()
    agent = Agent(rendering, driver)
    message = RunEpisode("e", 0, 0, 0, "train", 1, task, Sampling(max_tokens=4_000), limits, seed=0)
    record = Recorder(message, rendering, agent)
    await asyncio.wait_for(react(Stage(driver, Search.system, task, record, limits, outcome)), 60)
    assert (outcome.stop, outcome.success, [len(step.calls) for step in outcome.steps]) == ("terminated", True, [1, 0])

    trained = "".join(rendering.decode(node.tokens[node.provenance == POLICY].tolist()) for node in record.nodes)
    fed = "".join(rendering.decode(node.tokens[node.provenance != POLICY].tolist()) for node in record.nodes)
    passage = driver.world.question.path[0].text
    assert passage in fed and passage not in trained and "[1]" not in trained
    assert trained.count("<answer>") == 1 and driver.world.question.text in trained  # as the query that it wrote
    retrieved = [node for node in record.nodes if node.role == "tool"]
    assert len(retrieved) == 1 and not (retrieved[0].provenance == POLICY).any() and not len(retrieved[0].logprobs)
