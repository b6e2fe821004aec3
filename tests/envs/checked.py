"""What tests of the conformance suite share: its promises by short names, and how to read a report."""

from pathlib import Path

from troupe.envs.check import PROMISES

STRANGERS = Path(__file__).parent / "strangers"
(
    MADE,
    TASKS,
    RUNS,
    SAME,
    ELSEWHERE,
    LEAKS,
    BESIDE,
    LOOKING,
    GARBAGE,
    JUDGED,
    HELD_OUT,
    FITS,
    BLOCKS,
    PROCESS,
    CLOSES,
    LEAVES,
) = PROMISES


def status_of(report):
    """Promise → status."""
    return {finding.name: finding.status for finding in report.findings}


def detail_of(report, promise):
    """What was seen of it."""
    return next(finding.detail for finding in report.findings if finding.name == promise)


def of_status(report, status):
    """The promises that are so."""
    return {finding.name for finding in report.findings if finding.status == status}
