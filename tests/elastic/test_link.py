"""A rank's end of the control channel, with a test at the supervisor's end."""

from collections.abc import Iterator

import pytest

from lightning_ft.elastic.activity import Activity
from lightning_ft.elastic.channel import Channel, accept, listen
from lightning_ft.elastic.link import SupervisorLink
from lightning_ft.elastic.protocol import Death, FromRank, Generation, RankEnvironment


@pytest.fixture
def ends() -> Iterator[tuple[SupervisorLink, Channel[FromRank]]]:
    listener, address = listen()
    environment = RankEnvironment(slot=1, incarnation=0, num_slots=3, supervisor=address, store="", run_id="run")
    link = SupervisorLink(environment, lambda generation: None, Activity().answer)
    accepted = accept(listener)
    assert accepted is not None
    yield link, accepted[0]
    link.close()
    accepted[0].close()
    listener.close()


def generation(number: int, members: list[int], dead: list[int]) -> Generation:
    return Generation(
        type="generation",
        number=number,
        members=members,
        replicas=[[member] for member in members],
        orphans=[],
        ending=False,
        incarnations=dict.fromkeys(members, 0),
        reason="death",
        dead=[Death(slot=slot, incarnation=0, how="SIGKILL") for slot in dead],
        hold=False,
    )


def test_the_newest_generation_tells_of_the_deaths_in_those_that_it_superseded(
    ends: tuple[SupervisorLink, Channel[FromRank]],
) -> None:
    link, supervisor = ends
    supervisor.send(generation(2, [1, 2], dead=[0]))
    supervisor.send(generation(3, [1], dead=[2]))
    assert [death["slot"] for death in link.wait_for_generation(2, 5.0, "a test")["dead"]] == [0, 2]
    supervisor.send(generation(4, [1, 3], dead=[]))
    assert link.wait_for_generation(3, 5.0, "a test")["dead"] == []
