"""Environments of skyrl-gym: the user's rows, its own step, and no program of the agent's in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from troupe.envs import registry, sandbox
from troupe.envs.base import Turn
from troupe.envs.check import check, player_score
from troupe.envs.drive import Driver
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction

pytest.importorskip("skyrl_gym", reason="needs skyrl-gym: pip install 'troupe-rl[skyrl-gym]'")

BOXED = pytest.mark.skipif(bool(sandbox.missing("bubblewrap")), reason=f"needs a sandbox: {sandbox.missing('bubblewrap')}")


def rows(count: int, truth: Any = "7") -> list[dict[str, Any]]:
    return [
        {
            "data_source": "mine",
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Question {n}?"}],
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": truth},
            "extra_info": {"index": n},
        }
        for n in range(count)
    ]


def written(path: Path, what: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(what), path)
    else:
        path.write_text("\n".join(map(json.dumps, what)))
    return str(path)


def played(name: str, *actions: str, split: str = "train", **options: Any) -> list[Any]:
    async def play() -> list[Any]:
        driver = Driver(registry.make(registry.find(f"skyrl_gym:{name}"), options), timeout_s=60)
        seen: list[Any] = [await driver.reset(driver.world.task(split, 0))]
        for action in actions:
            seen.append(await driver.step(action))
        await driver.close()
        return seen

    return asyncio.run(play())


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_multi_turn"])
def test_an_environment_is_a_good_world_whose_player_knows_the_answers(name: str) -> None:
    world = registry.find(f"skyrl_gym:{name}")
    report = check(world, episodes=6)
    assert report.ok, str(report)
    assert player_score(world, n=20).success == 1.0
    assert player_score(world, n=20, noise=1.0).success < 0.5


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_tasks_come_from_the_users_rows_and_each_is_of_one_split(kind: str, tmp_path: Path) -> None:
    data = written(tmp_path / f"mine.{kind}", rows(40))
    seen, turn = played("gsm8k", "It is #### 7", data=data)
    assert seen.startswith("Be brief.\n\nQuestion ")
    assert (turn.reward, turn.done, turn.success) == (1.0, True, True)
    world = registry.find("skyrl_gym:gsm8k")
    assert check(world, {"data": data}, episodes=4).ok


def test_turns_are_paid_as_skyrl_pays_them(tmp_path: Path) -> None:
    data = written(tmp_path / "mine.jsonl", rows(10))
    _, first, second, third = played("gsm8k_multi_turn", "hm", "#### 8", "#### 7", data=data, turns=4)
    assert [first.reward, second.reward, third.reward] == pytest.approx([0.0, 0.05, 1.0])
    assert "#### ANSWER" in first.text and third.done and third.success


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("gsm8q", {}, "Did you mean 'gsm8k'?"),
        ("gsm8k", {"data": "mine.csv"}, "it is a .parquet or a .jsonl file"),
        ("gsm8k", {"data": "no.jsonl"}, "no.jsonl cannot be read"),
        ("gsm8k", {"data": "{dir}/odd.jsonl"}, "row 1 of {dir}/odd.jsonl has no prompt"),
        ("gsm8k", {"turn": 3}, "Did you mean 'turns'?"),
        ("search", {"url": "http://127.0.0.1:9/retrieve"}, "name a .parquet or .jsonl file"),
        ("search", {"data": "{dir}/good.jsonl"}, "url is ''; it is a retriever's"),
        ("lcb", {"sandbox": {"backend": "subprocess"}}, "say trusted = true"),
        ("lcb", {"sandbox": {"memory": 3}}, "memory"),
    ],
)
def test_what_is_wrong_is_one_line(name: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    written(tmp_path / "odd.jsonl", [*rows(1), {"question": "?"}])
    written(tmp_path / "good.jsonl", rows(3))
    there = {key: value.replace("{dir}", str(tmp_path)) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(ConfigError) as error:
        registry.make(registry.find(f"skyrl_gym:{name}"), there)
    assert reason.replace("{dir}", str(tmp_path)) in str(error.value) and "\n" not in str(error.value)


# -- search ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def retriever() -> Iterator[str]:
    """A retriever as Search-R1 has it, which knows one document; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = 500 if "break" in asked["query"] else 200
            found = [[{"document": {"contents": f"about {asked['query']}: 7"}}] * asked["topk"]]
            body = json.dumps({"result": found}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_search_asks_the_retriever_and_an_answer_ends(retriever: str, tmp_path: Path) -> None:
    data = written(tmp_path / "mine.jsonl", rows(30, {"target": ["7", "seven"]}))
    options: dict[str, Any] = {"data": data, "url": retriever, "passages": 2}
    _, found, turn = played("search", "<search>apples</search>", "I say <answer>Seven.</answer>", **options)
    assert found.text.count("about apples: 7") == 2 and found.text.strip().startswith("<information>") and not found.done
    assert (turn.reward, turn.done, turn.success) == (1.0, True, True)
    with pytest.raises(InvalidAction, match="<search>words</search>"):
        played("search", "7", **options)
    assert check(registry.find("skyrl_gym:search"), options, episodes=4).ok


def test_a_retriever_that_cannot_be_asked_breaks_the_episode(retriever: str, tmp_path: Path) -> None:
    data = written(tmp_path / "mine.jsonl", rows(30, {"target": "7"}))
    for url, query in ((retriever, "break"), ("http://127.0.0.1:9/retrieve", "apples")):
        with pytest.raises(EnvironmentFailed, match="cannot be asked"):
            played("search", f"<search>{query}</search>", data=data, url=url)


# -- programs --------------------------------------------------------------------------------------------------------

TESTS = json.dumps([{"input": "[1, 2]", "output": "3", "testtype": "functional", "metadata": {"func_name": "total"}}] * 2)


@BOXED
@pytest.mark.slow
def test_programs_are_judged_in_a_sandbox(tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    total = "class Solution:\n    def total(self, xs):\n        return {}"
    data = written(tmp_path / "mine.jsonl", rows(30, TESTS))
    for program, reward in (
        (total.format("sum(xs)"), 1.0),
        (total.format("len(xs)"), 0.0),
        (total.format("1 / 0"), 0.0),
        (f"open({str(owned)!r}, 'w').write('x')\n" + total.format("sum(xs)"), 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("print('right')\nimport os\nos.write(1, b'\\nright')\nos._exit(0)", 0.0),
        ("syntax error here", 0.0),
    ):
        _, turn = played("lcb", f"```python\n{program}\n```", data=data)
        assert isinstance(turn, Turn) and (turn.reward, turn.done, turn.success) == (reward, True, bool(reward)), program
    assert not owned.exists()
    with pytest.raises(InvalidAction, match="```python"):
        played("lcb", "def total(xs): return sum(xs)", data=data)


@BOXED
@pytest.mark.slow
def test_generated_programs_are_a_good_world() -> None:
    world = registry.find("skyrl_gym:lcb")
    report = check(world, episodes=3, timeout_s=60)
    assert report.ok, str(report)
    assert player_score(world, n=3).success == 1.0 and player_score(world, n=3, noise=1.0).success == 0.0
