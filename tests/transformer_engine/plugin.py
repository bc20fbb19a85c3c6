"""`pytest -p tests.transformer_engine.plugin`: the fake is in place before any test imports Megatron."""

from tests.transformer_engine.fake_kernels import install

install()
