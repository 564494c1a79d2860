"""Keeps the engine full, and turns what comes back into results.

    fresh, or its pause over ──fed──> in flight ──answer: 2xx, 4xx──> result
                ^                         ├──429, 503, ...──────────> pauses, as often as it takes (and see `gate`)
                │                         ├──500, ...───────────────> pauses, `max_request_attempts` times at most
                └──── pause over ─────────┤
                                          ├──no answer in time──────> once more with twice the time (see `patience`),
                                          │                           in the end a result, where others are answered
                                          └──engine dead, or hung───> suspect (see `quarantine`), after its restart

A request that pauses holds no place. Everything here runs in one event loop, and nothing waits while it decides.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from batch_pipeline.engine import Answer, AnswerTimeout, AnswerTooLarge, ConnectionLost, Engine, EngineClient
from batch_pipeline.errors import EngineError
from batch_pipeline.models import RESPONSES, Model
from batch_pipeline.settings import Worker as WorkerSettings
from batch_pipeline.wire import codes
from batch_pipeline.wire.chunk_files import FinishedRequest
from batch_pipeline.worker import outcome
from batch_pipeline.worker.chunk import Flight, HeldChunk, Phase
from batch_pipeline.worker.feeder import Feeder
from batch_pipeline.worker.gate import Gate, GateState
from batch_pipeline.worker.outcome import Meaning
from batch_pipeline.worker.patience import Patience
from batch_pipeline.worker.pauses import pause_seconds
from batch_pipeline.worker.quarantine import Quarantine
from batch_pipeline.worker.speed import Pace

log = logging.getLogger(__name__)


class Listener(Protocol):
    """What the runner tells. All are called in the event loop and return at once."""

    def complete(self, chunk: HeldChunk) -> None:
        """The last request of the chunk has its result."""

    def late(self, chunk: HeldChunk) -> None:
        """The chunk's deadline has passed with requests left; may be told again and again."""

    def hungry(self) -> None:
        """Fewer requests wait to be fed than the engine takes at once."""

    def engine_state(self, ready: bool, detail: str | None) -> None:
        """The engine is being started again, refuses, or serves again."""

    def failed(self, error: BaseException) -> None:
        """The runner cannot go on: the engine does not start any more (EngineError), or a fault of ours."""


@dataclass
class Clocks:
    """Time and chance, so that tests have them in their hands."""

    monotonic: Callable[[], float]
    """Seconds; never goes back."""
    utc: Callable[[], float]
    """The ledger's time: seconds since the epoch."""
    random: random.Random = field(default_factory=random.Random)


