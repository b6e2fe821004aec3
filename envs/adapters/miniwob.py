"""MiniWoB++ (arXiv:1802.08802): small tasks on web pages, in a real Chromium.

The agent reads what the page shows, an element a line with a number, and acts with one line: `click(3)` or `type(5, hello)`.

Promises:
- pages are those of the package miniwob, from its files: no server, no network;
- the reward is the page's own, without its discount for the seconds that have passed, so an episode can be played again;
- a task is of the split that its text belongs to; the page's chance is seeded from the task;
- a number that is not on the page, or an element that takes no text, is told to the agent.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from troupe.envs.adapters import chromium
from troupe.envs.adapters.openings import opening_of
from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, rng_of
from troupe.protocol.errors import ConfigError, EnvironmentFailed, nearest

_ACTION = re.compile(r"\b(click|type)\(\s*([0-9]{1,6})\s*(?:,\s*(.*?)\s*)?\)(?![^\n]*\))", re.IGNORECASE)
_TEXT = 200  # characters that are typed, or shown of one element
_READ = 2_000  # characters of a message that are looked at
_LINES = 120  # elements that are shown
_ENDLESS_MS = 2_000_000_000  # the page's own time limit: turns are what is limited here
_READY_S = 10.0
_WIDGETS = ("BUTTON", "A", "INPUT", "SELECT", "OPTION", "TEXTAREA", "CIRCLE", "RECT", "POLYGON")
_BEGIN = (
    "Math.seedrandom(arguments[0]); core.EPISODE_MAX_TIME = arguments[1];"
    "if (core.EP_TIMER !== null) { clearTimeout(core.EP_TIMER); core.EP_TIMER = null; }"
    "core.startEpisodeReal();"
)
_LOOK = "return [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, core.getUtterance(), core.getDOMInfo(document.body), WOB_TASK_READY]"


class MiniWob(TextWorld):
    """Options:

    task: name of a MiniWoB++ task, or a list of them, each as often as the others. split_by: "opening": a task is training or
    held out by what it shows first; "seed": by its seed alone. settle: seconds that a page has after an action.
    """

    name: ClassVar[str] = "miniwob"
    max_turns: ClassVar[int] = 10
    system: ClassVar[str] = (
        "You use a web page. Each element has a number. Answer with one action: click(NUMBER), or type(NUMBER, TEXT) to write "
        "into a field."
    )

    def __init__(self, task: str | Sequence[str] = "click-button", split_by: str = "opening", settle: float = 0.02) -> None:
        folder = pages()
        if missing := chromium.needs():
            raise ConfigError(f"the world miniwob needs {missing}")
        self.tasks = [task] if isinstance(task, str) else list(task)
        known = [path.stem for path in folder.glob("*.html")]
        for one in self.tasks:
            if one not in known:
                raise ValueError(f"there is no task '{one}'.{nearest(str(one), known)}")
        if not self.tasks:
            raise ValueError("task is an empty list: name one at least")
        if split_by not in ("opening", "seed"):
            raise ValueError(f"split_by is '{split_by}'; it is opening or seed")
        if not 0.0 <= settle <= 5.0:
            raise ValueError(f"settle is {settle}; it is 0 to 5 seconds")
        self.settle, self.split_by, self.recurring = settle, split_by, split_by == "seed"
        self.browser: chromium.Browser | None = None
        self.tab = self.asked = ""
        self.elements: list[dict[str, Any]] = []

    # -- the world ---------------------------------------------------------------------------------------------------

    def reset(self, task: Task) -> str:
        self.close()
        name = self.tasks[task.seed % len(self.tasks)]
        self.browser = chromium.shared()
        self.tab = self.browser.open((pages() / f"{name}.html").as_uri())
        return opening_of(task.split, self._drawn, self.split_by == "seed")

    def step(self, text: str) -> Turn:
        assert self.browser is not None
        found = _ACTION.search(text[:_READ])
        if found is None:
            raise InvalidAction("say click(NUMBER) or type(NUMBER, TEXT)")
        verb, ref, words = found[1].lower(), int(found[2]), found[3]
        if ref not in (element["ref"] for element in self.elements):
            raise InvalidAction(f"there is no element {ref} on the page")
        if verb == "click":
            said = self.browser.run(self.tab, "return core.elementClick(arguments[0])", ref)
            if said is not True:
                raise InvalidAction(f"element {ref} cannot be clicked")
        else:
            self._type(ref, words)
        if self.settle:
            time.sleep(self.settle)
        done, reward = self._look()
        if done:
            self.close()
            return Turn("done", float(reward), done=True, success=reward > 0)
        return Turn(self._shown())

    def close(self) -> None:
        browser, tab, self.tab = self.browser, self.tab, ""
        if browser is not None and tab:
            browser.release(tab)

    def _drawn(self) -> str:
        assert self.browser is not None
        self.browser.run(self.tab, "if (!WOB_DONE_GLOBAL && core.EP_TIMER !== null) core.endEpisode(0)")
        self.browser.run(self.tab, _BEGIN, str(self.rng.getrandbits(31)), _ENDLESS_MS)
        self._look()
        return self._shown()

    def _look(self) -> tuple[bool, float]:
        """Reads the page. Returns whether the task is over, and its reward."""
        assert self.browser is not None
        until = time.monotonic() + _READY_S
        while True:
            done, reward, asked, page, ready = self.browser.run(self.tab, _LOOK)
            if ready or done:
                break
            if time.monotonic() > until:
                raise EnvironmentFailed(f"the page of {', '.join(self.tasks)} is not ready for {_READY_S:g} s")
            time.sleep(0.05)
        if not done:
            self.asked, self.elements = str(asked), list(_elements(page))[:_LINES]
        return bool(done), float(reward)

    def _type(self, ref: int, words: str | None) -> None:
        assert self.browser is not None
        text = (words or "").strip().strip("\"'")
        if not text or len(text) > _TEXT or not all(c.isprintable() and ord(c) < 0x10000 for c in text):
            raise InvalidAction(f"type(NUMBER, TEXT) takes 1 to {_TEXT} characters of text")
        if not self.browser.type(self.tab, f"return core.previousDOMInfo[{ref}] || null", text):
            raise InvalidAction(f"element {ref} takes no text")

    def _shown(self) -> str:
        return "\n".join([self.asked, *map(_line, self.elements)])

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        good = None if rng.random() < noise else _planned(self.asked, self.elements)
        return good or f"click({rng.choice([e['ref'] for e in self.elements if e['ref'] > 0] or [1])})"

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield "".join(f" {digit}" for digit in range(10)) + " click(1) type(1, a) done button input text checkbox label"
        world = cls(task=["click-test", "click-button", "enter-text", "click-link"])
        try:
            for index in range(24):
                task = cls.task("train", index)
                world.rng = rng_of(task)
                yield world.reset(task)
        finally:
            world.close()


def pages() -> Path:
    """The folder of the tasks' pages. Raises ConfigError where the package is missing."""
    found = find_spec("miniwob")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("the world miniwob needs the package miniwob: pip install 'troupe-rl[miniwob]'")
    return Path(found.submodule_search_locations[0]) / "html" / "miniwob"


