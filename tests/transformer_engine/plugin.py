"""`pytest -p tests.transformer_engine.plugin`: the fake is in place before any test imports Megatron."""

from tests.transformer_engine.fake_kernels import install

assert install(), "Transformer Engine's Python, or what it imports, is not on the path"
