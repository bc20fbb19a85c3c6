"""The weights of one rank: which part it holds, by HF names, and how it reads, writes and exports them."""
