"""How an update travels: as it is within a process, as safetensors bytes between processes."""
