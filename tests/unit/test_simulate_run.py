"""One run with chance scripted: what each kind of failure takes, and when, to the nanosecond."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.plan.arithmetic import Plan, work
from forebay.plan.load import Load
from forebay.plan.resolve import read_flags, resolve
from forebay.plan.run import Run
from forebay.plan.scenario import NS, Strategy, scenario_of
from forebay.plan.story import Story
from forebay.plan.tally import PARTS, Tally

PROCESS, HOST, NODE, RACK = range(4)
PAUSE_S, LOCAL_S, PEER_S, DRAIN_S, RESTART_S = 2, 3, 4, 50, 30
FLAGS = {
    "storage.filesystem_read": "1TB/s",  # no restart is shorter than its reading
    "checkpoint.cadence": "100s",
    "checkpoint.durable_cadence": "300s",
    "failures.restart": f"{RESTART_S}s",
    "checkpoint.interference": "0",
}


class Script:
    """Draws that were written down: failures as ``(seconds since the one before, kind)``."""

    def __init__(self, *failures: tuple[float, int]) -> None:
        self.failures = list(failures)
        self.kinds = [kind for _, kind in failures]
        self.write_s = [LOCAL_S, PEER_S, DRAIN_S]

    def failure_ns(self) -> int:
        return round(self.failures.pop(0)[0] * NS) if self.failures else 10**18

    def kind(self) -> int:
        return self.kinds.pop(0)

    def pause_ns(self) -> int:
        return PAUSE_S * NS

    def write_ns(self, hop: int) -> int:
        return self.write_s[hop] * NS


def plan(**flags: str) -> Plan:
    given = FLAGS | {name.replace("__", "."): text for name, text in flags.items()}
    return work(resolve(flags=read_flags(given)), best=False)


def played(
    script: Script,
    seconds: float,
    strategy: Strategy = Strategy.TIERED,
    **flags: str,
) -> Tally:
    scenario = scenario_of(plan(**flags), strategy)
    end_ns = round(seconds * NS)
    draws: Any = script
    tally = Run(scenario, draws, Load(end_ns), end_ns).play()
    assert sum(getattr(tally, f"{name}_ns") for name in PARTS) == tally.total_ns == end_ns
    return tally


def in_s(nanoseconds: int) -> float:
    return nanoseconds / NS


def test_without_failures_only_pauses_cost() -> None:
    found = played(Script(), 1000)
    # 102 s each: nine are taken by 918 s, and 82 s of training follow
    assert found.taken == 9
    assert in_s(found.pause_ns) == 9 * PAUSE_S
    assert in_s(found.useful_ns) == 1000 - 9 * PAUSE_S
    assert (found.rework_ns, found.restart_ns, found.interference_ns) == (0, 0, 0)
    memory, local, peer, durable = found.reached
    assert [each.count for each in found.reached] == [9, 9, 9, 3]
    assert in_s(memory.most) == PAUSE_S
    assert in_s(local.most) == PAUSE_S + LOCAL_S
    assert in_s(peer.most) == PAUSE_S + LOCAL_S + PEER_S
    assert in_s(durable.most) == PAUSE_S + LOCAL_S + DRAIN_S


@pytest.mark.parametrize(
    ("kind", "back_s", "source"),
    [(PROCESS, 500, 0), (HOST, 500, 1), (NODE, 500, 2), (RACK, 300, 3)],
    ids=["process", "host", "node", "rack"],
)
def test_each_failure_goes_back_to_the_nearest_tier_it_leaves(
    kind: int, back_s: float, source: int
) -> None:
    # at 560 s: 5 pauses are over, 550 s trained; 300 is durable since 361 s
    found = played(Script((560, kind)), 600)
    assert found.failures[kind] == 1
    assert found.recovered == [int(index == source) for index in range(5)]
    assert in_s(found.rework_ns) == in_s(found.lost.most) == 550 - back_s
    assert in_s(found.restart_ns) == RESTART_S
    assert in_s(found.useful_ns) == back_s + 10


@pytest.mark.parametrize(("kind", "back_s"), [(PROCESS, 200), (HOST, 100), (NODE, 100)])
def test_a_failure_before_the_copy_is_there_goes_one_back(kind: int, back_s: float) -> None:
    # the second pause ends at 204 s; local has it at 207, the peer at 211
    found = played(Script((206, kind)), 240)
    assert in_s(found.useful_ns) == back_s + 4
    assert found.lost_in_flight == int(kind != PROCESS)


def test_the_local_tier_has_it_before_the_peer() -> None:
    for kind, back_s, lost in ((HOST, 200, 0), (NODE, 100, 1)):
        found = played(Script((208, kind)), 240)
        assert in_s(found.useful_ns) == back_s + 2
        assert found.lost_in_flight == lost


@pytest.mark.parametrize("kind", [PROCESS, HOST, NODE])
def test_a_save_that_a_failure_hits_is_lost(kind: int) -> None:
    found = played(Script((203, kind)), 240)  # in the second pause
    assert found.torn == 1
    assert found.taken == 1
    assert in_s(found.pause_ns) == PAUSE_S + 1
    assert in_s(found.lost.most) == 100
    assert in_s(found.useful_ns) == 100 + 240 - 203 - RESTART_S


def test_nothing_is_left_before_the_first_checkpoint() -> None:
    found = played(Script((90, PROCESS)), 200)
    assert found.recovered == [0, 0, 0, 0, 1]
    assert in_s(found.rework_ns) == 90
    assert in_s(found.useful_ns) == 200 - 90 - RESTART_S


def test_a_rack_leaves_nothing_that_is_not_durable() -> None:
    # 300 drains from 309 s to 359 s
    early, late = (played(Script((at_s, RACK)), 400) for at_s in (358, 360))
    assert early.recovered[4] == 1
    assert early.lost_in_flight == 1
    assert in_s(early.useful_ns) == 400 - 358 - RESTART_S
    assert late.recovered[3] == 1
    assert in_s(late.useful_ns) == 300 + 400 - 360 - RESTART_S


def test_the_drain_goes_on_after_the_death_of_the_trainer_and_starts_over_after_a_reboot() -> None:
    trainer = played(Script((330, PROCESS)), 500)
    assert in_s(trainer.reached[3].most) == 55
    reboot = played(Script((330, HOST)), 500)
    assert in_s(reboot.reached[3].most) == 330 + RESTART_S + 50 - 304
    lost = played(Script((330, NODE)), 500)  # its peer has it
    assert lost.reached[3].most == reboot.reached[3].most
    assert lost.lost_in_flight == 0


def test_a_failure_in_a_restart_begins_it_anew_from_what_is_left() -> None:
    found = played(Script((560, PROCESS), (10, RACK)), 640)
    assert found.failed_restarts == 1
    assert in_s(found.restart_ns) == 10 + RESTART_S
    assert found.recovered == [0, 0, 0, 1, 0]
    assert in_s(found.useful_ns) == 300 + 640 - 600
    assert in_s(found.restarts.most) == 10 + RESTART_S


def test_without_a_free_slot_a_checkpoint_is_skipped() -> None:
    script = Script()
    script.write_s = [180, 4, 50]
    found = played(script, 1000)
    assert found.skipped > 0
    assert found.due == found.taken + found.skipped
    roomy = Script()
    roomy.write_s = [180, 4, 50]
    assert played(roomy, 1000, checkpoint__slots="8").skipped < found.skipped


def test_a_newer_snapshot_replaces_one_that_waits_to_drain() -> None:
    script = Script()
    script.write_s = [3, 4, 250]
    found = played(script, 1000, checkpoint__durable_cadence="100s")
    assert found.superseded > 0
    assert found.reached[3].count + found.superseded <= found.taken
    assert found.skipped == 0


def test_drains_make_steps_longer() -> None:
    found = played(Script(), 1000, checkpoint__interference="10%", checkpoint__mirror="no")
    # nine local writes of 3 s, and three drains whose weight is their own rate over the paced one
    weight = scenario_of(plan(checkpoint__mirror="no")).disturbs[2]
    local_s = 9 * LOCAL_S * (1 - 1 / 1.1)
    drain_s = 3 * DRAIN_S * (1 - 1 / (1 + 0.1 * weight))
    assert in_s(found.interference_ns) == pytest.approx(local_s + drain_s, rel=1e-6)


def test_synchronous_saves_are_durable_when_the_pause_ends() -> None:
    found = played(Script((560, PROCESS)), 600, Strategy.SYNCHRONOUS)
    assert found.recovered == [0, 0, 0, 1, 0]
    assert found.reached[3].count == found.taken
    assert in_s(found.useful_ns) == 510


def test_asynchronous_saves_are_lost_with_the_trainer_until_they_are_durable() -> None:
    early = played(Script((120, PROCESS)), 200, Strategy.ASYNCHRONOUS)
    assert early.lost_in_flight == 1
    assert early.recovered[4] == 1
    late = played(Script((160, PROCESS)), 200, Strategy.ASYNCHRONOUS)
    assert late.recovered[3] == 1


def test_one_slot_holds_nothing_while_it_is_filled() -> None:
    two = played(Script((203, PROCESS)), 240)
    one = played(Script((203, PROCESS)), 240, checkpoint__slots="1")
    assert two.recovered[0] == 1
    assert one.recovered[1] == 1  # from the local tier


def test_the_load_of_the_filesystem_adds_up() -> None:
    scenario = scenario_of(plan())
    end_ns = 1000 * NS
    load, draws = Load(end_ns), Script((330, HOST))
    tally = Run(scenario, draws, load, end_ns).play()  # type: ignore[arg-type]
    assert sum(load.nbytes) == pytest.approx(tally.drained_bytes, rel=1e-9)
    assert tally.drained_bytes > tally.reached[3].count * 6.48e12  # what was written twice too


def test_what_disturbs_together_disturbs_as_much_as_one() -> None:
    flags = {"checkpoint__interference": "10%", "checkpoint__interference_window": "drain"}
    found = played(Script(), 1000, **flags)
    # to the peer and to the durable tier at once: six times 7 s, three times 53 s
    assert in_s(found.interference_ns) == pytest.approx((6 * 7 + 3 * 53) * (1 - 1 / 1.1), rel=1e-6)


def test_one_slot_is_taken_until_the_near_tiers_have_it() -> None:
    script = Script()
    script.write_s = [180, 4, 50]
    found = played(script, 1000, checkpoint__slots="1")
    # taken at 100 s of training, free 186 s after its pause: every second one finds no slot
    assert (found.due, found.taken, found.skipped) == (9, 5, 4)


def test_what_a_restart_has_loaded_is_in_the_nearer_tiers_again() -> None:
    found = played(Script((560, NODE), (35, PROCESS)), 700)
    assert found.recovered == [1, 0, 1, 0, 0]
    assert in_s(found.restart_ns) == 2 * RESTART_S


def test_a_durable_checkpoint_that_was_lost_is_durable_when_taken_again() -> None:
    found = played(Script((307, NODE)), 520)  # before the local disks had it
    assert found.lost_in_flight == 1
    assert found.reached[3].count == 1


def test_the_story_is_what_the_tally_counts() -> None:
    scenario, end_ns, story = scenario_of(plan()), 800 * NS, Story()
    draws: Any = Script((306, NODE), (100, PROCESS), (150, RACK))
    tally = Run(scenario, draws, Load(end_ns), end_ns, story).play()
    assert [each.kind for each in story.failures] == [NODE, PROCESS, RACK]
    assert [in_s(each.at_ns) for each in story.failures] == [306, 406, 556]
    assert sum(each.lost_ns for each in story.failures) == tally.rework_ns
    assert story.failures[-1].rework_ns == tally.rework_ns
    for each in story.failures:
        assert each.pause_ns + each.rework_ns + each.restart_ns <= each.at_ns
