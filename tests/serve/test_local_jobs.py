"""Tests of jobs on the local target, run once more through a server, whose target is the current one.

Left out are those about this computer's files and processes, and those with the target's name in what is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Accel
from tests.cli.test_local import (
    gate,
    test_a_reader_that_goes_away_ends_it_quietly,
    test_after_takes_any_reference_and_waits_for_it,
    test_cancel_ends_the_job_and_may_be_said_twice,
    test_every_word_after_the_script_reaches_it,
    test_follow_gives_the_jobs_bytes_and_its_exit_code,
    test_following_in_json_is_a_line_each,
    test_list_is_plain_in_a_pipe_and_a_table_on_a_terminal,
    test_logs_go_on_exactly_from_a_cursor,
    test_modules_and_commands,
    test_prune_deletes_what_has_ended_and_only_that,
    test_several_ranks_are_told_apart,
    test_the_environment_arrives_and_a_secret_is_stored_nowhere,
)
from tests.cli.test_sweep import test_a_job_for_each_combination

from .conftest import Team

__all__ = [
    "gate",
    "test_a_job_for_each_combination",
    "test_a_reader_that_goes_away_ends_it_quietly",
    "test_after_takes_any_reference_and_waits_for_it",
    "test_cancel_ends_the_job_and_may_be_said_twice",
    "test_every_word_after_the_script_reaches_it",
    "test_follow_gives_the_jobs_bytes_and_its_exit_code",
    "test_following_in_json_is_a_line_each",
    "test_list_is_plain_in_a_pipe_and_a_table_on_a_terminal",
    "test_logs_go_on_exactly_from_a_cursor",
    "test_modules_and_commands",
    "test_prune_deletes_what_has_ended_and_only_that",
    "test_several_ranks_are_told_apart",
    "test_the_environment_arrives_and_a_secret_is_stored_nowhere",
]


@pytest.fixture
def accel(tmp_path: Path, team: Team) -> Iterator[Accel]:
    """The command line, whose current target is one of the server."""
    here = tmp_path / "it's a; $(dir)\n"
    here.mkdir()
    runner = Accel(here=here, home=tmp_path / "home")
    team.log_in(runner.home / "no-config")
    yield runner
    runner.cancel_all()
