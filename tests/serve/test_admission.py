"""Who is let in: counts, what has ended lately against a deadline, and what programs are told."""

from __future__ import annotations

import contextlib

import pytest

from pagedec.serve.access import Client
from pagedec.serve.admission import Admission
from pagedec.serve.server_config import ServerConfig
from pagedec.serve.statuses import Refusal

ADA, BOB = Client(name="ada"), Client(name="bob")


class Clock:
    """Seconds, as they are set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Crowd:
    """Requests that are inside."""

    def __init__(self, num_seats: int = 2, **options: int) -> None:
        self.clock = Clock()
        self.admission = Admission(ServerConfig(**options), num_seats, self.clock)
        self.inside: list[contextlib.ExitStack] = []

    def come(self, client: Client = ADA, num_tokens: int = 10, seconds_left: float | None = None) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(self.admission.seat(client, num_tokens, seconds_left))
        self.inside.append(stack)

    def end(self, seconds: float) -> None:
        """The oldest ends so much later."""
        self.clock.now += seconds
        self.inside.pop(0).close()

    def refused(self, *given: object) -> Refusal:
        with pytest.raises(Refusal) as caught:
            self.come(*given)  # type: ignore[arg-type]
        return caught.value


def test_the_wait_is_what_others_have_waited_lately() -> None:
    """While all seats are taken one ends every two seconds, so the third in the queue waits six."""
    crowd = Crowd(num_seats=2)
    for _ in range(6):
        crowd.come()
    assert crowd.admission.wait == 0, "nothing has ended yet: nobody knows"
    crowd.come(ADA, 10, 0.001)
    for _ in range(3):
        crowd.end(2.0)
    assert crowd.admission.num_inside == 4 and crowd.admission.wait == pytest.approx(3 * 2.0)
    refusal = crowd.refused(ADA, 10, 5.9)
    assert (refusal.status, refusal.reason, refusal.quota) == ("RESOURCE_EXHAUSTED", "DEADLINE_TOO_SHORT", "")
    assert str(refusal) == "it would wait some 6.0 seconds, and its deadline is in 5.9"
    assert refusal.retry == pytest.approx(6.0)
    crowd.come(ADA, 10, 6.1)
    crowd.come(ADA, 10, None)


def test_who_finds_a_seat_waits_for_nothing() -> None:
    crowd = Crowd(num_seats=2)
    for _ in range(4):
        crowd.come()
    for _ in range(3):
        crowd.end(50.0)
    assert crowd.admission.num_inside == 1 and crowd.admission.wait == 0
    crowd.come(ADA, 10, 0.01)


def test_an_hour_of_quiet_is_no_wait() -> None:
    crowd = Crowd(num_seats=1)
    for _ in range(2):
        crowd.come()
    crowd.end(1.0)
    crowd.end(1.0)
    crowd.clock.now += 3600
    for _ in range(3):
        crowd.come()
    crowd.end(1.0)
    crowd.end(1.0)
    assert crowd.admission.wait == pytest.approx(1.0)


def test_limits_of_all_and_of_each() -> None:
    crowd = Crowd(max_requests=5, max_client_requests=3, max_client_tokens=100)
    crowd.come(ADA, 60)
    refusal = crowd.refused(ADA, 41)
    assert (refusal.reason, refusal.quota) == ("CLIENT_TOKENS", "max_client_tokens")
    assert str(refusal) == "this client's requests come to 60 tokens, and this one to 41: at most 100"
    crowd.come(ADA, 20), crowd.come(ADA, 20)
    refusal = crowd.refused(ADA, 0)
    assert (refusal.reason, refusal.quota) == ("CLIENT_REQUESTS", "max_client_requests")
    crowd.come(BOB, 100), crowd.come(BOB, 0)
    refusal = crowd.refused(Client(name="eve"), 1)
    assert (refusal.reason, refusal.quota, refusal.retry) == ("QUEUE_FULL", "", 1.0)
    crowd.end(0.5)
    crowd.come(ADA, 60)
    while crowd.inside:
        crowd.end(0.5)
    assert crowd.admission.num_inside == 0 and not crowd.admission._requests and not crowd.admission._tokens


def test_a_client_s_own_limits_win() -> None:
    crowd = Crowd(max_client_requests=1, max_client_tokens=10)
    for _ in range(3):
        crowd.come(Client(name="ada", max_requests=3, max_tokens=30))
    refusal = crowd.refused(Client(name="ada", max_requests=3, max_tokens=30))
    assert (refusal.reason, refusal.quota) == ("CLIENT_REQUESTS", "api_keys.ada.max_requests")
    refusal = crowd.refused(Client(name="ada", max_requests=4, max_tokens=30))
    assert (refusal.reason, refusal.quota) == ("CLIENT_TOKENS", "api_keys.ada.max_tokens")
    crowd.come(BOB)
    refusal = crowd.refused(BOB)
    assert (refusal.reason, refusal.quota) == ("CLIENT_REQUESTS", "max_client_requests")


def test_the_last_place_is_left_to_those_who_do_not_wait() -> None:
    """Unless nothing of a stream is inside; then they take turns."""
    crowd = Crowd(max_requests=2)
    own = crowd.admission
    assert own.has_spare(0) and own.has_spare(1)
    with own.seat(ADA, 1, None, 0):
        assert own.has_spare(0) and not own.has_spare(1)
        with pytest.raises(Refusal, match="^1 requests run or wait, and the last place is left to others$"):
            own.seat(ADA, 1, None, 1).__enter__()
        with own.seat(BOB, 1, None, 0):
            assert not own.has_spare(0) and crowd.refused().reason == "QUEUE_FULL"
        assert not own.has_spare(0), "the one who was refused may come again"
        crowd.clock.now += 2
        assert own.has_spare(0)
        with own.seat(BOB, 1, None, 0):
            crowd.refused()
        crowd.come()
        crowd.refused()
        crowd.end(0)
        assert own.has_spare(0), "others had it"


def test_who_waits_is_woken_when_a_place_is_given_up() -> None:
    crowd, woken = Crowd(max_requests=1), list[int]()
    crowd.come()
    with crowd.admission.waiting(lambda: woken.append(1)), crowd.admission.waiting(lambda: woken.append(2)):
        crowd.refused()
        assert not woken
        crowd.end(0)
    crowd.come()
    crowd.end(0)
    assert woken == [1, 2]
