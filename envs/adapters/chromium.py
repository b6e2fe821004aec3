"""One headless Chromium a process, with a tab for each world that needs one.

Promises:
- it dies with its owner, `kill -9` included: a warden process holds a pipe to the owner, is the one that Chromium's orphans
  fall to, and kills whatever is below it when the pipe closes; the profile folder goes with it;
- it reaches no network: every name resolves to nothing, and chromedriver and Chromium listen on this machine alone;
- every call is bounded; one that fails ends the browser, and the next one starts another.
"""

from __future__ import annotations

import atexit
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from threading import Lock, RLock
from typing import Any

from troupe.envs.tools import short
from troupe.protocol.errors import ConfigError, EnvironmentFailed

_START_S = 60.0
_CALL_S = 20.0
_TABS = 64
_IDLE = 8  # tabs that are kept for the next world
_FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--no-first-run",
    "--renderer-process-limit=4",
    "--window-size=800,600",
)

# Ends with its standard input. arguments: the folder that goes with it, then the command.
_WARDEN = """
import ctypes, os, shutil, signal, subprocess, sys, threading, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans below us become our children
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
def below():
    found = []
    for thread in os.listdir('/proc/self/task'):
        try:
            found += open(f'/proc/self/task/{thread}/children').read().split()
        except OSError:
            pass
    return [int(pid) for pid in found]
sys.stdin.buffer.read()
until = time.monotonic() + 20
while time.monotonic() < until and (left := below()):
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
        try:
            os.waitpid(pid, 0)
        except OSError:
            pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


def needs() -> str:
    """What is missing to use a browser, and how to install it; empty if nothing is."""
    if find_spec("selenium") is None:
        return "the package selenium: pip install 'troupe-rl[miniwob]'"
    if not _programs():
        return "Chromium and its driver: apt-get install chromium chromium-driver"
    return ""


class Browser:
    """A Chromium, its driver and their warden. Raises ConfigError where it is missing, EnvironmentFailed if it won't start."""

    def __init__(self) -> None:
        programs = _programs()
        if not programs or needs():
            raise ConfigError(f"a browser needs {needs()}")
        self.pid, self.broken = os.getpid(), False
        self._lock, self._current, self._idle, self._open = RLock(), "", list[str](), 0
        folder = tempfile.mkdtemp(prefix="troupe-chromium-")
        driver, chromium = programs
        self._warden = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WARDEN, folder, driver, "--port=0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._driver = _connected(_port(self._warden), chromium, folder)
            self._base = self._current = str(self._driver.current_window_handle)
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                raise EnvironmentFailed(f"Chromium does not start: {type(error).__name__}: {short(str(error), 300)}") from error
            raise

    def usable(self) -> bool:
        """Does it live, in this process?"""
        return not self.broken and self.pid == os.getpid() and self._warden.poll() is None

    def open(self, url: str) -> str:
        """A tab that shows `url`: its name. Raises EnvironmentFailed."""
        with self._held():
            if self._idle:
                self._switch(self._idle.pop())
            elif self._open >= _TABS:
                raise EnvironmentFailed(f"{_TABS} tabs are open already: lower env.slots")
            else:
                self._switch(self._base)
                self._driver.switch_to.new_window("tab")
                self._current = str(self._driver.current_window_handle)
                self._open += 1
            self._driver.get(url)
            return self._current

    def run(self, tab: str, script: str, *arguments: Any) -> Any:
        """What `script`, the body of a function, returns in `tab`. Raises EnvironmentFailed."""
        with self._held():
            self._switch(tab)
            return self._driver.execute_script(script, *arguments)

    def type(self, tab: str, script: str, text: str) -> bool:
        """Keys for the element that `script` returns, in place of what it holds. Is it one that takes keys?"""
        from selenium.common.exceptions import ElementNotInteractableException, InvalidElementStateException

        with self._held():
            self._switch(tab)
            element = self._driver.execute_script(script)
            if element is None:
                return False
            try:
                element.clear()
                element.send_keys(text)
            except (ElementNotInteractableException, InvalidElementStateException):
                return False
            return True

    def release(self, tab: str) -> None:
        """Gives a tab back. Raises EnvironmentFailed."""
        if not self.usable():
            return
        with self._held():
            self._switch(tab)
            if len(self._idle) < _IDLE:
                self._driver.get("about:blank")
                self._idle.append(tab)
            else:
                self._driver.close()
                self._open -= 1
                self._switch(self._base)

    def close(self) -> None:
        """Ends it, and waits until it is gone."""
        self.broken = True
        if self._warden.stdin is not None:
            with suppress(OSError):
                self._warden.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._warden.wait(30.0)
        if self._warden.stdout is not None:
            self._warden.stdout.close()

    def _switch(self, tab: str) -> None:
        if tab != self._current:
            self._driver.switch_to.window(tab)
            self._current = tab

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_CALL_S):
            raise EnvironmentFailed(f"Chromium has been busy for {_CALL_S:g} s")
        try:
            if self.broken:
                raise EnvironmentFailed("Chromium has ended")
            yield
        except EnvironmentFailed:
            raise
        except BaseException as error:  # the state of its tabs is not known any more
            self.close()
            if isinstance(error, Exception):
                raise EnvironmentFailed(f"Chromium: {type(error).__name__}: {short(str(error), 300)}") from error
            raise
        finally:
            self._lock.release()


_guard = Lock()
_browser: Browser | None = None


def shared() -> Browser:
    """This process's browser, started if need be. Raises ConfigError, EnvironmentFailed."""
    global _browser
    with _guard:
        if _browser is None or not _browser.usable():
            _browser = Browser()
            atexit.register(_browser.close)
        return _browser


def shutdown() -> None:
    """Ends this process's browser, if there is one."""
    global _browser
    with _guard:
        if _browser is not None:
            _browser.close()
        _browser = None


def _programs() -> tuple[str, str] | None:
    driver = shutil.which("chromedriver")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return (driver, chromium) if driver and chromium else None


def _port(warden: subprocess.Popen[bytes]) -> int:
    """The port that chromedriver says it listens on. Raises TimeoutError, OSError."""
    assert warden.stdout is not None
    until, said = time.monotonic() + _START_S, b""
    while time.monotonic() < until:
        if select.select([warden.stdout], [], [], 0.2)[0]:
            more = os.read(warden.stdout.fileno(), 4096)
            if not more:
                raise OSError(f"chromedriver ended: {said.decode(errors='replace')}")
            said += more
            _, found, port = said.rpartition(b"successfully on port ")
            if found and b"." in port:
                return int(port.partition(b".")[0])
    raise TimeoutError(f"chromedriver has said nothing for {_START_S:g} s")


def _connected(port: int, chromium: str, folder: str) -> Any:
    from selenium import webdriver
    from selenium.webdriver.common.proxy import Proxy, ProxyType
    from selenium.webdriver.remote.client_config import ClientConfig

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={folder}", *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(flag)
    url = f"http://127.0.0.1:{port}"
    direct = Proxy({"proxyType": ProxyType.DIRECT})  # type: ignore[dict-item]
    config = ClientConfig(remote_server_addr=url, timeout=int(_START_S), proxy=direct)
    driver = webdriver.Remote(command_executor=url, options=options, client_config=config)
    driver.set_page_load_timeout(_CALL_S)
    driver.set_script_timeout(_CALL_S)
    return driver
