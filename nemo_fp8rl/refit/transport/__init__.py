"""How a bucket travels from a trainer rank to an engine rank: `link` says what all ways have in common."""
