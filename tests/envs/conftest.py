"""What tests of worlds share: sandboxes, strangers' worlds, and language models that say what they are told to say."""

import importlib.util
import inspect
import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from tests.envs.checked import STRANGERS
from troupe.envs.sandbox import missing


@pytest.fixture
def bubblewrap() -> dict[str, str]:
    """Options of a world that runs programs in bubblewrap; skips, with the reason, where there is none."""
    if why := missing("bubblewrap"):
        pytest.skip(why)
    return {"sandbox": "bubblewrap"}


@pytest.fixture
def strangers():
    """The worlds of all files, each test with classes of its own."""
    worlds = SimpleNamespace()
    files = sorted(STRANGERS.glob("*.py"))
    for file in files:
        spec = importlib.util.spec_from_file_location(f"strangers_under_test_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        vars(worlds).update({name: value for name, value in vars(module).items() if inspect.isclass(value)})
    yield worlds
    for world in (worlds.LeavesThread, worlds.OneThreadForAll, worlds.ThreadOnTheSecondStep):
        world.stop.set()
    for file in (*worlds.LeavesFile.kept, *sys.modules["strangers_under_test_left"].kept):
        getattr(file, "close", lambda: None)()
    for file in files:
        del sys.modules[f"strangers_under_test_{file.stem}"]


@contextmanager
def _endpoint(*replies):
    """Chat completions that say `replies` one after the other: a text, or the number of an HTTP error; None hangs.

    Gives its address, and what it was asked: (path, body, headers) each.
    """
    left, asked, over = list(replies), [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(
                (
                    self.path,
                    json.loads(self.rfile.read(int(self.headers["content-length"]))),
                    {name.lower(): value for name, value in self.headers.items()},
                )
            )
            reply = left.pop(0) if len(left) > 1 else left[0]
            if reply is None:
                over.wait(30)
                return
            message = {"role": "assistant", "content": reply}
            body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
            body |= {"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
            data = json.dumps(body if isinstance(reply, str) else {"error": {"message": "not now"}}).encode()
            self.send_response(200 if isinstance(reply, str) else reply)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def endpoint():
    """`with endpoint(*replies) as (url, asked)`: see `_endpoint`."""
    return _endpoint
