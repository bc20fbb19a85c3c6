"""The trainer's end of a refit: one rank quantizes its shard once and fills the buckets of its links."""
