"""Environments of skyrl-gym as worlds: `skyrl_gym:NAME`, for gsm8k, gsm8k_multi_turn, search and lcb.

The tasks are rows as SkyRL prepares them: `prompt` (messages), `reward_spec.ground_truth`, and what the environment asks for
besides. They come from the option `data`, or are small generated ones. Nothing is downloaded.

Promises:
- the environment's own `step` says what is observed, paid and done; a reward of 1 is the success;
- a prompt is of one split only, by its digest (`belongs`);
- a retriever that cannot be asked has broken the episode: the agent never reads its error;
- `lcb` runs what the agent wrote in a sandbox, graded there by skyrl-gym's own code, and never in this process.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from troupe.envs import sandbox
from troupe.envs.adapters import skyrl_gym_code, skyrl_gym_data
from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, belongs, rng_of
from troupe.envs.sandbox.settings import SandboxSettings
from troupe.protocol.errors import ConfigError, EnvironmentFailed, TaskFailed, nearest

NAMES = ("gsm8k", "gsm8k_multi_turn", "search", "lcb")
_DRAWS = 1_000
_READ = 20_000  # characters of a message that are looked at
_FAILED = ("Search error: ", "Search request failed", "Error processing search results", "Unknown API state")


def world(name: str) -> type[TextWorld]:
    """The world of the environment `name`. Raises ConfigError: not installed, or no such environment here."""
    try:
        import skyrl_gym  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"'skyrl_gym:{name}' needs skyrl-gym ({error}): pip install 'troupe-rl[skyrl-gym]'") from error
    if name not in NAMES:
        raise ConfigError(f"no environment '{name}' of skyrl-gym here.{nearest(name, NAMES)} Known: {', '.join(NAMES)}")
    base = {"search": SkyrlSearch, "lcb": SkyrlCode}.get(name, SkyrlGym)
    about = f"The environment {name} of skyrl-gym.\n\n    {base.__doc__}"
    return type(base.__name__, (base,), {"name": f"skyrl_gym:{name}", "env": name, "__doc__": about})


class SkyrlGym(TextWorld):
    """Options: data: a .parquet or .jsonl file of rows; without it, generated ones. turns: as the environment's `max_turns`."""

    env: ClassVar[str] = ""
    max_turns: ClassVar[int] = 6
    wants: ClassVar[str] = "give the answer at the end, as #### 42"

    def __init__(self, data: str = "", turns: int = 0) -> None:
        if not data and self.env not in skyrl_gym_data.GENERATED:
            raise ValueError("there are no generated tasks for it: name a .parquet or .jsonl file with data")
        if not 0 <= turns <= 100:
            raise ValueError(f"turns is {turns}; it is 1 to 100, or 0 for the environment's own")
        self._data, self._turns, self._row = data, turns, dict[str, Any]()
        if data:
            _rows(data)

    # -- the world ---------------------------------------------------------------------------------------------------

    def reset(self, task: Task) -> str:
        import skyrl_gym

        self._row = self._drawn(self.rng, task.split)
        extras = {"extra_info": {}, **self._row, **({"max_turns": self._turns} if self._turns else {})}
        try:
            self._env = skyrl_gym.make(self.env, env_config=self._config(), extras=extras)
            prompt, _ = self._env.init([dict(message) for message in self._row["prompt"]])
        except Exception as error:
            raise TaskFailed(f"{self.name} cannot begin with {task.id}: {type(error).__name__}: {error}") from error
        self._said: list[str] = []
        return _told(prompt)

    def step(self, text: str) -> Any:
        if not text.strip():
            raise InvalidAction(self.wants)
        self._said.append(text)
        return self._turn(self._stepped(text[-_READ:]))

    def state_key(self) -> str:
        return "\n".join((_told(self._row.get("prompt", [])), *self._said))

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str | None:
        """Says the answer; at random, another number."""
        answer = str(self._row["reward_spec"]["ground_truth"])
        return f"#### {rng.randint(0, 999) if rng.random() < noise else answer}"

    @classmethod
    def corpus(cls) -> Iterator[str]:
        if cls.env not in skyrl_gym_data.GENERATED:
            return
        for index in range(256):
            made, task = cls(), cls.task("train", index)
            made.rng = rng_of(task)
            yield made.reset(task)
            yield made.play(made.rng, noise=0.0) or ""

    # -- its parts ---------------------------------------------------------------------------------------------------

    def _config(self) -> Any:
        return None

    def _drawn(self, rng: random.Random, split: str) -> dict[str, Any]:
        if self._data:
            rows = _rows(self._data)[split] if split in ("train", "heldout") else []
            if not rows:
                raise TaskFailed(f"{self._data} has no row of split '{split}'")
            return rng.choice(rows)
        for _ in range(_DRAWS):
            row = skyrl_gym_data.GENERATED[self.env](rng)
            if belongs(_told(row["prompt"]), split):
                return row
        raise TaskFailed(f"no generated task of split '{split}' in {_DRAWS} draws")

    def _stepped(self, text: str) -> Mapping[str, Any]:
        try:
            out: Mapping[str, Any] = self._env.step(text)
        except Exception as error:
            raise EnvironmentFailed(f"{self.name} raised {type(error).__name__}: {error}") from error
        return out

    def _turn(self, out: Mapping[str, Any]) -> Turn:
        reward, done = float(out["reward"]), bool(out["done"])
        observed = "\n".join(str(message["content"]) for message in out["observations"])
        return Turn(observed or f"reward {reward:g}", reward, done=done, success=reward >= 1.0 if done else None)


