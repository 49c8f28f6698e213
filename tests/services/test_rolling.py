"""Rolling changes: in which order programs stop and start, and what gateways are told when."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from ipc.addresses import crash_file
from ipc.control import Status
from scheduler.config import SchedulerConfig
from services import rolling
from services.config import RunConfig, build_config
from services.crash_guard import CrashGuard
from services.render import replica_file
from services.replicas import read_replicas, write_replicas
from services.rolling import Rolling, exclusive
from services.run_dir import StackError
from services.stack import write_stack
from services.supervisor_client import ProcessInfo, SupervisorGone

READY = Status(incarnation=1, state="ready", forward_age_ms=10)


class Supervisor:
    """Records what it is asked, together with what gateways could read at that moment."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.calls: list[str] = []

    def listed(self) -> str:
        """`0 1-` is: replica 0 active, replica 1 draining."""
        replicas = read_replicas(self.run_dir).models["m"].replicas
        return " ".join(r.id.removeprefix("m/") + ("-" if r.state == "draining" else "") for r in replicas)

    def record(self, call: str) -> None:
        self.calls.append(f"{call} [{self.listed()}]")

    def start(self, full_name: str) -> None:
        self.record(f"start {full_name}")

    def stop(self, full_name: str) -> None:
        self.record(f"stop {full_name}")

    def add_group(self, group: str) -> None:
        assert (self.run_dir / "programs" / f"{group}.conf").is_file()
        self.record(f"add {group}")

    def remove_group(self, group: str) -> None:
        assert not (self.run_dir / "programs" / f"{group}.conf").is_file()
        self.record(f"remove {group}")

    def processes(self) -> list[ProcessInfo]:
        return [ProcessInfo("gateways", f"gateway-{i}", "RUNNING", 100 + i, 0, 0, 0) for i in range(2)]


