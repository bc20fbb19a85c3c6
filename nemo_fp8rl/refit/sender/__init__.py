"""The trainer's side of a refit: each rank quantizes its shard once and fills the buckets of its links."""
