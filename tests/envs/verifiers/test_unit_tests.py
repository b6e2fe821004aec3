"""Only a program that gives the right values passes, whatever else it tries; a sandbox that fails is not a zero."""

import asyncio
import hashlib
import json

import pytest

from troupe.envs.sandbox import SandboxSettings, missing, pool
from troupe.envs.verifiers import Case, Composition, UnitTests, unit_tests
from troupe.envs.verifiers.unit_tests import _value, same
from troupe.protocol.errors import ConfigError, EnvironmentFailed

SECRET = 918_273_645
TESTS = [Case("f(3)", SECRET), Case("f([1, 2])", [2, 1]), Case("f('a')", {"a": (1, 2.5)})]
RIGHT = (
    f"def f(x):\n    print('noise')\n    return {SECRET} if x == 3 else x[::-1] if isinstance(x, list) else {{x: (1, 2.5)}}\n"
)
WRONG = "def f(x):\n    return None\n"
CHEATS = {
    "nothing": "",
    "no Python": "I would write a function.",
    "crashes": "def f(x):\n    raise SystemError",
    "loops when it is loaded": "while True: pass",
    "loops when it is called": "def f(x):\n    while True: pass",
    "ignores that its time is up": "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    "exits": "raise SystemExit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits at once when it is called": "def f(x):\n    import os\n    os._exit(0)",
    "ends the runner": "import os\nos.kill(os.getppid(), 9)",
    "ends everybody": "import os\nos.kill(-1, 9)",
    "limits the warden": "import resource\nfor what in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_AS):\n"
    "    try: resource.prlimit(1, what, (3, 3))\n    except OSError: pass\n" + WRONG,
    "slows the warden": "import os\nfor each in (lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),\n"
    "             lambda: os.setpriority(os.PRIO_PROCESS, 1, 19)):\n    try: each()\n    except OSError: pass\n" + WRONG,
    "takes all memory": "x = bytearray(1 << 34)",
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "says passed": "print('ready'); print('passed'); print('OK')" + "\n" + WRONG,
    "equals everything": "class Yes(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
    "    __repr__ = lambda self: '0'\ndef f(x): return Yes(1)",
    "is no data": "def f(x): return (n for n in [1])",
    "patches what writes values": "import builtins, json\nbuiltins.repr = lambda _: 'True'\njson.dumps = lambda _: '[]'\n"
    + WRONG,
    "patches the runner": "import sys\nfor frame in sys._current_frames().values():\n  while frame:\n"
    "    frame.f_globals.update(data=lambda value: True, evaluated=lambda *_: 'passed\\n', same=lambda *_: True)\n"
    "    frame = frame.f_back\n" + WRONG,
    "speaks for the runner": "import os\nout = open(f'/proc/{os.getppid()}/fd/1', 'w')\n"
    "for n in range(9): print('[%d, \"True\"]' % n, file=out, flush=True)\n" + WRONG,
    "says nonsense for the runner": "import os\nout = open(f'/proc/{os.getppid()}/fd/1', 'wb')\n"
    "out.write(b'\\xff[' * 9000 + b'\\n[0]\\n[-1, \"1\"]\\n[\"0\", \"1\"]\\n[0, \"' + b'(' * 3000 + b'\"]\\n'); out.flush()\n"
    + WRONG,
    "floods": "import os\nout = open(f'/proc/{os.getppid()}/fd/1', 'wb')\nwhile True: out.write(bytes(1 << 20))",
    "reads the tests": f"""
import gc, glob, hashlib, re, sys
def places():
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
    yield from (repr(each) for each in gc.get_objects() if isinstance(each, (dict, list, tuple)))
    everywhere = ("/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ", "/home/**", "/tmp/**", "/dev/shm/**")
    for path in (path for pattern in everywhere for path in glob.glob(pattern, recursive=True)):
        try: yield open(path, errors="replace").read()
        except OSError: pass
def f(x):
    for text in places():
        for number in re.findall("[0-9]{{9}}", text):
            if hashlib.md5(number.encode()).hexdigest() == "{hashlib.md5(str(SECRET).encode()).hexdigest()}":
                return int(number)
""",
}

QUICK = (
    "loops when it is called",
    "exits at once",
    "ends the runner",
    "limits the warden",
    "says passed",
    "equals everything",
    "patches the runner",
    "speaks for the runner",
    "says nonsense for the runner",
    "reads the tests",
)


@pytest.fixture
def lent(bubblewrap):
    return lambda **more: pool.Pool(SandboxSettings(backend="bubblewrap", cpu_s=5, **more), warm=1, limit=2)


async def test_a_right_program_passes_and_a_half_right_one_is_told_apart(lent):
    async with lent() as boxes:
        tests = UnitTests(TESTS, sandboxes=boxes)
        assert await tests(RIGHT) == 1.0 and await tests.share(RIGHT) == 1.0
        half = RIGHT.replace("x[::-1]", "x")
        assert await tests(half) == 0.0 and await tests.share(half) == pytest.approx(2 / 3)
        late = "import os\ndef f(x):\n    if x != 3: os._exit(0)\n    return 918273645"
        assert (await tests.report(late)).passed == (True, False, False), "a test that ends the program is that test's own"


@pytest.mark.parametrize("cheat", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHEATS])
async def test_no_program_passes_that_does_not_say_the_right_values(cheat, lent):
    async with lent() as boxes:
        report = await UnitTests(TESTS, sandboxes=boxes).report(CHEATS[cheat])
        assert report.passed == (False, False, False), report


