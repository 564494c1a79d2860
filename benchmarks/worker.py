"""The worker against vLLM's own batch runner (`python -m vllm.entrypoints.openai.run_batch`): the real vLLM, here.

    python -m benchmarks.worker [--cases a b c] [--rounds 2] [--model var/models/tiny-random]

a: 400 short chats. b: 400 requests over 50 shared prefixes of 500 tokens, shuffled, with a KV cache of 6,144 tokens: a
quarter of the prefixes, or eleven requests that share none. c: 400 prompts of 5 to 500 words with answers of 4 to 64
tokens.

Both sides get the same file, and engines that were started with the same arguments before anything is measured; one
works while the other is idle, in turns. Each engine answers a few requests first, and its prefix cache is emptied
before each file. Ours is everything from the stored upload to the stored results: intake, the worker (lease, feed,
checkpoint, commit), the merge with its proof. Theirs is the function `run_batch` of that program, from reading the file
to having written the results; its start and its imports are left out. Answers have the same tokens on both sides, which
is checked. `worker` alone is what a GPU is held for: intake and merge run elsewhere in a cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from batch_pipeline import settings as configuration
from batch_pipeline.embedded import seaweedfs
from batch_pipeline.engine import AttachedEngine, VllmServer, server
from batch_pipeline.intake import ops, submission
from batch_pipeline.intake import options as choices
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus, Door
from batch_pipeline.models import Model
from batch_pipeline.results.merge import merge
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from batch_pipeline.worker import Worker

MODEL = "benchmarked"
CHAT = "/v1/chat/completions"
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
CASES = {
    "a": "short chats",
    "b": "shared prefixes, shuffled, small KV cache",
    "c": "mixed lengths",
}
PREFIXES, PREFIX_WORDS = 50, 490
WARM_UP = 16


class Ours(msgspec.Struct, frozen=True):
    """Seconds of one file on our side."""

    intake: float
    worker: float
    merge: float

    @property
    def seconds(self) -> float:
        """From the stored upload to the stored results."""
        return self.intake + self.worker + self.merge


class Sides(msgspec.Struct, frozen=True):
    """One round of one case: seconds of each side for the same file, and processor seconds of each."""

    case: str
    requests: int
    ours: Ours
    theirs: float
    our_processor: float
    our_engine_processor: float
    their_processor: float
    """With their engine."""
    our_cached: float
    """Share of the prompts' tokens that the prefix cache had,"""
    their_cached: float
    """and theirs."""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--prefixes", type=int, default=PREFIXES, help="of case b")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="requests that either engine runs at once")
    parser.add_argument("--in-flight", type=int, default=64, help="the model's max_in_flight; theirs has all at once")
    parser.add_argument("--kv-tokens", type=int, default=6144, help="the KV cache of case b")
    parser.add_argument("--model", type=Path, default=Path("var/models/tiny-random"))
    parser.add_argument("--theirs", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.theirs is not None:
        serve_theirs(options.theirs)
        return
    measured = []
    with tempfile.TemporaryDirectory() as name, seaweedfs.s3_server(Path(name) / "s3") as reachable:
        folder = Path(name)
        # The small KV cache is an argument of the engine: those of case b are others.
        for cases in (set(options.cases) - {"b"}, set(options.cases) & {"b"}):
            if cases:
                measured += asyncio.run(compare(sorted(cases), folder, reachable, options))
    print_table(measured, options)


async def compare(
    cases: list[str], folder: Path, reachable: configuration.Store, options: argparse.Namespace
) -> list[Sides]:
    """Start both engines once, and measure these cases on them in turns."""
    # Blocks of 32 tokens are nearer to a GPU's 16 than the 128 that vLLM takes on a processor.
    blocks = ["--block-size", "32", "--num-gpu-blocks-override", str(options.kv_tokens // 32)]
    small = blocks if "b" in cases else []
    model = Model(
        source=str(options.model.resolve()),
        context_length=2048,
        max_in_flight=options.in_flight,
        engine_arguments=[
            *("--dtype", "float32"),
            "--enforce-eager",
            *("--max-num-seqs", str(options.max_num_seqs)),
            *small,
        ],
        engine_environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"},
    )
    engine = VllmServer(MODEL, model, folder / "engine.log")
    await engine.start()
    try:
        with their_engine(model) as theirs:
            # Both load at the same time: nothing is measured yet.
            await engine.wait_ready()
            await asyncio.to_thread(theirs.wait_ready)
            ours = OurSide(folder, reachable, msgspec.structs.replace(model, engine_url=engine.url))
            warm = write(folder / "warm.jsonl", "a", WARM_UP, options)
            await asyncio.to_thread(ours.run, warm)
            theirs.run(warm)
            processes = [psutil.Process(pid) for pid in (os.getpid(), engine.pid, theirs.pid)]
            measured = []
            for round_number in range(options.rounds):
                for case in cases:
                    file = write(folder / f"{case}-{round_number}.jsonl", case, options.requests, options)
                    used = [used_by(process) for process in processes]
                    wait_idle(processes[2])
                    mine, tokens, cached = await asyncio.to_thread(ours.run, file)
                    wait_idle(processes[1])
                    seconds = theirs.run(file)
                    their_cached = check_same(theirs.answers, options.requests, tokens)
                    spent = [used_by(process) - before for process, before in zip(processes, used, strict=True)]
                    measured.append(Sides(case, options.requests, mine, seconds, *spent, cached, their_cached))
                    print(msgspec.json.encode(measured[-1]).decode(), file=sys.stderr, flush=True)
            return measured
    finally:
        await engine.stop()


def wait_idle(engine: psutil.Process) -> None:
    """Wait until an engine has come to rest: its processes spin for a second after their last work."""
    while True:
        before = used_by(engine)
        time.sleep(0.5)
        if used_by(engine) - before < 0.02:
            return


def used_by(process: psutil.Process) -> float:
    """Return the processor seconds of a process, and of those that it has started: of this one only those that have
    ended, which are intake's.
    """
    if process.pid == os.getpid():
        return sum(process.cpu_times()[:4])
    family = [process, *process.children(recursive=True)]
    return sum(sum(member.cpu_times()[:2]) for member in family)


class OurSide:
    """A store and a ledger, and everything that happens to a file between them."""

    def __init__(self, folder: Path, reachable: configuration.Store, model: Model) -> None:
        self._settings = Settings(
            store=reachable,
            ledger=configuration.Ledger(url=f"sqlite:///{folder}/ledger.sqlite"),
            intake=configuration.Intake(scratch_dir=f"{folder}/scratch"),
            worker=msgspec.structs.replace(configuration.Worker(), warm_seconds=0.0, poll_seconds=0.05),
            models={MODEL: model},
        )
        self._ledger = Ledger.from_settings(self._settings)
        self._store = ObjectStore.open(self._settings.store)

    def run(self, file: Path) -> tuple[Ours, int, float]:
        """Take a file the whole way; return the seconds, the tokens of its answers, and the share of the prompts'
        tokens that the prefix cache had.
        """
        batch = self._submit(file)
        reset_prefix_cache(str(self._settings.models[MODEL].engine_url))
        parts = {"ledger": self._ledger, "store": self._store, "settings": self._settings}
        began = time.monotonic()
        ops.validate(batch.batch_id, **parts, run_id="intake")
        ops.write_chunks(batch.batch_id, **parts, run_id="intake")
        taken = time.monotonic()
        drained: list[float] = []
        engine = AttachedEngine(MODEL, str(self._settings.models[MODEL].engine_url), 60.0)
        Worker(
            **parts, model=MODEL, engine=engine, on_batch_drained=lambda _batch: drained.append(time.monotonic())
        ).run()
        worked = time.monotonic()
        merge(batch.batch_id, **parts, run_id="merge")
        merged = time.monotonic()
        ended = self._ledger.batches.get(batch.batch_id)
        if ended.status is not BatchStatus.COMPLETED or ended.failed or ended.invalid:
            raise SystemExit(f"the batch has not gone well: {ended}")
        seconds = Ours(taken - began, drained[0] - taken, merged - worked)
        return seconds, ended.output_tokens, ended.cached_tokens / ended.input_tokens

    def _submit(self, file: Path) -> Batch:
        return submission.submit(
            file,
            customer="acme",
            name=file.stem,
            door=Door.CLI,
            options=choices.choose(self._settings.intake),
            ledger=self._ledger,
            store=self._store,
            settings=self._settings,
        ).batch


def reset_prefix_cache(url: str) -> None:
    """Empty the prefix cache of our engine."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", "/reset_prefix_cache")
    if connection.getresponse().status != 200:
        raise SystemExit("the prefix cache cannot be emptied")
    connection.close()


class TheirSide:
    """Their program in a process of its own, with its engine started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.answers = Path()
        """What it has written for the last file."""

    def wait_ready(self) -> None:
        """Wait until its engine is loaded."""
        if self.said() != "ready":
            raise SystemExit("their program does not start")

    def run(self, file: Path) -> float:
        """Return the seconds that it takes for a file."""
        self.answers = file.with_suffix(".theirs")
        assert self._process.stdin is not None
        self._process.stdin.write(f"{file} {self.answers}\n")
        self._process.stdin.flush()
        return float(self.said())

    def said(self) -> str:
        """Return its next word."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("theirs: "):
                return line.removeprefix("theirs: ").strip()
        raise SystemExit("their program has ended")


@contextlib.contextmanager
def their_engine(model: Model) -> Iterator[TheirSide]:
    """Start their program with the same engine, and yield it."""
    arguments = [
        *("--model", model.source),
        *("--served-model-name", MODEL),
        *("--max-model-len", str(model.context_length)),
        "--enable-prompt-tokens-details",
        *model.engine_arguments,
        *("--input-file", "none", "--output-file", "none"),
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.worker", "--theirs", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **server.ENVIRONMENT, **model.engine_environment},
    ) as process:
        yield TheirSide(process)
        assert process.stdin is not None
        process.stdin.close()


def serve_theirs(arguments: list[str]) -> None:
    """Be their program: its engine once, then its `run_batch` for each pair of files on standard input."""
    from vllm.entrypoints.launchers import run_batch as theirs
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.usage.usage_lib import UsageContext

    sys.argv = ["run_batch", *arguments]
    args = theirs.parse_args()

    async def serve() -> None:
        async with build_async_engine_client(args, usage_context=UsageContext.OPENAI_BATCH_RUNNER) as client:
            print("theirs: ready", flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                args.input_file, args.output_file = line.split()
                await client.reset_prefix_cache()
                began = time.monotonic()
                await theirs.run_batch(client, args)
                print(f"theirs: {time.monotonic() - began}", flush=True)

    asyncio.run(serve())


def check_same(answers: Path, requests: int, tokens: int) -> float:
    """Return the share of the prompts' tokens that their prefix cache had; end where they have not answered all
    requests with as many tokens.
    """
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    usages = [line["response"]["body"]["usage"] for line in lines]
    theirs = sum(usage["completion_tokens"] for usage in usages)
    if len(lines) != requests or theirs != tokens:
        raise SystemExit(f"they have {len(lines)} answers with {theirs} tokens, we have {requests} with {tokens}")
    cached = sum((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0 for usage in usages)
    return float(cached / sum(usage["prompt_tokens"] for usage in usages))


def write(file: Path, case: str, requests: int, options: argparse.Namespace) -> Path:
    """Write the file of a case; other prompts for each name, so that no round finds another's in a cache."""
    chance = random.Random(file.name)
    prefixes = [words(chance, PREFIX_WORDS) for _ in range(options.prefixes)]
    lines = []
    for number in range(requests):
        body: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": 16}
        messages = [{"role": "user", "content": words(chance, 20)}]
        if case == "b":
            messages.insert(0, {"role": "system", "content": prefixes[number % options.prefixes]})
        if case == "c":
            messages[0]["content"] = words(chance, round(5 * 100 ** chance.random()))
            body["max_tokens"] = chance.randint(4, 64)
        request = {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {**body, "messages": messages},
        }
        lines.append(json.dumps(request))
    chance.shuffle(lines)
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def words(chance: random.Random, count: int) -> str:
    """Return so many random words, each about a token."""
    return " ".join(chance.choices(WORDS, k=count))


def print_table(measured: list[Sides], options: argparse.Namespace) -> None:
    """Print one line for each round, and the medians of each case."""
    print(
        f"{options.model.name} on {platform.machine()}: max_num_seqs {options.max_num_seqs}, ours with at most "
        f"{options.in_flight} in flight; requests a second\n"
    )
    print(
        "| case | ours: intake + worker + merge, seconds | ours | theirs | ratio | the worker alone "
        "| processor seconds: ours + engine / theirs | prompt tokens cached: ours / theirs |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for sides in measured:
        ours = sides.ours
        print(
            f"| {sides.case} | {ours.intake:.2f} + {ours.worker:.2f} + {ours.merge:.2f} "
            f"| {sides.requests / ours.seconds:.1f} | {sides.requests / sides.theirs:.1f} "
            f"| {sides.theirs / ours.seconds:.2f} | {sides.theirs / ours.worker:.2f} "
            f"| {sides.our_processor:.1f} + {sides.our_engine_processor:.1f} / {sides.their_processor:.1f} "
            f"| {sides.our_cached:.0%} / {sides.their_cached:.0%} |"
        )
    for case in sorted({sides.case for sides in measured}):
        rounds = [sides for sides in measured if sides.case == case]
        whole = statistics.median(sides.theirs / sides.ours.seconds for sides in rounds)
        worker = statistics.median(sides.theirs / sides.ours.worker for sides in rounds)
        print(f"\n{case}, {CASES[case]}: {whole:.2f} times theirs, the worker alone {worker:.2f}", end="")
    print(flush=True)


if __name__ == "__main__":
    main()
