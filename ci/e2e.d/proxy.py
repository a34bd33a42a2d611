"""Forwards TCP connections of a loopback port to HOST:PORT until it is killed: proxy.py PORT HOST:PORT WORDS...

The WORDS only identify the process by its command line."""

import asyncio
import sys


async def copy(source, sink):
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except OSError:
        pass
    finally:
        sink.close()


async def main():
    host, port = sys.argv[2].rsplit(":", 1)

    async def carry(reader, writer):
        try:
            there, back = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, back), copy(there, writer))

    server = await asyncio.start_server(carry, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


asyncio.run(main())
