"""replicas.json: its content, and that a reader never sees half of it."""

import threading
from pathlib import Path

import msgspec
import pytest

from services.replicas import ReplicasError, ReplicaTable, read_replicas, write_replicas


def make_table(run_dir: Path, count: int) -> ReplicaTable:
    table = ReplicaTable()
    for index in range(count):
        table.add(run_dir, "m", f"m/{index}")
    return table


def test_the_file_as_gateways_read_it(tmp_path: Path) -> None:
    table = make_table(tmp_path, 2)
    table.mark("m", "m/1", "draining")
    write_replicas(tmp_path, table)
    assert msgspec.json.decode((tmp_path / "replicas.json").read_bytes()) == {
        "version": 1,
        "models": {
            "m": {
                "replicas": [
                    {"id": "m/0", "endpoint": f"ipc://{tmp_path}/replicas/m@0/gateways.sock", "state": "active"},
                    {"id": "m/1", "endpoint": f"ipc://{tmp_path}/replicas/m@1/gateways.sock", "state": "draining"},
                ]
            }
        },
    }
    assert read_replicas(tmp_path).num_active("m") == 1


def test_versions_grow(tmp_path: Path) -> None:
    write_replicas(tmp_path, make_table(tmp_path, 1))
    table = read_replicas(tmp_path)
    write_replicas(tmp_path, table)
    assert read_replicas(tmp_path).version == 2


def test_the_gap_left_by_a_removed_replica_is_filled(tmp_path: Path) -> None:
    table = make_table(tmp_path, 12)
    assert table.ids("m")[-2:] == ["m/10", "m/11"]  # by number, not by letter
    assert table.free_id("m") == "m/12"
    table.remove("m", "m/3")
    assert table.free_id("m") == "m/3"


def test_a_reader_sees_whole_tables_only(tmp_path: Path) -> None:
    write_replicas(tmp_path, make_table(tmp_path, 1))
    done = threading.Event()
    counts: list[int] = []

    def read() -> None:
        while not done.is_set():
            counts.append(len(read_replicas(tmp_path).ids("m")))

    reader = threading.Thread(target=read)
    reader.start()
    for round_ in range(200):
        write_replicas(tmp_path, make_table(tmp_path, 1 + 40 * (round_ % 2)))
    done.set()
    reader.join()
    assert set(counts) <= {1, 41}
    assert len(counts) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["replicas.json"]


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[]"])
def test_a_damaged_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "replicas.json").write_bytes(content)
    with pytest.raises(ReplicasError, match=r"replicas\.json cannot be read .*`bouquet up`"):
        read_replicas(tmp_path)
