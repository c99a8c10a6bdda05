"""Counters for Prometheus, under vLLM's names wherever both engines have the thing."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from minipaged.core.request import RequestMetrics
from minipaged.engine.engine import Engine
from minipaged.engine.output_processor import RequestOutput

SECONDS = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics(Collector):
    """Of one server: the engine's totals are read when asked, requests are counted as they finish."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model
        self._registry = CollectorRegistry()
        self._registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            made = Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(model)

        self._ttft = histogram("time_to_first_token_seconds", "from arrival to the first output token")
        self._tpot = histogram("request_time_per_output_token_seconds", "mean per token after the first")
        self._queue = histogram("request_queue_time_seconds", "from arrival until its first step began")
        self._latency = histogram("e2e_request_latency_seconds", "from arrival to the end")
        self._prompt = histogram("request_prompt_tokens", "tokens of a prompt", TOKENS)
        self._output = histogram("request_generation_tokens", "tokens of an answer", TOKENS)
        labels = ["model_name", "finished_reason"]
        self._ended = Counter("vllm:request_success", "answers that ended", labels, registry=self._registry)

    def record(self, output: RequestOutput) -> None:
        """Count a request that has finished."""
        times: RequestMetrics = output.metrics
        self._prompt.observe(len(output.prompt_token_ids))
        self._output.observe(times.num_generation_tokens)
        for histogram, seconds in (
            (self._ttft, times.ttft),
            (self._tpot, times.tpot),
            (self._queue, times.first_scheduled_time and times.first_scheduled_time - times.arrival_time),
            (self._latency, times.finished_time and times.finished_time - times.arrival_time),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        for part in output.outputs:
            self._ended.labels(self._model, part.finish_reason).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's own numbers. Those of one scrape may be a step apart."""
        scheduler, pool, stats = self._engine.scheduler, self._engine.pool, self._engine.stats
        used = 1 - pool.num_free / pool.num_blocks
        for kind, name, text, value in (
            (GaugeMetricFamily, "num_requests_running", "requests that hold blocks", len(scheduler.running)),
            (GaugeMetricFamily, "num_requests_waiting", "requests without blocks", len(scheduler.waiting)),
            (GaugeMetricFamily, "kv_cache_usage_perc", "share of the blocks held, 0 to 1", used),
            (CounterMetricFamily, "num_preemptions", "requests that gave way", stats.num_preemptions),
            (CounterMetricFamily, "prompt_tokens", "prompt tokens computed", stats.num_prefill_tokens),
            (CounterMetricFamily, "generation_tokens", "tokens generated", stats.num_generation_tokens),
            (CounterMetricFamily, "prefix_cache_queries", "tokens looked up", stats.prefix.queries),
            (CounterMetricFamily, "prefix_cache_hits", "tokens of those found", stats.prefix.hits),
        ):
            family = kind(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
