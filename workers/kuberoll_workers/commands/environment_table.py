"""Table of a run's environments, one row for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich import box
from rich.table import Table
from rich.text import Text

from kuberoll_workers.analysis.aggregation.environments import EnvironmentSummary
from kuberoll_workers.data.text import visible


def environment_table(
    summaries: Mapping[str, EnvironmentSummary], columns: Mapping[str, Callable[[EnvironmentSummary], str]]
) -> Table:
    """Create the table.

    Args:
        summaries: Numbers by environment.
        columns: Text of a cell, possibly of several lines, by the column's title.
    """
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    # In a narrow terminal only this column becomes narrower.
    table.add_column("environment", overflow="fold", min_width=11)
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        table.add_row(Text(visible(name)), *(Text(visible(cell(summary))) for cell in columns.values()))
    return table
