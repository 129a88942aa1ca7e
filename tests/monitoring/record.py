"""Records Ray's metrics endpoint for these tests, while a run goes on:

python -m tests.monitoring.record http://127.0.0.1:PORT/metrics

The port is in DIR/prometheus/prometheus.yml of this run, which has two replicas so that sums over them are seen to be
sums:

kuberoll run examples/mixed/rolloutjob.yaml --output DIR --metrics-port 0 --monitor \\
    --set spec.generation.replicas=2 --set spec.workers.replicas=1 --set spec.dataset.source.generator.count=50000

Kept are the metrics that dashboards and alerts ask for, without the labels that say where it was; values are what they
were.
"""

from __future__ import annotations

import re
import sys
import time
import urllib.request
from pathlib import Path

from tests.monitoring.support import ROOT, metric_names, panel_queries

DATA = Path(__file__).with_name("data")
RULES = ROOT / "workers" / "kuberoll_workers" / "monitor" / "alerts.yaml"
PAGES = 3
SECONDS = 10.0  # Ray's own interval
_OF_THE_MACHINE = re.compile(r'(Component|NodeAddress|SessionName|Version|actor_id|otel_\w+)="[^"]*",?')
_LONG_IDS = re.compile(r'(WorkerId="\w{8})\w+')
_DIRECTORIES = re.compile(r'(model_name=")[^"]*/')


def kept(text: str, names: set[str]) -> str:
    """Of an exposition, the lines of these metrics."""
    lines = []
    for line in text.splitlines():
        name = line.split(" ")[2] if line.startswith("# ") else re.split(r"[{ ]", line)[0]
        if name in names or re.sub(r"_(bucket|sum|count)$", "", name) in names:
            short = _OF_THE_MACHINE.sub("", line).replace(",}", "}")
            lines.append(_DIRECTORIES.sub(r"\1", _LONG_IDS.sub(r"\1", short)))
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command's entry point."""
    names = metric_names(RULES.read_text()).union(*(metric_names(query.expression) for query in panel_queries()))
    names = {name for name in names if name.startswith("ray_")}
    for number in range(PAGES):
        if number:
            time.sleep(SECONDS)
        text = urllib.request.urlopen(sys.argv[1], timeout=30).read().decode()
        (DATA / f"ray-{number}.txt").write_text(kept(text, names))


if __name__ == "__main__":
    main()
