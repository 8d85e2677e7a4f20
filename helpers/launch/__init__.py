"""Run a notebook function on every rank: `@distributed(gpus=2)` above it, then `train.distributed(...)`.

One job, read in this order: decorator.py decides where it runs; payload.py carries the function over; local.py starts
the ranks of this machine; worker.py is what each of them executes; watch.py shows their output and watches the clock;
failure.py turns what went wrong into one exception.
"""

from .decorator import Distributed, distributed
from .failure import WorkerDied, WorkerError, WorkersStalled
from .payload import PayloadError

__all__ = ["Distributed", "PayloadError", "WorkerDied", "WorkerError", "WorkersStalled", "distributed"]
