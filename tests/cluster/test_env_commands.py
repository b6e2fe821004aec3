"""`troupe env`: a person can look at a world, play it, and check it."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from troupe.envs import registry

WORLD = """
import random
from troupe.envs.base import TextWorld, Turn

class Coin(TextWorld):
    "Call the coin."
    system = "Say heads or tails."
    def __init__(self, prize: float = 1.0):
        self.prize = prize
    def reset(self, task):
        self.coin = self.rng.choice(["heads", "tails"])
        return f"coin {task.split} {task.seed}"
    def step(self, text):
        if text not in ("heads", "tails"):
            raise ValueError("say heads or tails")
        return Turn(self.coin, reward=self.prize * (text == self.coin), done=True)

class Loaded(Coin):
    def reset(self, task):
        super().reset(task)
        self.coin = random.SystemRandom().choice(["heads", "tails"])
        return "coin"
"""


@pytest.fixture
def coin(tmp_path):
    file = tmp_path / "coins.py"
    file.write_text(WORLD)
    return f"{file}:Coin"


def troupe(*args, keys=""):
    command = [sys.executable, "-m", "troupe", "env", *args]
    return subprocess.run(command, input=keys, capture_output=True, text=True)


def test_list_shows_every_known_world():
    done = troupe("list")
    assert done.returncode == 0
    assert all(name in done.stdout for name in registry.names())


def test_show_tells_options_and_opening(coin):
    done = troupe("show", coin, "--option", "prize=2.5")
    assert done.returncode == 0
    for text in ("Call the coin.", "prize = 2.5", "Say heads or tails.", "coin train 0"):
        assert text in done.stdout


def test_play_goes_on_after_an_invalid_action_and_shows_reward_and_score(coin):
    secret = "heads" if "heads" in troupe("play", coin, "--seed", "3", keys="heads\n").stdout.split(">")[-1] else "tails"
    done = troupe("play", coin, "--seed", "3", "--option", "prize=2", keys=f"what\n{secret}\n")
    assert done.returncode == 0
    for text in ("Say heads or tails.", "coin train 3", "Invalid action: say heads or tails", "reward 2"):
        assert text in done.stdout
    assert done.stdout.rstrip().endswith("The episode is over: success, score 2 in 2 turns.")


def test_play_takes_the_split(coin):
    assert "coin heldout 5" in troupe("play", coin, "--split", "heldout", "--seed", "5").stdout


def test_play_is_left_politely_at_the_end_of_input(coin):
    done = troupe("play", coin)
    assert (done.returncode, done.stderr) == (0, "")
    assert "You left the game." in done.stdout


def test_play_is_left_politely_by_one_ctrl_c(coin):
    """On a terminal, while the game waits for the keyboard."""
    keyboard, terminal = pty.openpty()
    command = [sys.executable, "-m", "troupe", "env", "play", coin]
    game = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=subprocess.STDOUT, start_new_session=True)
    os.close(terminal)
    try:
        seen = b""
        while b"> " not in seen:
            seen += os.read(keyboard, 1024)
        time.sleep(1.0)  # the prompt is there a moment before the keyboard is read
        game.send_signal(signal.SIGINT)
        assert game.wait(60) == 0
        assert b"You left the game." in os.read(keyboard, 1024)
    finally:
        game.kill()
        game.wait()
        os.close(keyboard)


def test_check_passes_a_good_world(coin):
    done = troupe("check", coin)
    assert done.returncode == 0, done.stdout
    assert "Coin conforms" in done.stdout


def test_check_fails_a_world_that_cannot_be_reproduced(coin):
    done = troupe("check", coin.replace("Coin", "Loaded"), "--episodes", "30")
    assert done.returncode == 1
    assert "broken" in done.stdout and "Loaded does not conform" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_world_with_tools_shows_them_and_is_played_by_calling_them():
    shown = troupe("show", "stockroom").stdout
    assert "find_item(name: string): Find the id of an item." in shown
    assert 'warehouse: "north" | "south" | "east"' in shown
    done = troupe("play", "stockroom", keys='find {}\nfind_item {"nme": 1}\nstock {broken\nfind_item {"name": "x"}\n-1\n')
    assert done.returncode == 0, done.stderr
    for text in (
        "Unknown tool: no tool 'find'. Did you mean 'find_item'?",
        "Bad arguments: find_item has no argument 'nme'. Did you mean 'name'?",
        "Bad arguments: this is no JSON",
        "Invalid action: there is no 'x'.",
        "reward 0 (outcome 0)",
    ):
        assert text in done.stdout
    assert done.stdout.rstrip().endswith("The episode is over: no success, score 0 in 5 turns.")


def test_play_ends_with_the_worlds_verdict_when_the_turns_are_used_up():
    done = troupe("play", "stockroom", keys="find {}\n" * 6)
    assert (
        done.stdout.rstrip().endswith("The 6 turns are used up: no success, score 0.") and "reward 0 (outcome 0)" in done.stdout
    )


def test_check_takes_a_time_limit_and_stops_at_the_first_hang():
    done = troupe("check", "echo", "--option", "hang=true", "--timeout", "0.1")
    said = " ".join(done.stdout.split())
    assert done.returncode == 1 and "has not returned for 0.1 s" in said, done.stdout
    assert said.count("not looked at: the world hangs") >= 10
    assert said.endswith("echo does not conform: 1 of 16 promises broken, first: episodes run and give what they should")


def test_check_gives_everything_as_json_and_nothing_else_on_standard_output(coin):
    with open(coin.rpartition(":")[0], "a") as file:
        file.write("print('imported')\n")
    done = troupe("check", coin, "--json", "--episodes", "5")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["conforms"] and found["first_broken"] is None and "imported" in done.stderr
    assert set(found["seconds"]) >= {"reset", "step", "close"} and len(found["findings"]) >= 14
    assert {f["status"] for f in found["findings"]} <= {"ok", "warning", "unknown"}


def test_check_of_a_world_that_is_not_there_is_one_line(coin):
    done = troupe("check", coin + "s")
    assert done.returncode == 2 and "Did you mean 'Coin'?" in done.stderr and done.stderr.count("\n") == 1
    done = troupe("check", coin, "--option", "price=1")
    assert done.returncode == 2 and "no option 'price'. Did you mean 'prize'?" in done.stderr


def test_play_shows_the_state_when_asked_and_takes_no_turn_for_it():
    done = troupe("play", "guess", keys="/state\n")
    assert '"secret": ' in done.stdout and '"left": 5' in done.stdout and "Invalid action" not in done.stdout
