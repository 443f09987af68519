# The public names, each written once: `__init__.py` reads this file.

from .cache.dataset import CachedFiles as CachedFiles
from .cache.file_cache import FileCache as FileCache
from .cache.stats import (
    CacheStats as CacheStats,
    Fallback as Fallback,
)
from .dali.loader import ResumableDALILoader as ResumableDALILoader
from .dali.native_reader import (
    ResumableDALIReader as ResumableDALIReader,
    check_native_reader as check_native_reader,
)
from .loaders.batch_sampler import ResumableBatchSampler as ResumableBatchSampler
from .loaders.map_style import ResumableLoader as ResumableLoader
from .loaders.parquet import ResumableParquetLoader as ResumableParquetLoader
from .loaders.shards import ResumableStreamLoader as ResumableStreamLoader
from .wrap.iterator import ResumableIterator as ResumableIterator
from .order.cursor import DataStateError as DataStateError
from .random.per_sample import sample_rng as sample_rng
from .random.rng_state import (
    RNGState as RNGState,
    seed_everything as seed_everything,
)
from .sources.parquet_source import ParquetSource as ParquetSource
from .sources.shard_readers import (
    JsonLinesReader as JsonLinesReader,
    Layout as Layout,
    NpyReader as NpyReader,
    ShardReader as ShardReader,
)
from .sources.shard_source import ShardSource as ShardSource
from .sources.tar_reader import TarReader as TarReader
