"""Requests without a version follow a promotion or a split, also while versions are added and removed."""

from collections import Counter

from overwinter.core.actions import Refuse
from overwinter.core.events import Removed, TrafficSet, UnloadAsked
from overwinter.core.versions import Share
from tests.scheduler.world import World, spec


def node(*versions: int) -> World:
    world = World()
    for version in versions:
        world.deploy(spec("f", version, max_batch=1, queue_limit=1000), False)
    return world


def set_traffic(world: World, *shares: tuple[int, int]) -> None:
    world.send(TrafficSet("f", tuple(Share(*share) for share in shares)))


def asked(world: World, count: int) -> Counter[str]:
    """Send this many requests without a version; return how many each version got."""
    first = world.next_request + 1
    for _ in range(count):
        world.arrive("f")
    return Counter(world.state.requests[id_].function for id_ in range(first, first + count))


def test_a_promoted_version_gets_all_requests_and_without_a_promotion_the_newest_does():
    world = node(1, 2)
    assert asked(world, 2) == {"f@2": 2}
    set_traffic(world, (1, 100))
    world.deploy(spec("f", 3), False)
    assert asked(world, 2) == {"f@1": 2}
    set_traffic(world)
    assert asked(world, 1) == {"f@3": 1}


def test_a_split_is_exact_and_requests_that_name_a_version_do_not_count():
    world = node(1, 2)
    set_traffic(world, (1, 90), (2, 10))
    for _ in range(7):
        world.arrive("f", version=2)
    assert asked(world, 200) == {"f@1": 180, "f@2": 20}


def test_the_same_steps_choose_the_same_versions():
    def chosen() -> list[str]:
        world = node(1, 2, 3)
        set_traffic(world, (1, 37), (3, 63))
        asked(world, 50)
        set_traffic(world, (2, 11), (3, 89))
        asked(world, 50)
        return [request.function for request in world.state.requests.values()]

    assert chosen() == chosen()


def test_the_newest_version_answers_all_after_a_version_of_the_split_is_removed():
    world = node(1, 2, 3)
    set_traffic(world, (1, 50), (2, 50))
    world.send(Removed("f@2"))
    assert asked(world, 2) == {"f@3": 2}
    for version in (1, 3):
        world.send(Removed(f"f@{version}"))
    set_traffic(world, (1, 100))
    world.arrive("f")
    assert world.answers[world.next_request].error == "NotFoundError"


def test_a_refusal_says_of_which_version_it_was():
    world = node(1, 2)
    set_traffic(world, (1, 50), (2, 50))
    world.send(UnloadAsked("f@2"))
    for _ in range(4):
        world.arrive("f")
    refusals = [answer for answer in world.answers.values() if isinstance(answer, Refuse)]
    assert [refusal.function for refusal in refusals] == ["f@2"] * 2
