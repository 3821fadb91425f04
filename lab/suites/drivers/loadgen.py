"""MLPerf LoadGen's server scenario against an HTTP server, run in an environment that has `mlperf_loadgen`.

Prints one line of JSON: how many queries LoadGen issued. LoadGen writes its verdict into the folder.
"""

import argparse
import array
import http.client
import json
import queue
import threading
from urllib.parse import urlsplit

import mlperf_loadgen as lg

SAMPLES = 64  # bodies that differ are not needed: the server computes alike for all
WORKERS = 64
MS = 1_000_000  # ns


def main() -> None:
    """Run one test."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("folder")
    parser.add_argument("--model", required=True)
    parser.add_argument("--qps", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--latency-ms", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=0, help="so many tokens an answer; 0: a model of fixed cost")
    parser.add_argument("--tpot-ms", type=int, default=0)
    given = parser.parse_args()
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    issued = 0

    def ask_fixed(connection: http.client.HTTPConnection, query: lg.QuerySample) -> None:
        tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [query.index]}
        connection.request("POST", f"/v2/models/{given.model}/infer", json.dumps({"inputs": [tensor]}))
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        complete(query, body, None)

    def ask_tokens(connection: http.client.HTTPConnection, query: lg.QuerySample) -> None:
        question = {"model": given.model, "prompt": f"question {query.index}", "max_tokens": given.tokens}
        question |= {"stream": True, "stream_options": {"include_usage": True}}
        connection.request("POST", "/v1/completions", json.dumps(question), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        usage = None
        has_first = False
        for line in answer:
            event = line.strip().removeprefix(b"data: ")
            if not event or event == b"[DONE]":
                continue
            part = json.loads(event)
            if part.get("choices") and not has_first:
                has_first = True
                first = array.array("B", b"\0\0\0\0")
                lg.FirstTokenComplete([lg.QuerySampleResponse(query.id, *first.buffer_info())])
            usage = part.get("usage") or usage
        complete(query, b"\0\0\0\0", usage["completion_tokens"])

    def complete(query: lg.QuerySample, body: bytes, tokens: int | None) -> None:
        held = array.array("B", body)
        counted = () if tokens is None else (tokens,)
        lg.QuerySamplesComplete([lg.QuerySampleResponse(query.id, *held.buffer_info(), *counted)])

    def work() -> None:
        connection = http.client.HTTPConnection(urlsplit(given.url).netloc, timeout=60.0)
        while (query := waiting.get()) is not None:
            (ask_tokens if given.tokens else ask_fixed)(connection, query)

    def issue(queries: list) -> None:
        nonlocal issued
        issued += len(queries)
        for query in queries:
            waiting.put(query)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    settings = lg.TestSettings()
    settings.scenario, settings.mode = lg.TestScenario.Server, lg.TestMode.PerformanceOnly
    settings.server_target_qps = given.qps
    settings.server_target_latency_ns = given.latency_ms * MS
    settings.min_duration_ms = int(1000 * given.seconds)
    settings.min_query_count = int(given.qps * given.seconds)
    if given.tokens:
        settings.use_token_latencies = True
        settings.ttft_latency, settings.tpot_latency = given.latency_ms * MS, given.tpot_ms * MS
    log = lg.LogSettings()
    log.log_output.outdir = given.folder
    sut = lg.ConstructSUT(issue, lambda: None)
    qsl = lg.ConstructQSL(SAMPLES, SAMPLES, lambda _samples: None, lambda _samples: None)
    lg.StartTestWithLogSettings(sut, qsl, settings, log)
    lg.DestroyQSL(qsl)
    lg.DestroySUT(sut)
    print(json.dumps({"issued": issued}))


if __name__ == "__main__":
    main()
