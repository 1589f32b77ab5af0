"""Read private tables with public schemas from files.

`schema` declares bounds and vocabularies, which are never learnt from records; `tables` reads private rows in
blocks; `csv_files`, `parquet_files` and `table_files` read them from disk.
"""

from farthing.data.adult import Dataset, load_adult
from farthing.data.columns import Categorical, Date, Numeric
from farthing.data.schema import Schema
from farthing.data.tables import Features, Table

__all__ = ["Categorical", "Dataset", "Date", "Features", "Numeric", "Schema", "Table", "load_adult"]
