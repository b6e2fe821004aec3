"""In the other process it is another day, whoever is asked for the time; how long something takes is as here."""

import datetime
import time

import pytest

from troupe.envs.check.clock import LATER_S, moved

BEGAN = 1_700_000_000.5
READINGS = {  # what a world may ask → seconds since 1970
    "time": lambda: time.time(),
    "time_ns": lambda: time.time_ns() / 10**9,
    "clock_gettime": lambda: time.clock_gettime(time.CLOCK_REALTIME),
    "clock_gettime_ns": lambda: time.clock_gettime_ns(time.CLOCK_REALTIME) / 10**9,
    "localtime": lambda: time.mktime(time.localtime()),
    "localtime of nothing": lambda: time.mktime(time.localtime(None)),
    "gmtime": lambda: datetime.datetime(*time.gmtime()[:6], tzinfo=datetime.UTC).timestamp(),
    "ctime": lambda: time.mktime(time.strptime(time.ctime())),
    "asctime": lambda: time.mktime(time.strptime(time.asctime())),
    "strftime": lambda: time.mktime(time.strptime(time.strftime("%Y %j %H %M %S"), "%Y %j %H %M %S")),
    "datetime.now": lambda: datetime.datetime.now().timestamp(),
    "datetime.now of a zone": lambda: datetime.datetime.now(datetime.timezone(datetime.timedelta(hours=5))).timestamp(),
    "datetime.now of a named zone": lambda: datetime.datetime.now(tz=datetime.UTC).timestamp(),
    "datetime.utcnow": lambda: datetime.datetime.utcnow().replace(tzinfo=datetime.UTC).timestamp(),
    "datetime.today": lambda: datetime.datetime.today().timestamp(),
}


@pytest.mark.parametrize("name", READINGS)
def test_whoever_is_asked_tells_the_moved_time_and_the_real_one_afterwards(name):
    real = READINGS[name]()
    with moved() as clock:
        assert READINGS[name]() == pytest.approx(real, abs=60)
        clock.at(BEGAN + LATER_S)
        assert READINGS[name]() == pytest.approx(BEGAN + LATER_S, abs=60)
    assert READINGS[name]() == pytest.approx(real, abs=60)


def test_a_given_time_a_duration_and_the_types_are_as_they_were():
    kinds, was = (datetime.datetime, datetime.date), (time.gmtime(5), time.ctime(5), time.strftime("%Y", time.gmtime(5)))

    class Timer:
        read = time.time

    began = time.monotonic(), time.perf_counter()
    with moved() as clock:
        clock.at(0)
        Timer.read = time.time
        assert Timer().read() == pytest.approx(0, abs=60), "a class that keeps the function does not make a method of it"
        assert (time.gmtime(5), time.ctime(5), time.strftime("%Y", time.gmtime(5))) == was
        assert began < (time.monotonic(), time.perf_counter()) < (began[0] + 60, began[1] + 60)
        assert (datetime.datetime, datetime.date) == kinds and type(datetime.datetime.now()) is kinds[0]
        assert datetime.date.today() == datetime.date.fromtimestamp(time.time())


def test_each_unit_of_the_time_is_another_one_and_odd_where_it_was_even():
    for began in range(0, 86_400, 997):
        one, other = time.gmtime(began), time.gmtime(began + LATER_S)
        assert (one.tm_sec + other.tm_sec) % 2 or one.tm_sec == 59
        assert int(began) % 2 != int(began + LATER_S) % 2 and one.tm_yday != other.tm_yday and one.tm_hour != other.tm_hour
