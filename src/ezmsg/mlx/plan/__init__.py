"""Find the limit on MLX's buffer cache that a chain of processing steps needs, by running it."""

from .recommend import CacheRecommendation, measure_working_set, recommend_cache_limit

__all__ = ["CacheRecommendation", "measure_working_set", "recommend_cache_limit"]
