"""Growing pauses between tries."""

from __future__ import annotations

import pytest

from spotrun.backoff import Backoff, read_twice


def test_pauses_double_up_to_the_longest_and_start_again_after_a_reset() -> None:
    backoff = Backoff(0.2, 1.0)
    assert [backoff.next() for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.reset()
    assert backoff.next() == 0.2


def test_a_pause_after_very_many_tries_is_the_longest() -> None:
    assert Backoff(1.0, 60.0).after(10**6) == 60.0


def test_what_arrives_damaged_is_read_once_more() -> None:
    answers: list[Exception | int] = [ValueError("damaged"), 7, ValueError("damaged"), ValueError("again"), KeyError()]

    def read() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert read_twice(read, ValueError) == 7
    with pytest.raises(ValueError, match="again"):
        read_twice(read, ValueError)
    with pytest.raises(KeyError):
        read_twice(read, ValueError)
    assert not answers
