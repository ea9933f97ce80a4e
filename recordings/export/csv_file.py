"""Export to CSV: a table with a header line. Unknown values are empty."""

import csv
import io
from collections.abc import Iterable
from typing import IO

from stepscope.recordings.export.moments import Moment
from stepscope.recordings.export.tables import COLUMNS, Table, table_rows


def write_csv(moments: Iterable[Moment], stream: IO[bytes], table: Table) -> int:
    """Write a table. Returns the number of rows."""
    text = io.TextIOWrapper(stream, "utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(column.name for column in COLUMNS[table])
    count = 0
    for row in table_rows(table, moments):
        writer.writerow(row)
        count += 1
    text.flush()
    text.detach()
    return count
