"""Places for the bodies of files that are received."""

from __future__ import annotations

import asyncio

from batch_pipeline.api.services import Receiving


def test_slow_uploads_of_one_customer_leave_places_for_the_others() -> None:
    async def slow(receiving: Receiving, customer: str, there: list[str], leave: asyncio.Event) -> None:
        async with receiving.place(customer):
            there.append(customer)
            await leave.wait()

    async def main() -> None:
        receiving, there, leave = Receiving(4), [], asyncio.Event()
        slow_ones = [asyncio.create_task(slow(receiving, "slow", there, leave)) for _ in range(10)]
        await asyncio.sleep(0)
        async with asyncio.timeout(10), receiving.place("quick"), receiving.place("quick"):
            assert there == ["slow", "slow"]
        leave.set()
        await asyncio.gather(*slow_ones)
        assert there == ["slow"] * 10

    asyncio.run(main())