class SkyrlSearch(SkyrlGym):
    """Options: data: a .parquet or .jsonl file of rows. url: of a retriever as Search-R1 has it, for example
    "http://127.0.0.1:8000/retrieve". passages: that a search gives. timeout_s: for a request. turns: searches and the answer.
    """

    wants: ClassVar[str] = "search with <search>words</search>, or answer with <answer>the answer</answer>"

    def __init__(self, data: str = "", url: str = "", passages: int = 3, timeout_s: int = 10, turns: int = 4) -> None:
        super().__init__(data, turns)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is '{url}'; it is a retriever's, such as http://127.0.0.1:8000/retrieve")
        if not 1 <= passages <= 100 or not 1 <= timeout_s <= 600:
            raise ValueError(f"passages is {passages} and timeout_s is {timeout_s}; they are 1 to 100 and 1 to 600")
        self._url, self._passages, self._timeout_s = url, passages, timeout_s

    def step(self, text: str) -> Turn:
        if not any(f"<{tag}>" in text and f"</{tag}>" in text for tag in ("search", "answer")):
            raise InvalidAction(self.wants)
        turn = self._turn(self._stepped(text))
        failed = json.dumps({"result": ""})[:-2]
        said = turn.text.strip().removeprefix("<information>").removeprefix(failed)
        if said.startswith(_FAILED):
            raise EnvironmentFailed(f"{self.name}: the retriever at {self._url} cannot be asked: {said[:200]}")
        return turn

    def play(self, rng: random.Random, noise: float) -> str:
        """Searches for the question, then answers. At random, answers at once, and wrongly."""
        if rng.random() < noise:
            return f"<answer>{rng.randint(0, 9)}</answer>"
        target = self._row["reward_spec"]["ground_truth"]["target"]
        answer = target if isinstance(target, str) else target[0]
        return f"<answer>{answer}</answer>" if self._said else f"<search>{self._row['prompt'][-1]['content'][:300]}</search>"

    def _stepped(self, text: str) -> Mapping[str, Any]:
        out = super()._stepped(text)
        self._said.append(text)
        return out

    def _config(self) -> Any:
        from skyrl_gym.envs.search.env import SearchEnvConfig
        from skyrl_gym.tools import search

        search.MAX_RETRIES = 1  # a broken episode is retried as a whole; ten tries would outlast any step
        return SearchEnvConfig(search_url=self._url, topk=self._passages, timeout=self._timeout_s)


class SkyrlCode(SkyrlGym):
    """Options: data: a .parquet or .jsonl file of rows; without it, generated ones. sandbox: where the agent's programs run,
    as a table (docs/sandbox.md). seconds: for a test.
    """

    max_turns: ClassVar[int] = 2
    wants: ClassVar[str] = "write a program between ```python and ```"

    def __init__(self, data: str = "", seconds: int = 6, sandbox: Mapping[str, Any] | None = None) -> None:
        super().__init__(data)
        if not 1 <= seconds <= 60:
            raise ValueError(f"seconds is {seconds}; it is 1 to 60")
        self._seconds = seconds
        try:
            settings = SandboxSettings.model_validate({"memory_mb": 512, **(sandbox or {})})
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"sandbox: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        self._settings = skyrl_gym_code.chosen(settings)

    async def step(self, text: str) -> Turn:
        from skyrl_gym.envs.lcb.livecodebench import extract_code_from_model

        program = extract_code_from_model(text[-_READ:])
        if program is None:
            raise InvalidAction(self.wants)
        self._said.append(text)
        async with await sandbox.open(self._settings) as box:
            right = await skyrl_gym_code.grade(box, program, self._row["reward_spec"]["ground_truth"], self._seconds)
        return self._turn({"reward": float(right), "done": True, "observations": []})

    def play(self, rng: random.Random, noise: float) -> str | None:
        """Writes the generated task's program, at random one that is wrong. None for rows of a file."""
        program = self._row.get("solution")
        if not isinstance(program, str):
            return None
        return f"```python\n{'print(0)' if rng.random() < noise else program}\n```"


def _told(messages: Any) -> str:
    return "\n\n".join(str(message["content"]) for message in messages)


@lru_cache(maxsize=8)
def _rows(place: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of a file, by split. Raises ValueError: what is wrong with it."""
    path = Path(place).expanduser()
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"data is '{place}'; it is a .parquet or a .jsonl file")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        else:
            rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{place} cannot be read: {error}") from error
    found: dict[str, list[dict[str, Any]]] = {"train": [], "heldout": []}
    for number, row in enumerate(rows):
        match row:
            case {"prompt": [{"content": _}, *_] as prompt, "reward_spec": {"ground_truth": _}}:
                found["train" if belongs(_told(prompt), "train") else "heldout"].append(row)
            case _:
                raise ValueError(f"row {number} of {place} has no prompt of messages, or no reward_spec.ground_truth")
    if not rows:
        raise ValueError(f"{place} has no rows")
    return found