@pytest.mark.slow
async def test_a_program_that_sleeps_fails_and_is_not_waited_for_long(lent):
    async with lent() as boxes:
        report = await UnitTests(TESTS, sandboxes=boxes).report("import time\ntime.sleep(1000)")
        assert report.share == 0.0 and not report.killed_for


async def test_a_program_may_be_several_files_and_its_run_happens_once(lent):
    files = {"pack/__init__.py": "", "pack/one.py": "from pack.two import g\ndef f(x): return g(x)", "pack/two.py": "g = str"}
    async with lent() as boxes:
        tests = UnitTests([Case("pack.one.f(3)", "3")], imports="import pack.one", sandboxes=boxes)
        graded = Composition(tests, {"tests": tests.share}, gate=None, weights={"tests": 0.5})
        first, report = await graded(files), tests._last
        assert first.parts == {"outcome": 1.0, "tests": 0.5} and first.success
        assert (await graded(dict(files))).success and tests._last is report
        assert not (await graded({**files, "pack/two.py": "g = int"})).success
        assert (await graded({**files, "/../x\0": ""})).parts == {"outcome": 0.0, "tests": 0.0}


class Broken:
    """Lends sandboxes that do not work."""

    def __init__(self, boxes):
        self.boxes = boxes

    def lease(self):
        boxes = self.boxes

        class Lease:
            async def __aenter__(self):
                self.box = await boxes.take()
                await self.box.close()
                return self.box

            async def __aexit__(self, *_):
                await boxes.discard(self.box)

        return Lease()


async def test_a_sandbox_that_fails_or_has_no_python_breaks_the_episode(lent, monkeypatch):
    async with lent() as boxes:
        with pytest.raises(EnvironmentFailed, match="sandbox is closed"):
            await Composition(UnitTests(TESTS, sandboxes=Broken(boxes)))(RIGHT)
        for command in (("no-such-python",), ("python3", "-c", "import nothing"), ("sh", "-c", "echo passed")):
            monkeypatch.setattr(unit_tests, "_COMMAND", command)
            with pytest.raises(EnvironmentFailed, match="Python did not start"):
                await UnitTests(TESTS, sandboxes=boxes)(RIGHT)


def test_without_a_lender_a_sandbox_is_opened():
    if why := missing("docker") and missing("bubblewrap"):
        pytest.skip(why)
    assert asyncio.run(UnitTests(TESTS[:1])(RIGHT)) == 1.0


@pytest.mark.parametrize(
    ("value", "expected", "right"),
    [
        ("3", 3, True),
        ("3.0", 3, True),
        ("0.30000000000000004", 0.3, True),
        ("[1, (2, {3: 'x'})]", [1, (2, {3: "x"})], True),
        ("{1, 2}", {2, 1}, True),
        ("b'x'", b"x", True),
        ("{True}", {1}, False),
        ("{1}", {True}, False),
        ("{1.0}", {1}, True),
        ("{(0, True)}", {(0, 1)}, False),
        ("{True: 1}", {1: 1}, False),
        ("{'a': {0: {False}}}", {"a": {0: {0}}}, False),
        ("True", 1, False),
        ("1", True, False),
        ("[1]", (1,), False),
        ("{'a': 1, 'b': 2}", {"a": 1}, False),
        ("9" * 4000, 1.0, False),
        ("9" * 400, 1e300, False),
        ("nan", 1.0, False),
        ("", None, False),
        ("__import__('os').getpid()", 1, False),
        ("-" * 3000 + "1", 1, False),
        ("[" * 3000, 1, False),
        ("1if 1else 2", 1, False),
    ],
)
def test_values_are_compared_as_python_compares_data(value, expected, right):
    assert same(_value(value), expected) is right


def test_asserts_are_read_as_calls_and_what_they_should_give():
    tests = UnitTests.of_asserts("assert f(2, x=[1]) == 4\nassert g('a') == {'b': (1, -2)}")
    assert tests.tests == (Case("f(2, x=[1])", 4), Case("g('a')", {"b": (1, -2)}))
    for other in ("assert f(2)", "assert f(2) != 4", "f(2)"):
        with pytest.raises(ConfigError, match="is not: assert CALL == DATA"):
            UnitTests.of_asserts(other)


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ([], "at least one test"),
        ([Case("f(1", 1)], "is no expression"),
        ([Case("x = 1", 1)], "is no expression"),
        ([Case("f()", object())], "is not data"),
        ([Case("f()", float("inf"))], "is not data"),
        ([Case("f()", "x" * 5000)], "is not data"),
        ([Case("f()", "x" * 3000)] * 20, "49152 characters together"),
    ],
)
def test_tests_that_cannot_be_asked_are_refused(tests, problem):
    with pytest.raises(ConfigError, match=problem):
        UnitTests(tests)


def test_nothing_that_a_test_expects_is_sent_into_the_sandbox():
    sent = []

    class Box:
        async def run(self, command, *, stdin, timeout_s):
            sent.extend([*command, stdin])
            raise EnvironmentFailed("enough")

    class Lender:
        def lease(self):
            return self

        async def __aenter__(self):
            return Box()

        async def __aexit__(self, *_):
            return None

    with pytest.raises(EnvironmentFailed, match="enough"):
        asyncio.run(UnitTests(TESTS, sandboxes=Lender())("def f(x): pass"))
    assert json.loads(sent[-1])["calls"] == ["f(3)", "f([1, 2])", "f('a')"] and str(SECRET) not in "".join(sent)
