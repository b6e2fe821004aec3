"""User code by place: a dotted module name, or the path of a Python file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_at(place: str) -> ModuleType:
    """The module at `place`: a file if it looks like one, else a dotted name. A file is loaded once a process.

    Raises FileNotFoundError, and whatever the module raises when it is imported.
    """
    if not (place.endswith(".py") or "/" in place):
        return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no file {place}")
    known_as = f"troupe_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if known_as in sys.modules:
        return sys.modules[known_as]
    spec = importlib.util.spec_from_file_location(known_as, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"'{place}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[known_as] = module  # before it runs: dataclasses and pickle look their module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import the files beside it; last, so that it hides nothing
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known_as]
        raise
    return module
