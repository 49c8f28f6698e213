"""What a handler may touch: the parts of one gateway process, made once in app.running_gateway."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from gateway.client import SchedulerClient
from gateway.config import GatewayConfig
from gateway.errors import UnknownModel
from gateway.limits import Admission
from gateway.metrics import Metrics
from gateway.models import ServedModel


class Gateway:
    def __init__(
        self,
        config: GatewayConfig,
        models: dict[str, ServedModel],
        client: SchedulerClient,
        metrics: Metrics,
        pool: ThreadPoolExecutor,
        watching: "asyncio.Task[None]",
    ) -> None:
        self.config = config
        self.models = models
        self.client = client
        self.metrics = metrics
        self.pool = pool
        self.watching = watching  # replicas.json; without it this process is of no use
        # the requests of all models, before anything is read; and of each, so that one whose replicas are dead or slow
        # keeps no place that another's need
        limit = config.max_concurrent_requests
        self.admission = Admission(limit * len(models), f"in all, {limit} for each model")
        self.admission_of = {name: Admission(limit, f"for model {name!r}") for name in models}
        self.draining = False
        self.started_at = int(time.time())

    def model(self, name: str) -> ServedModel:
        """Raises UnknownModel."""
        model = self.models.get(name)
        if model is None:
            known = ", ".join(sorted(self.models))
            raise UnknownModel(f"no model {name[:100]!r} here; there is: {known}", param="model")
        return model
