"""Data loaders that go on exactly where training stopped.

Names are resolved when they are first used, so that NumPy, DALI and pyarrow are only imported by
those who use them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_checkfreq.data.augment import sample_rng as sample_rng
    from dcp_checkfreq.data.batch_sampler import ResumableBatchSampler as ResumableBatchSampler
    from dcp_checkfreq.data.cache import FileCache as FileCache
    from dcp_checkfreq.data.cache_stats import CacheStats as CacheStats
    from dcp_checkfreq.data.cache_stats import Fallback as Fallback
    from dcp_checkfreq.data.cached_files import CachedFiles as CachedFiles
    from dcp_checkfreq.data.dali import ResumableDALILoader as ResumableDALILoader
    from dcp_checkfreq.data.dali_reader import ResumableDALIReader as ResumableDALIReader
    from dcp_checkfreq.data.dali_reader import check_native_reader as check_native_reader
    from dcp_checkfreq.data.loader import ResumableLoader as ResumableLoader
    from dcp_checkfreq.data.parquet import ParquetSource as ParquetSource
    from dcp_checkfreq.data.parquet import ResumableParquetLoader as ResumableParquetLoader
    from dcp_checkfreq.data.rng import RNGState as RNGState
    from dcp_checkfreq.data.rng import seed_everything as seed_everything
    from dcp_checkfreq.data.shard_readers import JsonLinesReader as JsonLinesReader
    from dcp_checkfreq.data.shard_readers import Layout as Layout
    from dcp_checkfreq.data.shard_readers import NpyReader as NpyReader
    from dcp_checkfreq.data.shard_readers import ShardReader as ShardReader
    from dcp_checkfreq.data.shard_source import ShardSource as ShardSource
    from dcp_checkfreq.data.streams import ResumableStreamLoader as ResumableStreamLoader
    from dcp_checkfreq.data.tar_reader import TarReader as TarReader
    from dcp_checkfreq.data.wrap import ResumableIterator as ResumableIterator
    from dcp_checkfreq.errors import DataStateError as DataStateError

_HOMES: dict[str, str] = {
    "CacheStats": "data.cache_stats",
    "CachedFiles": "data.cached_files",
    "DataStateError": "errors",
    "Fallback": "data.cache_stats",
    "FileCache": "data.cache",
    "JsonLinesReader": "data.shard_readers",
    "Layout": "data.shard_readers",
    "NpyReader": "data.shard_readers",
    "ParquetSource": "data.parquet",
    "RNGState": "data.rng",
    "ResumableBatchSampler": "data.batch_sampler",
    "ResumableDALILoader": "data.dali",
    "ResumableDALIReader": "data.dali_reader",
    "ResumableIterator": "data.wrap",
    "ResumableLoader": "data.loader",
    "ResumableParquetLoader": "data.parquet",
    "ResumableStreamLoader": "data.streams",
    "ShardReader": "data.shard_readers",
    "ShardSource": "data.shard_source",
    "TarReader": "data.tar_reader",
    "check_native_reader": "data.dali_reader",
    "sample_rng": "data.augment",
    "seed_everything": "data.rng",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dcp_checkfreq.{home}"), name)
