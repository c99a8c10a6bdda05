"""Counters for Prometheus, under vLLM's names wherever both engines have the thing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from minipaged.engine.llm import LLM
from minipaged.engine.output_processor import RequestOutput

SECONDS = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
TIMES = {
    "time_to_first_token_seconds": "from arrival to the first output token",
    "request_time_per_output_token_seconds": "mean time per output token after the first",
    "e2e_request_latency_seconds": "from arrival to the end",
    "request_queue_time_seconds": "from arrival until the first token was computed",
}


class Metrics:
    """The registry of one server: engine totals are read when asked, requests counted as they finish."""

    def __init__(self, llm: LLM, model: str) -> None:
        self._labels = {"model_name": model}
        self._registry = CollectorRegistry()
        self._registry.register(_EngineTotals(llm, model))

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            found = Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
            return found.labels(**self._labels)

        self._times = [histogram(name, text, SECONDS) for name, text in TIMES.items()]
        self._prompt = histogram("request_prompt_tokens", "tokens of a prompt", TOKENS)
        self._generation = histogram("request_generation_tokens", "tokens of an answer", TOKENS)
        names = ["model_name", "finished_reason"]
        self._ended = Counter("vllm:request_success", "answers that ended", names, registry=self._registry)

    def record(self, output: RequestOutput) -> None:
        """Count a request that has finished."""
        times = output.metrics
        ends = times.finished_time, times.first_scheduled_time
        since = [None if end is None else end - times.arrival_time for end in ends]
        for histogram, seconds in zip(self._times, (times.ttft, times.tpot, *since), strict=True):
            if seconds is not None:
                histogram.observe(seconds)
        self._prompt.observe(len(output.prompt_token_ids))
        self._generation.observe(output.metrics.num_generation_tokens)
        for part in output.outputs:
            self._ended.labels(**self._labels, finished_reason=part.finish_reason).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _EngineTotals(Collector):
    """Reads the engine when it is asked. Numbers of one scrape may be a step apart."""

    def __init__(self, llm: LLM, model: str) -> None:
        self._llm, self._model = llm, model

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._llm.engine, self._llm.stats
        last = engine.trace[-1] if engine.trace and engine.has_unfinished_requests() else None
        pool = engine.pool
        gauges = {
            "num_requests_running": (last.running if last else 0, "requests that hold blocks"),
            "num_requests_waiting": (last.waiting if last else 0, "requests without blocks"),
            "kv_cache_usage_perc": (1 - pool.num_free / pool.num_blocks, "share of the blocks held, 0 to 1"),
        }
        counters = {
            "num_preemptions": (stats.num_preemptions, "requests whose blocks were taken"),
            "prompt_tokens": (stats.num_prefill_tokens, "prompt tokens computed"),
            "generation_tokens": (stats.num_generation_tokens, "tokens generated"),
            "prefix_cache_queries": (stats.prefix.queries, "prompt tokens looked for in the prefix cache"),
            "prefix_cache_hits": (stats.prefix.hits, "prompt tokens found in the prefix cache"),
        }
        for name, (value, text) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (value, text) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
