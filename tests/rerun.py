"""Runs pytest; in CI, runs the tests that failed once more, alone: a race between tests is then reported, not fatal.

    python -m tests.rerun [PYTEST ARGUMENTS]

Where `CI` is set and at most `MOST` tests failed, these run again in one process with nothing beside them. When all of
them pass, so does the run, and it prints last which tests that were, with the text of the first failure, which `REPORT`
holds too. A test named there has a defect, or shows one. Errors at collection, and an interrupted run, end it at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 10
REPORT = Path("build/failed-beside-others.txt")


class Failures:
    """A pytest plugin that keeps what failed: the text of each test's first failure, by the test's id."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}
        self.at_collection = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            sections = [f"--- {title}\n{text}" for title, text in report.sections]
            self.tests.setdefault(report.nodeid, "\n".join([f"{report.when}:\n{report.longreprtext}", *sections]))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.at_collection = self.at_collection or report.failed


def main(arguments: list[str]) -> int:
    REPORT.unlink(missing_ok=True)
    # The workers share what pytest has made of the test files, which costs each of them ten seconds otherwise.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    failures = Failures()
    code = int(pytest.main(arguments, plugins=[failures]))
    again = code == pytest.ExitCode.TESTS_FAILED and not failures.at_collection and 0 < len(failures.tests) <= MOST
    if not os.environ.get("CI") or not again:
        return code
    names = list(failures.tests)
    print(f"\n{len(names)} failed; once more, alone:", *names, sep="\n  ", flush=True)
    alone = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", *names])
    if alone.returncode != 0:
        return code
    text = "\n".join(["failed beside others, passed alone:", *names, "", f"{names[0]}, {failures.tests[names[0]]}"])
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(text + "\n")
    print(f"\n{text}\n(also in {REPORT})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
