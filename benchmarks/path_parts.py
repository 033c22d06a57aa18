"""Which of the functions that a job runs through `benchmarks.path` leaves out or counts apart, and why.

Each entry is a file, a folder with `/` at its end, or `file:function`. One that nothing of a job's way answers to is an
error: whoever moves or renames a function mends the list.
"""

from __future__ import annotations

from monitoring.logs import ROOMS as ROOMS

# Behind an interface of ours: with other services or another model other code runs there.
ADAPTERS = (
    "infra/broker/embedded/broker.py",
    "infra/broker/embedded/server.py",
    "kvstore/base.py",  # what an adapter inherits that can do no better
    "kvstore/memory.py",
    "kvstore/records.py",  # the bytes of a record, which only adapters see
)
ENGINES = ("engines/",)

# With all that they call: they look now and then whether something else is to be done, and run without a job too.
POLLING = (
    "infra/worker_loop.py:JobSource.urgent",  # the lane of people who wait
    "infra/worker_loop.py:JobSource._suspect",
    "kvstore/cluster_state.py:BestEffortClusterState.registrations",  # of the other workers, read again once a second
    "producers/batch/runner.py:Runner._look_around",
)

# Helpers that every stage uses. What they do is told by their names; whoever follows a job passes them by.
SHARED = (
    "messages/",  # contracts: their checks, their codec
    "infra/broker/failpoints.py",
    "infra/broker/topology.py",  # names of queues
    "infra/broker/trace.py",  # the traceparent header
    "kvstore/cluster_state.py",  # the interface of the cluster state again, with an answer while the store is away
    "producers/storage/private.py",  # modes and folders
)
