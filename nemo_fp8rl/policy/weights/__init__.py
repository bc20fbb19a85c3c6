"""The weights of one rank: the parts that it has, by HF names, and how they are read, written and exported."""
