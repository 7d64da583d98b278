"""Some ranks of a gloo group as processes that live through a test module and run functions given to them."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import torch
import torch._dynamo  # what an optimizer's first step imports: here once, and not half a second in every rank
import torch.distributed as c10d

from tessera.dist import mesh

WAIT_S = 600


class GlooRanks:
    """`run(function, *args)` calls it on every rank as `function(rank, *args)`, and returns what each rank did."""

    def __init__(
        self, count: int, *, node_size: int | None = None, timeout_s: float = 1800.0, wait_s: float = WAIT_S
    ) -> None:
        self.count = count
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._node_size = node_size
        self._start()

    def _start(self) -> None:
        fork = multiprocessing.get_context("fork")  # torch is imported once, not by every rank
        port = 0  # rank 0 takes a free one and says which: one that was free before may be another suite's by now
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(self.count):
            ours, theirs = fork.Pipe()
            args = (theirs, rank, self.count, port, self._node_size, self._timeout_s)
            process = fork.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(ours)
            self.processes.append(process)
            if rank == 0:
                port = ours.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(WAIT_S)

    def run_without(
        self, lost: int, function: Callable[..., Any], *args: Any, wanted: list[int] | None = None
    ) -> list[Any]:
        """As `run`, where one rank never answers: what the others (or those `wanted`) did. Nothing can be run after."""
        for pipe in self._pipes:
            pipe.send((function, args))
        others = [self._pipes[rank] for rank in wanted or range(self.count) if rank != lost]
        results = [pipe.recv()[1] if pipe.poll(WAIT_S) else "no answer" for pipe in others]
        for process in self.processes:
            process.kill()
            process.join(WAIT_S)
        self._pipes = []
        return results

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        waiting = dict(zip(self._pipes, range(self.count), strict=True))
        results = [None] * self.count
        while waiting:
            for pipe in wait(list(waiting), self._wait_s) or [None]:
                is_fine, result = pipe.recv() if pipe is not None else (False, f"no answer of ranks {waiting.values()}")
                if not is_fine:  # the others wait for it in vain: start anew
                    for process in self.processes:
                        process.kill()
                    self._start()
                    raise AssertionError(result)
                results[waiting.pop(pipe)] = result
        return results


def _serve(pipe: Connection, rank: int, count: int, port: int, node_size: int | None, timeout_s: float) -> None:
    torch.set_num_threads(1)
    mesh._whole_meshes.clear()  # a rank is a program of its own: it has no mesh of the tests before it
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(node_size or count))
    timeout = datetime.timedelta(seconds=timeout_s)
    store = c10d.TCPStore("127.0.0.1", port, count, rank == 0, timeout, wait_for_workers=False)
    if rank == 0:
        pipe.send(store.port)
    c10d.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            pipe.send((True, function(rank, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    c10d.destroy_process_group()
