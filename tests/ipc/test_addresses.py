"""Names of files: different replicas never share one, and none escapes the run directory."""

import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ipc import addresses
from ipc.addresses import AddressError

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
RUN = Path("/run/bouquet")
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


def test_the_usual_names_stay_readable() -> None:
    replica = addresses.replica_id("all-minilm-l6-v2", 0)
    assert addresses.gateway_endpoint(RUN, replica) == ("ipc:///run/bouquet/replicas/all-minilm-l6-v2@0/gateways.sock")
    assert addresses.membership_path(RUN, replica).parent == addresses.replica_dir(RUN, replica)


@settings(CALM)
@given(names, names, st.integers(0, 99), st.integers(0, 99))
def test_two_replicas_never_share_a_folder(one: str, other: str, index: int, other_index: int) -> None:
    assume((one, index) != (other, other_index))
    folders = [addresses.replica_dir(RUN, addresses.replica_id(*pair)) for pair in ((one, index), (other, other_index))]
    assert folders[0] != folders[1]
    assert addresses.crash_file(RUN, one) != addresses.crash_file(RUN, other) or one == other


@pytest.mark.parametrize(
    ("one", "other"),
    [("a b", "a_b"), ("a/b", "a_b"), ("a/b", "a@b"), ("a=b", "a@b"), ("A", "a"), ("ü", "u"), ("a", ".a")],
)
def test_names_that_look_alike_differ(one: str, other: str) -> None:
    assert addresses.replica_dir(RUN, one) != addresses.replica_dir(RUN, other)


@settings(CALM)
@given(names)
def test_a_name_is_one_visible_folder_below_the_run_directory(name: str) -> None:
    folder = addresses.replica_dir(RUN, name)
    assert folder.parent == RUN / "replicas"
    assert folder.name.isascii()
    assert not folder.name.startswith(".")
    assert addresses.crash_file(RUN, name).parent == RUN / "starts"


def test_a_path_too_long_for_a_socket_is_refused_with_a_remedy() -> None:
    replica = addresses.replica_id("m" * 60, 0)
    addresses.gateway_endpoint(Path("/" + "r" * 20), replica)
    for make in (addresses.gateway_endpoint, addresses.rank_endpoint, addresses.membership_path):
        with pytest.raises(AddressError, match="choose a shorter run_dir or model name"):
            make(Path("/" + "r" * 60), replica)


def test_the_longest_path_allowed_can_be_bound() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        replica = "m"
        rest = addresses.MAX_SOCKET_PATH_BYTES - len(str(addresses.membership_path(Path(folder), replica)))
        path = addresses.membership_path(Path(folder) / ("r" * (rest - 1)), replica)
        assert len(bytes(path)) == addresses.MAX_SOCKET_PATH_BYTES
        path.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
