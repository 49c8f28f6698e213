"""`bouquet status`: every process, every model, and whether the stack serves."""

from pathlib import Path

from ipc.addresses import crash_file
from ipc.control import Status
from services.config import RunConfig
from services.crash_guard import read_history
from services.health import http_ready, replica_status
from services.programs import Program
from services.replicas import read_replicas
from services.stack import Say, stack_programs, url
from services.supervisor_client import ProcessInfo, SupervisorClient

Row = tuple[str, ...]
HEADINGS: Row = ("PROGRAM", "STATE", "PID", "UPTIME", "RESTARTS")
REPLICA_HEADINGS: Row = ("REPLICA", "STATE", "REQUESTS", "TOKENS", "LAST FORWARD", "MODEL")


def print_status(run: RunConfig, say: Say) -> int:
    """Prints the tables; 0 if the stack serves, 1 if not. Raises SupervisorGone."""
    config = run.config
    run_dir = Path(config.run_dir)
    with SupervisorClient(run_dir) as client:
        processes = {info.full_name: info for info in client.processes()}
    table = read_replicas(run_dir)
    rows = [HEADINGS, *(_program_row(run_dir, program, processes) for program in stack_programs(config, table))]
    models = [REPLICA_HEADINGS]
    models += [
        _replica_row(replica.id, replica.state, replica_status(run_dir, replica.id))
        for model in config.models
        for replica in table.models[model.name].replicas
    ]
    ready, reason = http_ready(config.gateway.host, config.gateway.port)
    say("\n".join([_aligned(rows), "", _aligned(models), "", f"{url(config)}  " + _verdict(ready, reason)]))
    return 0 if ready else 1


def _program_row(run_dir: Path, program: Program, processes: dict[str, ProcessInfo]) -> Row:
    info = processes.get(program.full_name)
    history = read_history(crash_file(run_dir, program.name))
    restarts = str(max(0, history.num_starts - 1))
    if info is None:
        return (program.full_name, "MISSING", "-", "-", restarts)
    state = f"{info.statename} (cannot boot)" if history.boot_error else info.statename
    return (program.full_name, state, str(info.pid or "-"), _duration(info.uptime_s), restarts)


def _replica_row(replica: str, listed: str, status: Status | None) -> Row:
    if status is None:
        return (replica, "silent", "-", "-", "-", "-")
    state = listed if listed == "draining" else status.state
    age = f"{status.forward_age_ms / 1000:.1f} s ago" if status.forward_age_ms >= 0 else "none yet"
    facts = status.facts
    model = "-"
    if facts is not None:
        gives = f"{facts.dimension} × {facts.dtype}"
        if facts.task == "generate":
            gives = f"{facts.dtype}, {facts.num_blocks} blocks of {facts.block_size} tokens"
        model = f"{facts.architecture}, {facts.task}, {gives}, {facts.max_model_len} tokens, {facts.device}"
    return (replica, state, str(status.num_requests), str(status.num_tokens), age, model)


def _verdict(ready: bool, reason: str) -> str:
    return "ready" if ready else f"NOT READY: {reason}"


def _duration(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _aligned(rows: list[Row]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
