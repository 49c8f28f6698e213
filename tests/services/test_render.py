"""What supervisord is told, read back with supervisord's own parser."""

import sys
from pathlib import Path
from typing import Any

import pytest
from supervisor.options import ServerOptions

from services import render
from services.config import ServiceConfig, build_config
from services.placement import PlacementError, place
from services.stack import write_stack

MODELS = [
    {"name": "org/m-1.5", "source": "/m", "replicas": 2, "rank": {"num_threads": 3}},
    {"name": "n", "source": "/n", "scheduler": {"drain_timeout_ms": 1500}},
]


def build(run_dir: Path, **more: Any) -> ServiceConfig:
    return build_config({"models": MODELS, "gateway": {"num_gateways": 3}, **more}, Path("/"), run_dir)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path / "run 1"  # supervisord splits and expands values; a space must survive


def parsed(run_dir: Path) -> ServerOptions:
    options = ServerOptions()
    options.realize(["--configuration", str(run_dir / "supervisord.conf")])
    return options


def programs_of(options: ServerOptions) -> dict[str, Any]:
    return {f"{group.name}:{p.name}": p for group in options.process_group_configs for p in group.process_configs}


def test_the_programs_and_their_groups(run_dir: Path) -> None:
    write_stack(build(run_dir), {"org/m-1.5": Path("/m"), "n": Path("/n")})
    options = parsed(run_dir)
    assert sorted(programs_of(options)) == [
        "gateways:gateway-0",
        "gateways:gateway-1",
        "gateways:gateway-2",
        "n-0:rank-0",
        "n-0:scheduler",
        "org_m-1.5-0:rank-0",
        "org_m-1.5-0:scheduler",
        "org_m-1.5-1:rank-0",
        "org_m-1.5-1:scheduler",
    ]
    # supervisord stops the last group of this order first
    assert sorted(options.process_group_configs)[-1].name == "gateways"


def test_commands_name_the_process(run_dir: Path) -> None:
    write_stack(build(run_dir), {"org/m-1.5": Path("/m"), "n": Path("/n")})
    commands = {name: program.command for name, program in programs_of(parsed(run_dir)).items()}
    start = f"{sys.executable} -m services."
    assert commands["gateways:gateway-2"] == f"{start}gateway_main '--run-dir={run_dir}' --index=2"
    assert commands["org_m-1.5-1:scheduler"].endswith("--model=org/m-1.5 --replica=org/m-1.5/1")
    assert commands["n-0:rank-0"] == f"{start}rose_main '--run-dir={run_dir}' --model=n --replica=n/0 --rank=0"


def test_every_program_restarts_and_stops_as_a_group(run_dir: Path) -> None:
    write_stack(build(run_dir), {"org/m-1.5": Path("/m"), "n": Path("/n")})
    for name, program in programs_of(parsed(run_dir)).items():
        assert program.autorestart.__name__ == "RestartUnconditionally", name
        assert program.startsecs == 10
        assert program.startretries > 1000
        assert program.stopasgroup
        assert program.killasgroup
        assert program.redirect_stderr
        assert program.stdout_logfile.startswith(f"{run_dir}/logs/")
        assert program.stdout_logfile_maxbytes > 0


def test_stop_waits_cover_the_drains(run_dir: Path) -> None:
    write_stack(build(run_dir), {"org/m-1.5": Path("/m"), "n": Path("/n")})
    waits = {name: program.stopwaitsecs for name, program in programs_of(parsed(run_dir)).items()}
    assert waits["gateways:gateway-0"] == waits["org_m-1.5-0:scheduler"] == 30
    assert waits["n-0:scheduler"] == 12
    assert waits["n-0:rank-0"] == 10


RANKS = {"org_m-1.5-0:rank-0", "org_m-1.5-1:rank-0", "n-0:rank-0"}


