"""What a survivor concludes from what it and others have seen of the lost."""

from concertina.runtime.seals import Verdict, judge

WAIT = Verdict()


def test_before_all_survivors_have_sealed_nothing_is_concluded() -> None:
    assert judge(5, {2}, [5, 5, 4], set(), [{2: 4}, {}, {}]) == WAIT


def test_what_nobody_has_seen_did_not_happen() -> None:
    assert judge(5, {2}, [5, 4, 4], set(), [{2: 4}, {2: 3}, {}]) == Verdict(missing=(2,))


def test_what_another_has_seen_is_taken_from_it() -> None:
    assert judge(5, {2}, [5, 5, 4], set(), [{2: 4}, {2: 5}, {}]) == Verdict(fetch=(2, 1))


def test_a_lost_worker_that_posted_is_not_missing_and_the_living_are_waited_for() -> None:
    assert judge(5, {2}, [5, 4, 5], set(), [{2: 5}, {2: 5}, {}]) == WAIT


def test_what_only_a_lost_worker_had_seen_of_another_counts_for_nothing() -> None:
    assert judge(5, {1, 2}, [5, 5, 4], set(), [{1: 5, 2: 4}, {2: 5}, {}]) == Verdict(missing=(2,))


def test_who_has_stopped_before_this_meeting_never_comes() -> None:
    assert judge(5, set(), [5, 4, 5], {1}, [{}, {}, {}]) == Verdict(missing=(1,))
    assert judge(5, set(), [5, 5, 4], {1}, [{}, {}, {}]) == WAIT