def _elements(page: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The elements that the agent is shown: those that hold text themselves, and those that one can use."""
    kind = str(page["tag"]).partition("_")[0].upper()
    if page["ref"] > 0 and (page.get("text") or kind in _WIDGETS):
        yield {key: page.get(key) for key in ("ref", "tag", "text", "value", "id")} | {
            "parts": [c["tag"] for c in page["children"]]
        }
    elif page["ref"] < 0 and page.get("text"):
        yield {"ref": page["ref"], "tag": "t", "text": page["text"], "value": None, "id": "", "parts": []}
    for child in page["children"]:
        yield from _elements(child)


def _line(element: Mapping[str, Any]) -> str:
    words = " ".join(str(element["text"] or "").split())[:_TEXT]
    if element["ref"] < 0:
        return words
    kind = str(element["tag"]).lower().replace("input_", "")
    value = element["value"]
    state = (" checked" if value else "") if isinstance(value, bool) else f" = {str(value)[:_TEXT]}" if value else ""
    return f"{element['ref']} {kind}" + (f" {words}" if words else "") + state


def _planned(asked: str, elements: Sequence[Mapping[str, Any]]) -> str | None:
    """The next action in a few of the simple tasks; None in all others."""

    def first(kind: str, text: str | None = None) -> Mapping[str, Any] | None:
        fits = (e for e in elements if str(e["tag"]).lower() == kind and (text is None or (e["text"] or "").strip() == text))
        return next(fits, None)

    def click(element: Mapping[str, Any] | None) -> str | None:
        return f"click({element['ref']})" if element else None

    quoted = re.search(r'"(.*?)"', asked)
    if asked.startswith("Enter ") and quoted and (field := first("input_text")):
        return f"type({field['ref']}, {quoted[1]})" if field["value"] != quoted[1] else click(first("button"))
    if asked.startswith("Select ") and asked.endswith(" and click Submit."):
        wanted = {name.strip() for name in asked.removeprefix("Select ").removesuffix(" and click Submit.").split(",")}
        return _unchecked(wanted, elements) or click(first("button"))
    if quoted:
        return click(first("button", quoted[1]) or first("span", quoted[1]))
    return click(first("button")) if asked == "Click the button." else None


def _unchecked(wanted: set[str], elements: Sequence[Mapping[str, Any]]) -> str | None:
    """A click on a box that is to be checked and is not. Its name follows it as text."""
    for box, name in pairwise(elements):
        if box["tag"].lower() == "input_checkbox" and not box["value"] and (name["text"] or "").strip() in wanted:
            return f"click({box['ref']})"
    return None
