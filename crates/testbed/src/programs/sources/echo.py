"""An asyncio server that sends back what comes: echo.py ADDRESS PORT"""

import asyncio
import sys


async def serve(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


async def main(address, port):
    server = await asyncio.start_server(serve, address, int(port), backlog=1024)
    async with server:
        await server.serve_forever()


asyncio.run(main(*sys.argv[1:]))