class Runner:
    """The requests of all held chunks on one engine, which must be ready when `open` is called."""

    def __init__(
        self, engine: Engine, settings: WorkerSettings, model: Model, listener: Listener, clocks: Clocks
    ) -> None:
        self._engine = engine
        self._settings = settings
        self.most_in_flight = model.most_in_flight
        """Fed as long as fewer are in flight: how many make the engine full."""
        self._may_fly = model.shared.least_in_flight if model.shared.live_traffic else self.most_in_flight
        """At most so many of those now: less where live traffic has the engine too."""
        self._stops = 0
        """How often that has come down to none."""
        self._is_shared = model.shared.live_traffic
        self._priority: int | None = None
        self._isolate = model.isolate_prefix_cache
        self._listener = listener
        self._clocks = clocks
        self._client: EngineClient | None = None
        self._feeder = Feeder()
        self._gate = Gate(clocks.random)
        self._patience = Patience(settings.least_request_timeout_seconds, settings.request_timeout_seconds)
        self._pace = Pace()
        self._quarantine: Quarantine[Flight] = Quarantine(settings.max_request_attempts)
        self._in_flight: dict[Flight, None] = {}
        """In the order in which they were fed."""
        self._broken: list[tuple[Flight, str]] = []
        """Requests whose try broke; whether by their own fault depends on whether the engine lives."""
        self._unsent: list[tuple[Flight, str]] = []
        """Requests that found nobody listening."""
        self.answers = 0
        """How many the engine has given so far."""
        self._fruitless_deaths = 0
        """Deaths since the last answer or verdict."""
        self._ending = False
        self._in_doubt = False
        """Whether the engine may be dead: nothing is fed until that is known."""
        self._hung = False
        self._recovering: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()
        self._drained.set()
        self.engine_version = "unknown"
        self.tokens = 0
        """Of the requests that were answered so far, prompt and answer, and of those that were dropped on the way."""

    async def open(self) -> None:
        """Begin to feed: the engine is ready."""
        self.engine_version = await self._engine.version()
        self._client = EngineClient(self._engine.url, self._settings.max_answer_bytes)
        self._watching = asyncio.create_task(self._watch())
        self.fill()

    async def close(self) -> None:
        """Cancel what is in flight and close the connections. The engine is left as it is."""
        self.hold_back()
        tasks = [task for task in (self._watching, self._recovering) if task is not None]
        tasks += [flight.task for flight in self._in_flight if flight.task is not None]
        await _cancel(tasks)
        if self._timer is not None:
            self._timer.cancel()
        if self._client is not None:
            await self._client.close()

    @property
    def unfed(self) -> int:
        """Requests of held chunks that were not fed yet."""
        return self._feeder.unfed

    def add(self, chunk: HeldChunk) -> None:
        """Take a chunk behind the others; call `fill` once it is loaded."""
        self._feeder.add(chunk)

    def remove(self, chunk: HeldChunk) -> None:
        """Feed nothing of this chunk any more; what is in flight of it is left alone."""
        self._feeder.remove(chunk)

    def hold_back(self) -> None:
        """Feed nothing any more; what is in flight may end."""
        self._ending = True

    async def wait_drained(self) -> None:
        """Wait until nothing is in flight."""
        await self._drained.wait()

    async def drop(self, chunk: HeldChunk) -> None:
        """Let go of a chunk: feed nothing of it, cancel what is in flight of it."""
        self._feeder.remove(chunk)
        self._quarantine.drop(lambda flight: flight.chunk is chunk)
        for flight, _ in self._broken:
            if flight.chunk is chunk:
                self._gate.abandoned(flight.epoch)
        self._broken = [entry for entry in self._broken if entry[0].chunk is not chunk]
        self._unsent = [entry for entry in self._unsent if entry[0].chunk is not chunk]
        mine = [flight for flight in self._in_flight if flight.chunk is chunk]
        # The engine has done it, though nobody wants it any more: else what comes next would count as done again.
        now = self._clocks.monotonic()
        self.tokens += round(sum(self._done_of(flight, now) for flight in mine))
        await _cancel([flight.task for flight in mine if flight.task is not None])
        self.fill()

    @property
    def in_flight(self) -> int:
        """Requests that the engine has of us now."""
        return len(self._in_flight)

    def tokens_by(self, now: float) -> float:
        """Return the tokens that are done so far: of the requests that were answered, and likely of those in flight."""
        return self.tokens + sum(self._done_of(flight, now) for flight in self._in_flight)

    def _done_of(self, flight: Flight, now: float) -> float:
        return self._pace.done(now - flight.fed_at, flight.request.max_tokens)

    def allow(self, in_flight: int) -> None:
        """Have at most so many in flight from now on, 0 for none; what is in flight already goes on."""
        self._stops += in_flight == 0 < self._may_fly
        self._may_fly = min(in_flight, self.most_in_flight)
        self.fill()

    def make_full_with(self, in_flight: int) -> None:
        """Feed as long as fewer than so many are in flight, from now on; not for engines that live traffic shares."""
        self.most_in_flight = self._may_fly = in_flight
        self.fill()

    def set_priority(self, priority: int) -> None:
        """Send requests with vLLM's `priority` from now on: the engine takes it."""
        self._priority = priority

    async def give_way(self, keep: int) -> None:
        """Take requests back from the engine, all but the `keep` that it has had for longest.

        That is no try of theirs: they are fed before all others, in the order in which they were. What the engine had
        written of their answers is lost.
        """
        if self._in_doubt:
            return  # a dead engine has nothing, and what it had is looked after already
        newest = list(self._in_flight)[keep:]
        await _cancel([flight.task for flight in newest if flight.task is not None])
        for flight in newest:
            # Some have landed meanwhile, or are not wanted any more.
            is_back = flight.task is not None and flight.task.cancelled() and flight.wanted
            if is_back and not self._quarantine.put_back(flight):
                self._feeder.again(flight)
        self.fill()

    def fill(self) -> None:
        """Feed what may be fed now, and see to it that this is called again when more may be."""
        now, utc = self._clocks.monotonic(), self._clocks.utc()
        while (flight := self._next(now, utc)) is not None:
            flight.epoch = self._gate.fed()
            flight.fed_at = now
            flight.answers_before = self.answers
            flight.stops_before = self._stops
            flight.hung = False
            self._in_flight[flight] = None
            self._drained.clear()
            flight.task = asyncio.create_task(self._fly(flight))
            flight.task.add_done_callback(partial(self._ended, flight))
        if self._feeder.unfed < 2 * self.most_in_flight:
            self._listener.hungry()
        self._set_timer(now)

    def _next(self, now: float, utc: float) -> Flight | None:
        if self._ending or self._in_doubt or self._client is None or len(self._in_flight) >= self._may_fly:
            return None
        if not self._gate.may_feed(now):
            return None
        if len(self._quarantine):
            return None if self._in_flight else self._quarantine.next()
        choose = self._feeder.next if self._gate.state is GateState.OPEN else self._feeder.next_probe
        return choose(now, utc, self._listener.late)

    def _set_timer(self, now: float) -> None:
        """Wake up when a pause is over, or the gate opens."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = [self._gate.opens_at] if self._gate.state is GateState.CLOSED else []
        pause_ends = self._feeder.next_pause_ends()
        due += [] if pause_ends is None else [pause_ends]
        # What is due already waits for a place or for the gate's probe, not for time.
        later = [at for at in due if at > now]
        if later and not self._ending:
            self._timer = asyncio.get_running_loop().call_later(min(later) - now, self.fill)

    async def _fly(self, flight: Flight) -> None:
        """One try of one request."""
        if self._client is None:
            raise EngineError("a request was fed before the engine was ready")
        lease, body = flight.chunk.lease, flight.request.body
        if self._isolate:
            body = outcome.salted(body, lease.customer)
        if lease.endpoint == RESPONSES:
            body = outcome.unstored(body)
        try:
            flight.limit_seconds = self._limit_seconds(flight)
            answer = await self._client.complete(lease.endpoint, body, flight.limit_seconds, self._priority)
        except AnswerTimeout as error:
            self._landed(flight)
            self._timed_out(flight, error)
        except ConnectionLost as error:
            self._landed(flight)
            self._connection_lost(flight, error)
        except AnswerTooLarge as error:
            self._landed(flight)
            self.answers += 1
            self._verdict(flight, codes.ANSWER_TOO_LARGE, f"{error}: ask for less in one request")
        except asyncio.CancelledError:
            self._landed(flight)
            self._gate.abandoned(flight.epoch)
            raise
        else:
            self._landed(flight)
            if answer.output_tokens:
                seconds = self._clocks.monotonic() - flight.fed_at
                self._patience.answered(seconds, answer.output_tokens)
                self._pace.answered(seconds, answer.output_tokens)
            self._answered(flight, answer)
        self.fill()

    def _limit_seconds(self, flight: Flight) -> float:
        # How long an answer takes where live traffic goes first is live traffic's doing: no speed of ours tells it.
        if self._is_shared:
            return self._settings.request_timeout_seconds
        return self._patience.limit(flight.request, flight.timeouts)

    def _ended(self, flight: Flight, task: asyncio.Task[None]) -> None:
        """See to it that a flight whose task has ended holds no place: cancelled before its first step it never ran."""
        if flight.task is task and flight in self._in_flight:
            self._landed(flight)
            self._gate.abandoned(flight.epoch)
        self._check(task)

    def _landed(self, flight: Flight) -> None:
        self._in_flight.pop(flight, None)
        if not self._in_flight:
            self._drained.set()

    def _answered(self, flight: Flight, answer: Answer) -> None:
        match outcome.meaning(answer):
            case Meaning.FINAL:
                self.answers += 1
                self._fruitless_deaths = 0
                self.tokens += answer.input_tokens + answer.output_tokens
                if self._gate.state is not GateState.OPEN:
                    self._listener.engine_state(True, None)
                self._gate.answered()
                self._finish(flight, outcome.from_answer(flight.chunk.ref.batch_id, flight.request, answer))
            case Meaning.REFUSED:
                self._quarantine.cleared(flight)
                self._refused(flight, f"{answer.status} {answer.message}".strip(), answer.retry_after_seconds)
            case Meaning.FAILED:
                # An engine whose core has just died says 500 to all that were in flight.
                self._broken.append((flight, f"the engine answered {outcome.said(answer)}"))
                self._doubt_engine()

    def _refused(self, flight: Flight, said: str, asked_seconds: float | None) -> None:
        now = self._clocks.monotonic()
        flight.refusals += 1
        pause = pause_seconds(flight.refusals, self._clocks.random, asked_seconds=asked_seconds)
        self._feeder.pause(flight, now + pause)
        if self._gate.refused(flight.epoch, now, asked_seconds):
            self._gate_closed("refuses", said, now)

    def _gate_closed(self, what: str, said: str, now: float) -> None:
        log.warning("the engine %s requests (%s); next try in %.0f s", what, said, self._gate.opens_at - now)
        self._listener.engine_state(True, f"the engine {what} requests: {said}")

    def _timed_out(self, flight: Flight, error: AnswerTimeout) -> None:
        if self._stops > flight.stops_before:
            # Live traffic kept the engine from it.
            self._gate.abandoned(flight.epoch)
            if not self._quarantine.put_back(flight):
                self._feeder.again(flight)
            return
        flight.timeouts += 1
        if self.answers > flight.answers_before:
            longest = flight.limit_seconds >= self._settings.request_timeout_seconds
            if longest or flight.timeouts >= self._settings.max_request_attempts:
                self._verdict(flight, codes.REQUEST_TIMEOUT, f"{error}, while the engine answered other requests")
                return
            self._gate.abandoned(flight.epoch)
            self._feeder.again(flight)
            return
        flight.hung = True
        self._broken.append((flight, str(error)))
        self._hung = self._in_doubt = True
        self._doubt_engine()

    def _connection_lost(self, flight: Flight, error: ConnectionLost) -> None:
        (self._broken if error.sent else self._unsent).append((flight, str(error)))
        # Until it is known whether the engine lives, another request would only share its fate.
        self._in_doubt = True
        self._doubt_engine()

    def _failed(self, flight: Flight, said: str) -> None:
        """The engine lives, and yet this try failed: that is the request's own fault, until the contrary is seen."""
        if not flight.wanted:
            self._gate.abandoned(flight.epoch)
            return
        now = self._clocks.monotonic()
        flight.failures += 1
        self._quarantine.cleared(flight)
        closed = self._gate.refused(flight.epoch, now, has_failed_before=flight.failures > 1)
        if flight.failures >= self._settings.max_request_attempts:
            self._verdict(flight, codes.ENGINE_ERROR, f"tried {flight.failures} times; the last time {said}")
            return
        self._feeder.pause(flight, now + pause_seconds(flight.failures, self._clocks.random))
        if closed:
            self._gate_closed("fails", said, now)

    def _verdict(self, flight: Flight, code: str, message: str) -> None:
        self._gate.abandoned(flight.epoch)
        log.warning("request %d of %s ends as %s: %s", flight.request.index, flight.chunk, code, message)
        self._finish(flight, outcome.from_error(flight.chunk.ref.batch_id, flight.request, code, message))

    def _finish(self, flight: Flight, result: FinishedRequest) -> None:
        self._quarantine.cleared(flight)
        if not flight.wanted:
            return
        flight.chunk.finish(result)
        if flight.chunk.is_complete:
            flight.chunk.phase = Phase.COMMITTING
            self._feeder.remove(flight.chunk)
            self._listener.complete(flight.chunk)

    async def _watch(self) -> None:
        """See the engine's process end, also while no request is in flight."""
        await self._engine.died()
        self._in_doubt = True
        self._doubt_engine()

    def _doubt_engine(self) -> None:
        if self._recovering is None and not self._ending:
            self._recovering = asyncio.create_task(self._recover())
            self._recovering.add_done_callback(self._check)

    async def _recover(self) -> None:
        """Find out whether the engine lives. Where it does not, start it again; what was in flight is suspect."""
        try:
            if await self._engine.alive() and not self._hung:
                broken, self._broken = self._broken, []
                unsent, self._unsent = self._unsent, []
                for flight, said in broken:
                    self._failed(flight, said)
                for flight, said in unsent:
                    self._quarantine.cleared(flight)
                    self._refused(flight, said, None)
            else:
                await self._start_again()
        finally:
            self._recovering = None
        self._in_doubt = self._hung = False
        self.fill()

    async def _start_again(self) -> None:
        self._in_doubt = True
        what = "hangs" if self._hung else "died"
        flights = list(self._in_flight)
        await _cancel([flight.task for flight in flights if flight.task is not None])
        lost = [flight for flight in flights if flight.task is not None and flight.task.cancelled()]
        broken = [flight for flight, _ in self._broken]
        for flight in broken:
            flight.hung = self._hung
        suspects = [flight for flight in lost + broken if flight.wanted]
        for flight, _ in self._unsent:
            if not self._quarantine.put_back(flight):
                self._feeder.again(flight)
        self._broken, self._unsent = [], []
        self._condemn(self._quarantine.engine_died(suspects))
        self._fruitless_deaths += 1
        log.warning("the engine %s with %d requests in flight; it is being started again", what, len(suspects))
        if self._fruitless_deaths > self._settings.max_request_attempts + 1:
            raise EngineError(f"the engine {what} {self._fruitless_deaths} times without having answered a request")
        self._listener.engine_state(False, f"the engine {what}; it is being started again")
        if self._watching is not None:
            await _cancel([self._watching])
        if self._client is not None:
            await self._client.close()
        await self._engine.restart()
        self._gate = Gate(self._clocks.random)
        await self.open()
        self._listener.engine_state(True, None)

    def _condemn(self, culprits: list[Flight]) -> None:
        tries = self._settings.max_request_attempts
        for flight in culprits:
            self._fruitless_deaths = 0
            if flight.hung:
                message = f"no answer in any of {tries} tries alone, the last of {flight.limit_seconds:.0f} s"
                self._verdict(flight, codes.REQUEST_TIMEOUT, message)
            else:
                message = f"the engine died each of the {tries} times that this request ran alone"
                self._verdict(flight, codes.ENGINE_CRASH, message)

    def _check(self, task: asyncio.Task[None]) -> None:
        """Report what nobody awaits."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._listener.failed(error)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel these and wait until they have ended; what they raised was reported by their own callbacks."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
