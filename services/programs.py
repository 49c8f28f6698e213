"""The programs of a stack and their names: in supervisord, in logs and in the process list."""

import re

from msgspec import Struct

GATEWAY_GROUP = "gateways"
RESERVED_NAMES = frozenset({GATEWAY_GROUP})


class Program(Struct, frozen=True):
    """One supervised process. `group:process` is its name for supervisorctl, `name` that of its files."""

    group: str
    process: str
    name: str
    title: str  # in the process list

    @property
    def full_name(self) -> str:
        return f"{self.group}:{self.process}"


def slug(text: str) -> str:
    """`text` as part of a file or program name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def replica_group(replica: str) -> str:
    """The supervisord group of a replica_id: `all-minilm-l6-v2/0` → `all-minilm-l6-v2-0`."""
    model, _, index = replica.rpartition("/")
    return f"{slug(model)}-{index}"


def gateway_program(index: int) -> Program:
    return Program(GATEWAY_GROUP, f"gateway-{index}", f"gateway-{index}", f"bouquet: ivy {index}")


def scheduler_program(replica: str) -> Program:
    group = replica_group(replica)
    return Program(group, "scheduler", f"{group}-scheduler", f"bouquet: tulip {replica}")


def rank_program(replica: str, rank: int) -> Program:
    group = replica_group(replica)
    return Program(group, f"rank-{rank}", f"{group}-rank-{rank}", f"bouquet: rose {replica} rank {rank}")


def replica_programs(replica: str, num_ranks: int) -> list[Program]:
    """Ranks first, then the scheduler."""
    return [*(rank_program(replica, rank) for rank in range(num_ranks)), scheduler_program(replica)]
