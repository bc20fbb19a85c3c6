"""Safetensors files on disk: written whole, in shards, or in parts by several ranks."""
