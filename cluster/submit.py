"""`troupe submit`: the same run as a job of a Ray cluster that is up already.

Promises:
- the recipe is checked here, before anything is shipped;
- what is shipped is this folder without virtual environment, runs, version control and what .gitignore names, and if that
  is too big the error names what makes it so;
- the run folder is absolute: a job's working folder is a copy that Ray removes;
- Ctrl-C while the log is followed leaves the job running and says how to stop it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import socket
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from troupe.cluster import config as recipes
from troupe.cluster import launch
from troupe.protocol.errors import ConfigError, TroupeError

EXCLUDED = [".git", ".venv", "venv", "runs", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"]
"""Never shipped, at any depth."""

MAX_MIB = 256
"""Ray keeps what is shipped in the memory of its head node, and refuses more than twice this."""

_REACH_S = 5.0
_DASHBOARD_PORT = 8265


class JobFailed(TroupeError):
    """The job ended without success."""


def submit(
    recipe: str,
    *,
    address: str | None = None,
    overrides: list[str] | None = None,
    steps: int | None = None,
    seed: int | None = None,
    run_dir: str | None = None,
    wait: bool = True,
    say: Callable[[str], None] = print,
) -> int:
    """Submits `troupe train recipe` and follows it; returns the exit code: 0 success, 130 if the user stopped following.

    Raises ConfigError for what can be known before (recipe, address, run folder, size), JobFailed if the run failed.
    """
    flags = {"steps": steps, "seed": seed}
    settings = [*(overrides or []), *(f"{key}={value}" for key, value in flags.items() if value is not None)]
    config = recipes.read(recipe, settings)
    here = Path.cwd()
    if not Path(recipe).resolve().is_relative_to(here):
        raise ConfigError(f"recipe '{recipe}' is not below this folder, which is what is shipped: copy it here")
    url, host = _reached(address)
    folder = _run_folder(run_dir, config.name, here, is_local(host), url)
    launch.authenticate()
    _quieten()
    _check_size(here)
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    shipped = str(Path(recipe).resolve().relative_to(here))
    command = ["train", shipped, "--run-dir", str(folder), *(part for item in settings for part in ("--set", item))]
    python = sys.executable if is_local(host) else "python"
    try:
        client = JobSubmissionClient(url)
        job = client.submit_job(
            entrypoint=shlex.join([python, "-m", "troupe", *command]),
            runtime_env={"working_dir": str(here), "excludes": EXCLUDED, "env_vars": _environment(here)},
            metadata={"troupe_run": str(folder)},
        )
    except AuthenticationError as error:
        raise ConfigError(
            f"the cluster at {url} asks for a token: put its ~/.ray/auth_token in the same place here, or its content "
            "into RAY_AUTH_TOKEN"
        ) from error
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"the cluster at {url} does not take the job: {_first_line(error)}") from error
    stop = f"RAY_AUTH_MODE=token ray job stop {job} --address {url}"
    say(f"Submitted {job} to {url}; run folder {folder}")
    if not wait:
        say(f"Follow it: RAY_AUTH_MODE=token ray job logs -f {job} --address {url}\nStop it:   {stop}")
        return 0
    try:
        status, message = asyncio.run(_follow(client, job, say))
    except KeyboardInterrupt:
        say(
            f"\nThe job goes on. Follow it: RAY_AUTH_MODE=token ray job logs -f {job} --address {url}\n"
            f"                 Stop it:   {stop}"
        )
        return 130
    except (RuntimeError, OSError) as error:
        raise JobFailed(f"lost sight of job {job} at {url}: {_first_line(error)}") from error
    if status != "SUCCEEDED":
        raise JobFailed(f"job {job} ended as {status.lower()}: {_first_line(message)}\nIts run folder is {folder}.")
    return 0


def is_local(host: str) -> bool:
    """Is `host` this machine?"""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    for address in addresses:
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            try:
                trial.bind((str(address), 0))  # only one's own addresses can be bound
            except OSError:
                return False
    return True


async def _follow(client: Any, job: str, say: Callable[[str], None]) -> tuple[str, str]:
    """Shows the log to its end. Returns the job's status and what Ray says about it."""
    async for lines in client.tail_job_logs(job):
        say(lines.rstrip("\n"))
    while True:
        info = client.get_job_info(job)
        if info.status.is_terminal():
            return info.status.value, info.message or ""
        await asyncio.sleep(0.5)


def _reached(address: str | None) -> tuple[str, str]:
    """(URL, host) of the dashboard, which answers. Raises ConfigError if nothing does."""
    given = address or os.environ.get("RAY_API_SERVER_ADDRESS") or f"http://127.0.0.1:{_DASHBOARD_PORT}"
    url = given if "://" in given else f"http://{given}"
    parts = urllib.parse.urlsplit(url)
    try:
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else _DASHBOARD_PORT)
    except ValueError as error:
        raise ConfigError(f"--address '{given}': {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"--address '{given}': name the cluster's dashboard, for example http://127.0.0.1:8265")
    try:
        with socket.create_connection((host, port), timeout=_REACH_S):
            pass
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {url} ({error.strerror or error}): start one with `ray start --head`, "
            "or name its dashboard with --address http://HOST:PORT"
        ) from error
    return f"{parts.scheme}://{parts.netloc if parts.port else f'{parts.netloc}:{port}'}", host


def _run_folder(run_dir: str | None, name: str, here: Path, local: bool, url: str) -> Path:
    if run_dir is None and not local:
        raise ConfigError(f"the cluster at {url} is on another machine: name a folder that its nodes share with --run-dir")
    folder = Path(run_dir) if run_dir else here / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not local and not folder.is_absolute():
        raise ConfigError(f"--run-dir '{run_dir}': give an absolute path, as the cluster's nodes know it")
    folder = folder.absolute()
    if local and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"run folder '{folder}' exists: name another with --run-dir")
    return folder


def _quieten() -> None:
    for name in ("ray", *logging.root.manager.loggerDict):
        if name.split(".")[0] == "ray":
            logging.getLogger(name).setLevel(logging.ERROR)


def _environment(here: Path) -> dict[str, str]:
    """A checkout of Troupe runs as it was shipped, not as it is installed on the cluster."""
    if (here / "src" / "troupe" / "__init__.py").is_file():
        return {"PYTHONPATH": "src"}  # the job and its workers start in the shipped folder
    return {}


def _check_size(here: Path) -> None:
    sizes: dict[str, int] = {}
    for path in _shipped(here):
        top = path.relative_to(here).parts[0]
        sizes[top] = sizes.get(top, 0) + path.stat().st_size
    total = sum(sizes.values())
    if total > MAX_MIB * 2**20:
        biggest = sorted(sizes, key=lambda top: -sizes[top])[:3]
        raise ConfigError(
            f"this folder is too big to ship: {total / 2**20:.0f} MiB, the limit is {MAX_MIB}; the biggest are "
            + ", ".join(f"{top} ({sizes[top] / 2**20:.0f} MiB)" for top in biggest)
            + ": name in .rayignore what the run does not need"
        )


def _shipped(here: Path) -> Iterator[Path]:
    from ray._private.runtime_env.packaging import get_excludes_from_ignore_files

    ignored = get_excludes_from_ignore_files(here, include_gitignore=True)
    for root, folders, files in os.walk(here):
        folders[:] = [f for f in folders if f not in EXCLUDED and not any(match(Path(root, f)) for match in ignored)]
        for name in files:
            path = Path(root, name)
            if path.is_file() and not any(match(path) for match in ignored):
                yield path


def _first_line(text: object) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return lines[0] if lines else type(text).__name__