@pytest.mark.parametrize(("num_cores", "spinning"), [(8, True), (7, False), (2, False)])
def test_threads(num_cores: int, spinning: bool, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks spin for a moment unless they have more threads than there are cores (two with 3, one with a third)."""
    monkeypatch.setattr(render.os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    write_stack(build(run_dir), {"org/m-1.5": Path("/m"), "n": Path("/n")})
    programs = programs_of(parsed(run_dir))
    assert {program.environment["OMP_NUM_THREADS"] for program in programs.values()} == {"1"}
    found = {
        name: {full_name for full_name, program in programs.items() if name in program.environment}
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    assert found == {"GOMP_SPINCOUNT": RANKS if spinning else set(), "OMP_WAIT_POLICY": set() if spinning else RANKS}


def test_supervisord_listens_in_the_run_directory_only(run_dir: Path) -> None:
    write_stack(build(run_dir), {"org/m-1.5": Path("/m"), "n": Path("/n")})
    options = parsed(run_dir)
    servers = [(server["section"], server.get("file"), server.get("chmod")) for server in options.server_configs]
    assert servers == [("unix_http_server", f"{run_dir}/supervisor.sock", 0o700)]
    assert options.nodaemon


def test_a_percent_sign_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render.sys, "executable", "/opt/100%s/python")
    text = render.gateway_config(build(tmp_path), tmp_path)
    assert "command=/opt/100%%s/python -m" in text


def test_a_file_of_its_own_for_each_replica(run_dir: Path) -> None:
    write_stack(build(run_dir), {"org/m-1.5": Path("/m"), "n": Path("/n")})
    names = {path.name for path in (run_dir / "programs").iterdir()}
    assert names == {"gateways.conf", "n-0.conf", "org_m-1.5-0.conf", "org_m-1.5-1.conf"}
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_replicas_are_spread_over_gpus(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    config = build(run_dir, rank={"memory_fraction": 0.5})
    write_stack(config, {"org/m-1.5": Path("/m"), "n": Path("/n")})
    gpus = {name: p.environment.get("CUDA_VISIBLE_DEVICES") for name, p in programs_of(parsed(run_dir)).items()}
    assert [gpus["org_m-1.5-0:rank-0"], gpus["org_m-1.5-1:rank-0"], gpus["n-0:rank-0"]] == ["4", "6", "4"]
    assert gpus["gateways:gateway-0"] is None
    text = render.replica_config(config, config.model("n"), "n/1", run_dir)
    assert 'CUDA_VISIBLE_DEVICES="6"' in text
    (run_dir / "programs" / "n-1.conf").write_text(text)
    with pytest.raises(PlacementError, match=r"n/2 needs 0.50 of 1 GPU.*GPU 4: 1.00 taken, GPU 6: 1.00 taken"):
        render.replica_config(config, config.model("n"), "n/2", run_dir)


def test_each_rank_of_a_replica_has_a_gpu_of_its_own(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    write_stack(build(run_dir, models=[{"name": "n", "source": "/n", "tensor_parallel_size": 2}]), {"n": Path("/n")})
    programs = programs_of(parsed(run_dir))
    gpus = {name: program.environment.get("CUDA_VISIBLE_DEVICES") for name, program in programs.items()}
    assert {name: gpu for name, gpu in gpus.items() if gpu} == {"n-0:rank-0": "4", "n-0:rank-1": "6"}
    assert "--rank=1" in programs["n-0:rank-1"].command
    for rank in range(2):  # no multicast: killed, it can put the GPUs out of service
        environment = programs[f"n-0:rank-{rank}"].environment
        assert environment["NCCL_NVLS_ENABLE"] == "0"
        assert environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_no_gpu_is_given_to_a_model_on_cpu(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = build(run_dir, rank={"device": "cpu"})
    text = render.replica_config(config, config.model("n"), "n/0", run_dir)
    assert "CUDA_VISIBLE_DEVICES" not in text


def test_placement_prefers_the_emptiest() -> None:
    assert place({"0": 0.5, "1": 0.2, "2": 0.5}, 0.5, 2, "m/0") == ["1", "0"]
    assert place({"0": 0.3}, 0.7, 1, "m/0") == ["0"]  # 0.3 + 0.7 > 1 in floating point must not matter
    with pytest.raises(PlacementError):
        place({"0": 0.0}, 0.5, 2, "m/0")
