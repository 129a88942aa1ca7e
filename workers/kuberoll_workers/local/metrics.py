"""One `/metrics` endpoint for all worker processes of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from kuberoll_workers.telemetry.definitions import METRICS


class _Documented(Collector):
    """The sum of the workers' metrics with help texts, which their shared files do not contain."""

    def __init__(self, directory: Path) -> None:
        self._values = MultiProcessCollector(None, path=str(directory))  # type: ignore[no-untyped-call]
        # The library names counters without the suffix.
        self._texts = {name.removesuffix("_total"): metric.help for name, metric in METRICS.items()}

    def collect(self) -> Iterable[Metric]:
        for metric in self._values.collect():  # type: ignore[no-untyped-call]
            metric.documentation = self._texts.get(metric.name, metric.documentation)
            yield metric


@contextmanager
def serve_metrics(directory: Path, port: int) -> Iterator[int]:
    """Serve the metrics that worker processes write into `PROMETHEUS_MULTIPROC_DIR`, on loopback only.

    Args:
        port: 0: any free port; a port in use is replaced by a free one.

    Yields:
        The port.
    """
    registry = CollectorRegistry()
    registry.register(_Documented(directory))
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError:
        # Most likely another run uses it; neither should fail for that.
        server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
