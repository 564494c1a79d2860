"""The GPU worker: one model, one engine, many chunks.

    starting ──engine ready──> ready ──idle, asked, signal, lifetime──> draining ──> stopped
        └── engine does not start ──┴── engine does not come back ──> failed

Several loops run beside each other in one event loop: leasing, feeding (`runner`), checkpoints, heartbeats, the state
that the ledger shows. Killed at any moment, it costs what was in flight and what no checkpoint held yet: its leases run
out, and other workers go on from its checkpoints.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from batch_pipeline import ids
from batch_pipeline.engine import Engine
from batch_pipeline.errors import SettingsError
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import HeartbeatReply, LeaseRef, Standing, WorkerState
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from batch_pipeline.worker import signals
from batch_pipeline.worker.chunk import HeldChunk, Phase
from batch_pipeline.worker.holdings import Holdings
from batch_pipeline.worker.outages import OUTAGES, GivenUp, Outages, is_outage, was_set
from batch_pipeline.worker.report import Ended, WorkerReport
from batch_pipeline.worker.runner import Clocks, Runner
from batch_pipeline.worker.sharing import Sharing
from batch_pipeline.worker.speed import Speedometer
from batch_pipeline.worker.tuning import Tuning
from batch_pipeline.worker.writer import ChunkWriter

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_MOST_HELD = 4
"""Chunks held at most, those that only wait for their last answers included, as a multiple of `leases`."""
_LOOK_FOR_EXPIRY_SECONDS = 1.0


def _nobody(_batch_id: str) -> None:
    """Tell nobody that a batch has drained."""


def _nothing() -> None:
    """Do nothing at a signal but what the worker does itself."""


class Worker:
    """One life of a worker; `run` it once. It owns its engine: started with it, stopped with it."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        store: ObjectStore,
        settings: Settings,
        model: str,
        engine: Engine,
        run_id: str | None = None,
        only_batches: Sequence[str] = (),
        on_batch_drained: Callable[[str], None] = _nobody,
        on_signal: Callable[[], None] = _nothing,
        worker_id: str | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        """Raises SettingsError where the model is not in the catalogue.

        `on_batch_drained` is called in a thread of its own when a commit or a release of ours was a batch's last one;
        what it raises ends the worker. `on_signal` is called, in a thread as well, as soon as a signal tells the worker
        to end and while it still hands its work back. `clocks` default to the machine's monotonic clock and the
        ledger's time.
        """
        if model not in settings.models:
            known = ", ".join(sorted(settings.models)) or "none"
            raise SettingsError(f"models.{model} is not in the catalogue (known: {known})")
        self.worker_id = worker_id or ids.new_worker_id(model)
        self._ledger = ledger
        self._settings = settings.worker
        self._name = model
        self._model = settings.models[model]
        self._engine = engine
        self._run_id = run_id
        self._only = list(only_batches)
        self._on_signal = on_signal
        self._ledger_time_at_zero = time.time() - time.monotonic()
        self._clocks = clocks or Clocks(time.monotonic, self._ledger_time, random.Random())  # noqa: S311 - jitter
        self._outages = Outages(self._clocks.random, self._part_is_away)
        self._runner = Runner(engine, self._settings, self._model, self, self._clocks)
        writer = ChunkWriter(ledger, store, self._outages)
        self._holdings = Holdings(writer, self._runner, self._model.version, on_batch_drained, self._spawn)
        self._tuning = Tuning(
            model,
            self._model,
            self._settings.machine,
            runner=self._runner,
            store=store,
            outages=self._outages,
            clocks=self._clocks,
        )
        self._speedometer = Speedometer()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leasing: asyncio.Task[None] | None = None
        self._late: set[LeaseRef] = set()
        self._state: tuple[WorkerState, str | None] = (WorkerState.STARTING, None)
        self._engine_trouble: str | None = None
        self._outage: str | None = None
        self._live_traffic: str | None = None
        self._faults: list[BaseException] = []
        """What failed after there was a reason to end."""

    def run(self) -> WorkerReport:
        """Work until there is a reason to end, and return it with what was done.

        Raises EngineError where the engine does not start or does not come back, after the ledger was told so and every
        chunk was handed back.
        """
        with asyncio.Runner() as runner:
            return runner.run(self._live())

    async def _live(self) -> WorkerReport:
        loop = asyncio.get_running_loop()
        # A call that hangs (a database that is away) must not keep the heartbeat from its thread.
        loop.set_default_executor(ThreadPoolExecutor(3 * self._settings.leases + 6, thread_name_prefix="worker"))
        self._ended: asyncio.Future[Ended] = loop.create_future()
        self._draining = asyncio.Event()
        self._hurry = asyncio.Event()
        self._hungry = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._state_changed = asyncio.Event()
        self._state_writing = asyncio.Lock()
        self._started = self._clocks.monotonic()
        with signals.calling(self._signalled, loop):
            try:
                await self._work()
                ended = await self._ended
                await self._drain(ended)
                await self._engine.stop()
                if self._faults:
                    raise self._faults[0]
                self._show(WorkerState.STOPPED, f"ended: {ended}")
                await self._write_state()
                return self._report(ended)
            except Exception as error:
                await self._hand_back_after(error)
                raise
            finally:
                await self._close()

    async def _work(self) -> None:
        """Start everything, and return when there is a reason to end. Raises what ended it otherwise."""
        if not await self._unless_ended(self._register()):
            return
        self._spawn(self._heartbeats())
        self._spawn(self._expiries())
        self._spawn(self._states())
        if not await self._unless_ended(self._start_engine()):
            return
        self._show(WorkerState.READY)
        loop = asyncio.get_running_loop()
        lifetime = loop.call_later(self._settings.lifetime_seconds, self._end, Ended.LIFETIME)
        self._leasing = self._spawn(self._leases())
        self._spawn(self._checkpoints())
        if self._model.shared.live_traffic:
            self._share_engine()
        if self._tuning.is_wanted:
            self._spawn(self._tuning.find())
        try:
            await self._ended
        finally:
            lifetime.cancel()

    async def _register(self) -> None:
        await self._outages.outlast(
            None,
            self._ledger.workers.register,
            self.worker_id,
            self._name,
            self._run_id,
            socket.gethostname(),
            self._only,
        )
        now = await self._outages.outlast(None, self._ledger.now)
        self._ledger_time_at_zero = now - time.monotonic()

    async def _start_engine(self) -> None:
        await self._engine.start()
        await self._engine.wait_ready()
        await self._runner.open()
        await self._tuning.recall()
        log.info("%s serves %s on engine %s", self.worker_id, self._name, self._runner.engine_version)

    def _share_engine(self) -> None:
        sharing = Sharing(
            self._engine.url,
            self._name,
            self._model,
            runner=self._runner,
            told=self._gives_way,
            clock=self._clocks.monotonic,
        )
        for loop in (sharing.probe(), sharing.find_priority(), sharing.look()):
            self._spawn(loop)

    # What the runner tells (see `runner.Listener`).

    def complete(self, chunk: HeldChunk) -> None:
        """Commit the chunk."""
        self._holdings.complete(chunk)

    def late(self, chunk: HeldChunk) -> None:
        """Ask the ledger, whose clock decides whether the deadline has passed."""
        if chunk.ref not in self._late:
            self._late.add(chunk.ref)
            self._beat_now.set()

    def hungry(self) -> None:
        """Lease another chunk where one more may be held."""
        if not self._has_enough():
            self._hungry.set()

    def engine_state(self, ready: bool, detail: str | None) -> None:
        """Let the ledger show it: whatever holds a batch up has a name (invariant I9)."""
        self._engine_trouble = detail
        if not self._draining.is_set():
            self._show(WorkerState.READY if ready else WorkerState.STARTING, self._trouble())

    def _part_is_away(self, trouble: str | None) -> None:
        """Let the ledger show that the store is away, or was for a while (of itself it cannot)."""
        self._outage = trouble
        self._show_trouble()

    def _gives_way(self, reason: str | None) -> None:
        """Let the ledger show that live traffic holds work up."""
        self._live_traffic = reason
        self._show_trouble()

    def _trouble(self) -> str | None:
        return self._engine_trouble or self._outage or self._live_traffic

    def _show_trouble(self) -> None:
        state, _ = self._state
        if state in (WorkerState.STARTING, WorkerState.READY) and not self._draining.is_set():
            self._show(state, self._trouble())

    def failed(self, error: BaseException) -> None:
        """End with this error."""
        if not self._ended.done():
            self._ended.set_exception(error)
        else:
            self._faults.append(error)

    # The loops.

    async def _leases(self) -> None:
        """Lease the next chunk before the requests of the held ones run out; leave when nothing comes for long."""
        idle_since: float | None = None
        while not self._draining.is_set():
            self._hungry.clear()
            if self._has_enough():
                await self._hungry.wait()
                continue
            leased_at = self._clocks.monotonic()
            try:
                leases = await self._outages.outlast(
                    self._draining,
                    self._ledger.chunks.lease,
                    self.worker_id,
                    self._name,
                    self._wanted(),
                    self._only or None,
                    self._run_id,
                    # Nothing is taken meanwhile; what is let go of meanwhile has no valid lease to be renewed.
                    held=self._holdings.refs(),
                )
            except GivenUp:
                return
            for lease in leases:
                self._holdings.take(lease, leased_at + self._settings.lease_seconds)
            if leases or len(self._holdings):
                idle_since = None
            elif idle_since is None:
                idle_since = leased_at
            elif leased_at - idle_since >= self._settings.warm_seconds:
                self._end(Ended.IDLE)
                return
            if not leases:
                await was_set(self._draining, self._settings.poll_seconds)

    def _wanted(self) -> int:
        """Return how many chunks to lease: one, or as many small ones as it takes to feed the engine."""
        held = self._holdings.chunks()
        if not held:
            return 1
        missing = 2 * self._runner.most_in_flight - self._runner.unfed
        feeding = sum(1 for chunk in held if chunk.unfed)
        free = min(self._settings.leases - feeding, _MOST_HELD * self._settings.leases - len(held))
        return max(1, min(free, missing // max(chunk.lease.requests for chunk in held)))

    def _has_enough(self) -> bool:
        """Whether no further chunk is wanted now.

        Chunks that only wait for their last answers or for a retry do not count as `leases`: a few requests that are
        retried for minutes would keep everything else from the engine. Of those, `_MOST_HELD` times as many are held.
        """
        feeding = sum(1 for chunk in self._holdings.chunks() if chunk.unfed)
        return (
            feeding >= self._settings.leases
            or len(self._holdings) >= _MOST_HELD * self._settings.leases
            or self._runner.unfed >= 2 * self._runner.most_in_flight
        )

    async def _checkpoints(self) -> None:
        while True:
            await asyncio.sleep(self._settings.checkpoint_seconds)
            await self._holdings.checkpoint()

    async def _heartbeats(self) -> None:
        while True:
            self._beat_now.clear()
            pause = self._settings.heartbeat_seconds
            asked_at = self._clocks.monotonic()
            try:
                reply = await asyncio.to_thread(
                    self._ledger.workers.heartbeat,
                    self.worker_id,
                    self._holdings.refs(),
                    self._speedometer.look(asked_at, self._runner.tokens_by(asked_at), self._runner.in_flight > 0),
                )
            except OUTAGES as error:
                if not is_outage(error):
                    raise
                log.warning("no heartbeat: %s", " ".join(str(error).split())[:300])
                pause = min(pause, _RETRY_SECONDS)
            else:
                await self._heard(reply, asked_at)
            await was_set(self._beat_now, pause)

    async def _heard(self, reply: HeartbeatReply, asked_at: float) -> None:
        for ref, standing in reply.standings.items():
            chunk = self._holdings.get(ref)
            if chunk is None:
                continue
            if standing is Standing.LOST and chunk.phase is Phase.COMMITTING:
                # Its commit tells, and may have ended the lease between this question and its answer.
                continue
            if standing is Standing.LOST:
                await self._holdings.lose(chunk, "the ledger says so")
            else:
                chunk.valid_until = asked_at + self._settings.lease_seconds
            if standing is Standing.STOP:
                self._spawn(self._holdings.stop(chunk, "the batch is to stop"))
        if reply.leave:
            self._end(Ended.ASKED)

    async def _expiries(self) -> None:
        """Once the worker is to end, let go of leases that must have run out: a ledger that is away would keep it.

        Until then a chunk is ours until the ledger says otherwise: an outage that is longer than a lease costs no work.
        """
        await self._draining.wait()
        while True:
            for chunk in self._holdings.chunks():
                if self._clocks.monotonic() > chunk.valid_until:
                    await self._holdings.lose(chunk, "its lease has run out without a heartbeat")
            await asyncio.sleep(min(_LOOK_FOR_EXPIRY_SECONDS, self._settings.heartbeat_seconds))

    async def _states(self) -> None:
        """Write the newest state whenever it has changed."""
        while True:
            await self._state_changed.wait()
            self._state_changed.clear()
            if not await self._write_state():
                self._state_changed.set()
                await asyncio.sleep(_RETRY_SECONDS)

    def _show(self, state: WorkerState, detail: str | None = None) -> None:
        if self._state != (state, detail):
            self._state = (state, detail)
            self._state_changed.set()

    # The end.

    def _end(self, why: Ended) -> None:
        if not self._ended.done():
            log.info("%s ends: %s", self.worker_id, why)
            self._ended.set_result(why)

    def _signalled(self) -> None:
        if self._ended.done():
            self._hurry.set()
        else:
            self._spawn(asyncio.to_thread(self._on_signal))
        self._end(Ended.SIGNAL)

    async def _drain(self, ended: Ended) -> None:
        """Feed nothing new, let what is in flight end within the grace, save the rest and hand it back."""
        self._show(WorkerState.DRAINING, f"ends: {ended}")
        await self._stop_leasing()
        in_time = asyncio.ensure_future(self._runner.wait_drained())
        hurried = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({in_time, hurried}, timeout=self._settings.grace_seconds, return_when="FIRST_COMPLETED")
        in_time.cancel()
        hurried.cancel()
        await self._hand_back(f"the worker ends: {ended}")

    async def _stop_leasing(self) -> None:
        self._runner.hold_back()
        self._draining.set()
        self._hungry.set()
        if self._leasing is not None:
            # Not cancelled: a lease that is just being given would be held by nobody until it runs out.
            await asyncio.wait({self._leasing})

    async def _hand_back(self, reason: str) -> None:
        await asyncio.gather(*(self._holdings.stop(chunk, reason) for chunk in self._holdings.chunks()))
        # Those that are being committed go on to their commit, or to the end of their lease.
        await self._holdings.wait_empty()

    async def _hand_back_after(self, error: Exception) -> None:
        """Hand everything back and say why; what fails on the way is logged, since `error` is what is to be raised."""
        log.error("%s fails: %s", self.worker_id, error)
        try:
            await self._stop_leasing()
            await self._hand_back(f"the worker failed: {error}")
            self._show(WorkerState.FAILED, str(error))
            await self._write_state()
        except Exception:
            log.exception("while handing back")

    async def _write_state(self) -> bool:
        """Write the newest state; return whether the ledger has taken it. In an outage it stays as it was.

        The last one may thus be missing: the ledger then sees a worker that was not heard of since, which is as true.
        """
        async with self._state_writing:
            state, detail = self._state
            try:
                await asyncio.to_thread(self._ledger.workers.set_state, self.worker_id, state, detail)
            except OUTAGES as outage:
                log.warning("the ledger was not told that %s is %s: %s", self.worker_id, state, outage)
                return False
        return True

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._runner.close()
        await self._engine.stop()

    def _report(self, ended: Ended) -> WorkerReport:
        return WorkerReport(
            worker_id=self.worker_id,
            ended=ended,
            chunks=self._holdings.committed_chunks,
            requests=self._holdings.committed_requests,
            input_tokens=self._holdings.input_tokens,
            output_tokens=self._holdings.output_tokens,
            seconds=self._clocks.monotonic() - self._started,
            in_flight=self._runner.most_in_flight,
            in_flight_by=self._tuning.limit_by,
        )

    # Helpers.

    def _ledger_time(self) -> float:
        return self._ledger_time_at_zero + time.monotonic()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    async def _unless_ended(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do the work to its end, or until there is a reason to end; return whether it was done."""
        task = asyncio.create_task(work)
        either: set[asyncio.Future[Any]] = {task, self._ended}
        await asyncio.wait(either, return_when="FIRST_COMPLETED")
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return False
        task.result()
        return True
