"""The scheduler's loop and links end to end: real sockets, a real ring, fake ranks in processes of their own."""

import numpy as np

from tests.scheduler.stack import expected, stack


async def test_one_submit_gets_one_result() -> None:
    async with stack() as made:
        made.scheduler()
        made.rank()
        gateway = made.gateway()
        status = await gateway.ready()
        assert status.facts is not None
        assert status.facts.dimension == 384
        rows = [[101, 5, 6, 102], [101, 7, 102]]
        assert np.array_equal(await gateway.embed(1, rows), expected(rows))
        assert len(gateway.outcomes[1]) == 1