class World:
    def __init__(self, run_dir: Path, replicas: int) -> None:
        model = {"name": "m", "source": "/m", "replicas": replicas, "rank": {"device": "cpu"}}
        self.config = build_config({"models": [model]}, Path("/"), run_dir)
        write_stack(self.config, {"m": Path("/m")})
        self.run_dir = run_dir
        self.model = self.config.models[0]
        self.supervisor = Supervisor(run_dir)
        self.said: list[str] = []
        self.rolling = Rolling(RunConfig(self.config, {"m": "/m"}), self.supervisor, self.said.append)  # type: ignore[arg-type]


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], World]:
    monkeypatch.setattr(rolling.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(rolling, "replica_status", lambda run_dir, replica: READY)
    monkeypatch.setattr(rolling, "listens", lambda pid, port: True)
    return lambda replicas: World(tmp_path, replicas)


def test_with_two_replicas_gateways_know_before_one_stops(make_world: Callable[[int], World]) -> None:
    world = make_world(2)
    for replica in ("m/0", "m/1"):
        world.rolling.restart_replica(world.model, replica)
    assert world.supervisor.calls == [
        "stop m-0:scheduler [0- 1]",
        "stop m-0:rank-0 [0- 1]",
        "start m-0:rank-0 [0- 1]",
        "start m-0:scheduler [0- 1]",
        "stop m-1:scheduler [0 1-]",
        "stop m-1:rank-0 [0 1-]",
        "start m-1:rank-0 [0 1-]",
        "start m-1:scheduler [0 1-]",
    ]
    assert world.supervisor.listed() == "0 1"


def test_the_only_replica_stays_listed_so_that_requests_wait(make_world: Callable[[int], World]) -> None:
    world = make_world(1)
    world.rolling.restart_replica(world.model, "m/0")
    assert {call.partition(" [")[2] for call in world.supervisor.calls} == {"0]"}
    assert "requests wait" in world.said[0]


def test_a_replica_that_does_not_come_back_stops_the_roll(
    make_world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(2)
    guard = CrashGuard(crash_file(world.run_dir, "m-0-rank-0"))
    guard.begin()
    guard.refuse("the weights are gone")
    monkeypatch.setattr(rolling, "replica_status", lambda run_dir, replica: None)
    with pytest.raises(StackError, match="m-0-rank-0 cannot boot: the weights are gone"):
        world.rolling.restart_replica(world.model, "m/0")
    assert world.supervisor.listed() == "0 1"  # whether it takes work is its own word from here on


@pytest.mark.parametrize("stopped", ["m-0:scheduler", "m-0:rank-0"])
def test_an_interrupted_restart_leaves_nothing_stopped(
    stopped: str, make_world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(2)
    _interrupt_at(world, stopped, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        world.rolling.restart_replica(world.model, "m/0")
    assert world.supervisor.calls[-2:] == ["start m-0:rank-0 [0- 1]", "start m-0:scheduler [0- 1]"]
    assert world.supervisor.listed() == "0 1"


def test_an_interrupted_restart_leaves_no_gateway_stopped(
    make_world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(1)
    _interrupt_at(world, "gateways:gateway-1", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        world.rolling.restart_gateways()
    assert world.supervisor.calls[-1] == "start gateways:gateway-1 [0]"


def _interrupt_at(world: World, stopped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while `stopped` is being stopped."""
    stop = world.supervisor.stop

    def interrupted(full_name: str) -> None:
        stop(full_name)
        if full_name == stopped:
            raise KeyboardInterrupt

    monkeypatch.setattr(world.supervisor, "stop", interrupted)


def _leave_draining(world: World, replica: str) -> None:
    """What a killed command leaves."""
    table = read_replicas(world.run_dir)
    table.mark("m", replica, "draining")
    write_replicas(world.run_dir, table)


def test_a_restart_takes_up_a_replica_left_draining(make_world: Callable[[int], World]) -> None:
    world = make_world(2)
    _leave_draining(world, "m/0")
    for replica in ("m/0", "m/1"):
        world.rolling.restart_replica(world.model, replica)
    assert world.supervisor.listed() == "0 1"
    assert not any("requests wait" in text for text in world.said)  # there was always one that served


def test_scaling_replaces_a_replica_left_draining(make_world: Callable[[int], World]) -> None:
    world = make_world(2)
    _leave_draining(world, "m/1")
    world.rolling.scale(world.model, 2)
    assert "remove m-1 [0 1-]" in world.supervisor.calls
    assert world.supervisor.listed() == "0 1"


def test_gateways_restart_one_by_one(make_world: Callable[[int], World]) -> None:
    world = make_world(1)
    world.rolling.restart_gateways()
    assert [call.partition(" [")[0] for call in world.supervisor.calls] == [
        "stop gateways:gateway-0",
        "start gateways:gateway-0",
        "stop gateways:gateway-1",
        "start gateways:gateway-1",
    ]


def test_scaling_up_lists_a_replica_once_it_is_ready(
    make_world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(1)
    listed: list[str] = []

    def status(run_dir: Path, replica: str) -> Status:
        listed.append(f"{replica}: {world.supervisor.listed()}")
        return READY

    monkeypatch.setattr(rolling, "replica_status", status)
    world.rolling.scale(world.model, 3)
    assert [call for call in world.supervisor.calls if call.startswith("add")] == ["add m-1 [0]", "add m-2 [0 1]"]
    assert listed == ["m/1: 0", "m/2: 0 1"]
    assert world.supervisor.listed() == "0 1 2"


def test_scaling_down_drains_first_and_leaves_nothing(make_world: Callable[[int], World]) -> None:
    world = make_world(3)
    sockets = world.run_dir / "replicas" / "m@2"
    sockets.mkdir()
    world.rolling.scale(world.model, 2)
    assert world.supervisor.calls == [
        "stop m-2:scheduler [0 1 2-]",
        "stop m-2:rank-0 [0 1 2-]",
        "remove m-2 [0 1 2-]",
    ]
    assert world.supervisor.listed() == "0 1"
    assert not sockets.exists()


def test_a_new_replica_that_cannot_boot_is_removed_again(
    make_world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(1)
    guard = CrashGuard(crash_file(world.run_dir, "m-1-rank-0"))
    guard.begin()
    guard.refuse("out of memory")
    monkeypatch.setattr(rolling, "replica_status", lambda run_dir, replica: None)
    with pytest.raises(StackError, match="out of memory"):
        world.rolling.scale(world.model, 2)
    assert world.supervisor.calls[-1] == "remove m-1 [0]"
    assert not crash_file(world.run_dir, "m-1-rank-0").exists()
    assert world.supervisor.listed() == "0"


def test_a_replica_that_listens_on_tcp_stays_the_only_one(make_world: Callable[[int], World]) -> None:
    world = make_world(1)
    model = replace(world.model, scheduler=SchedulerConfig(listen="tcp://127.0.0.1:7000"))
    with pytest.raises(StackError, match="one endpoint, for one replica"):
        world.rolling.scale(model, 2)
    assert world.supervisor.calls == []


@pytest.mark.parametrize("count", [0, 65])
def test_a_number_of_replicas_out_of_range(count: int, make_world: Callable[[int], World]) -> None:
    with pytest.raises(StackError, match=r"must be 1\.\.64"):
        make_world(1).rolling.scale(make_world(1).model, count)


def test_a_supervisord_that_has_died_is_told_before_anything_else(make_world: Callable[[int], World]) -> None:
    world = make_world(2)
    before = world.supervisor.listed()

    def gone() -> list[ProcessInfo]:
        raise SupervisorGone("nobody answers")

    world.supervisor.processes = gone  # type: ignore[method-assign]
    for change in (
        lambda: world.rolling.restart_replica(world.model, "m/0"),
        lambda: world.rolling.scale(world.model, 1),
        lambda: world.rolling.scale(world.model, 3),
    ):
        with pytest.raises(SupervisorGone):
            change()
    assert (world.said, world.supervisor.calls, world.supervisor.listed()) == ([], [], before)
    assert not replica_file(world.run_dir, "m/2").exists()


def test_scaling_to_what_there_is_does_nothing(make_world: Callable[[int], World]) -> None:
    world = make_world(2)
    world.rolling.scale(world.model, 2)
    assert world.supervisor.calls == []


def test_one_change_at_a_time(make_world: Callable[[int], World], tmp_path: Path) -> None:
    with pytest.raises(StackError, match="no stack runs"), exclusive(tmp_path):
        pass
    world = make_world(1)
    message = "another bouquet restart or scale"
    with exclusive(world.run_dir), pytest.raises(StackError, match=message), exclusive(world.run_dir):
        pass
    with exclusive(world.run_dir):
        pass
