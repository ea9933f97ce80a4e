"""Export to Parquet: a zstd-compressed table in row groups of bounded size. Needs pyarrow."""

from collections.abc import Iterable
from itertools import islice
from typing import IO, Any

from stepscope.recordings.export.moments import Moment
from stepscope.recordings.export.output import missing
from stepscope.recordings.export.tables import COLUMNS, Table, table_rows

ROW_GROUP = 64 * 1024


def write_parquet(moments: Iterable[Moment], stream: IO[bytes], table: Table) -> int:
    """Write a table. Returns the number of rows.

    Raises:
        MissingPackage: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing("pyarrow", "parquet") from error

    kinds: dict[str, Any] = {
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "bool": pyarrow.bool_(),
        "text": pyarrow.string(),
    }
    columns = COLUMNS[table]
    schema = pyarrow.schema([(column.name, kinds[column.kind]) for column in columns])
    count = 0
    rows = table_rows(table, moments)
    with parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        while group := list(islice(rows, ROW_GROUP)):
            arrays = [
                pyarrow.array(values, kinds[column.kind])
                for column, values in zip(columns, zip(*group, strict=True), strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))
            count += len(group)
    return count
