"""Open-loop Poisson load (latency from the scheduled time), or closed loop, against any server of the Open Inference
Protocol."""

import argparse
import asyncio
import gc
import json
import math
import random
import time

import uvloop

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("port", type=int)
parser.add_argument("model", help="a name, or a JSON list of name, slo_ms and rate_rps: drawn by their rates")
parser.add_argument("slo_ms", type=float, nargs="?")
parser.add_argument("rates", type=float, nargs="*")
parser.add_argument("--closed", type=int, nargs="+", help="numbers of connections")
parser.add_argument("--seconds", type=float, default=9.0)
parser.add_argument("--warmup-s", type=float, default=1.0)
parser.add_argument("--seed", type=int, default=3)
parser.add_argument("--picture", choices=("FP32", "UINT8"), help="send 3 x 224 x 224 of this type, binary")
given = parser.parse_args()

HEAD = b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n"
BODY = b'{"inputs":[{"name":"INPUT0","shape":[1,1],"datatype":"FP32","data":[1]}]}'
KIND = b"Content-Type: application/json\r\n"
if given.picture:
    size = 3 * 224 * 224 * (4 if given.picture == "FP32" else 1)
    about = f'"shape":[1,3,224,224],"datatype":"{given.picture}","parameters":{{"binary_data_size":{size}}}'
    header = f'{{"inputs":[{{"name":"INPUT0",{about}}}]}}'.encode()
    KIND = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n" % len(header)
    BODY = header + bytes(size)
if given.model.startswith("["):
    MODELS = json.loads(given.model)
else:
    MODELS = [{"name": given.model, "slo_ms": given.slo_ms, "rate_rps": 1.0}]
RATES = [model["rate_rps"] for model in MODELS]
REQUESTS = [HEAD % (model["name"].encode(), KIND, len(BODY)) + BODY for model in MODELS]


async def ask(reader, writer, model=0) -> bytes:
    """Send a request for a model and return the head of the answer in lower case."""
    writer.write(REQUESTS[model])
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(number(head, b"content-length")))
    return head


def number(head: bytes, name: bytes) -> float:
    """Return what a header of an answer says; NaN without it."""
    _, found, rest = head.partition(b"\r\n" + name + b":")
    return float(rest.split(b"\r\n")[0]) if found else math.nan


def quantiles(values_ms: list[float]) -> str:
    ordered = sorted(values_ms)
    return " / ".join(f"{ordered[int(part * len(ordered))]:.2f}" for part in (0.5, 0.99)) + " ms"


async def open_loop(rate: float) -> None:
    generator, schedule, at = random.Random(given.seed), [], 0.0
    while (at := at + generator.expovariate(rate)) < given.seconds:
        schedule.append(at)
    asked = generator.choices(range(len(MODELS)), RATES, k=len(schedule))
    pool, count = [], {"offered": 0, "in time": 0, "late": 0, "refused": 0, "broken": 0}
    doors_ms, lateness_ms = [], []
    start = time.monotonic()

    async def one(at: float, model: int) -> None:
        outcome = "broken"
        sent = time.monotonic() - start
        try:
            async with asyncio.timeout(15):
                connection = pool.pop() if pool else await asyncio.open_connection("127.0.0.1", given.port)
                head = await ask(*connection, model)
                latency_ms = 1e3 * (time.monotonic() - start - at)
                outcome = "refused"
                if head[9:12] == b"200":
                    outcome = "late" if latency_ms > MODELS[model]["slo_ms"] else "in time"
                    served_ms = number(head, b"x-tenuto-queue-ms") + number(head, b"x-tenuto-execution-ms")
                    if at >= given.warmup_s and served_ms >= 0.0:
                        doors_ms.append(latency_ms - served_ms)
                        lateness_ms.append(1e3 * (sent - at))
                pool.append(connection)
        except (OSError, EOFError, TimeoutError, IndexError):
            pass
        if at >= given.warmup_s:
            count["offered"] += 1
            count[outcome] += 1

    tasks = []
    for at, model in zip(schedule, asked, strict=True):
        if (delay := start + at - time.monotonic()) > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(one(at, model)))
    await asyncio.gather(*tasks)
    span = given.seconds - given.warmup_s
    share = count["in time"] / max(1, count["offered"])
    door = f"; front door p50 / p99 {quantiles(doors_ms)}, client late {quantiles(lateness_ms)}" if doors_ms else ""
    print(f"{rate:8.1f} r/s: {share:7.2%} in time, {count['in time'] / span:.0f} r/s; {count}{door}", flush=True)
    for _, writer in pool:
        writer.close()


async def closed_loop(connections: int) -> None:
    latencies = []

    async def one(end: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", given.port)
        while (begin := time.monotonic()) < end:
            await ask(reader, writer)
            latencies.append(time.monotonic() - begin)
        writer.close()

    await asyncio.gather(*[one(time.monotonic() + given.warmup_s) for _ in range(connections)])
    latencies.clear()
    await asyncio.gather(*[one(time.monotonic() + 5.0) for _ in range(connections)])
    ordered = sorted(latencies)
    p50_ms, p99_ms = (1e3 * ordered[int(part * len(ordered))] for part in (0.5, 0.99))
    rate = len(ordered) / 5.0
    print(f"{connections} connections: {rate:.0f}/s, p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms", flush=True)


async def main() -> None:
    for connections in given.closed or ():
        await closed_loop(connections)
    for rate in given.rates:
        await open_loop(rate)


gc.disable()  # what a pause of this client adds is not the server's
uvloop.run(main())
