"""A proxy that forwards data with a delay, without limiting the rate."""

from __future__ import annotations

import asyncio
import sys

_CHUNK = 1 << 18


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    pending: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def write() -> None:
        while True:
            due, data = await pending.get()
            if (wait_s := due - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    writing = asyncio.create_task(write())
    try:
        while data := await reader.read(_CHUNK):
            pending.put_nowait((loop.time() + delay_s, data))
        pending.put_nowait((loop.time() + delay_s, b""))
        await writing
    except ConnectionError:
        writing.cancel()
        writer.close()


async def main(host: str, target: str, delay_s: float) -> None:
    to_host, _, to_port = target.rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(to_host, int(to_port), limit=_CHUNK)
        await asyncio.gather(_forward(reader, back, delay_s), _forward(there, writer, delay_s))

    server = await asyncio.start_server(connected, host, 0, limit=_CHUNK)
    print(f"{host}:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
