"""Variables that look like secrets are refused, so that none is in a script or a manifest; others are not."""

import pytest

from nemo_fp8rl.commands.launch.settings import read_settings
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.secret_variables import looks_secret

SECRETS = {
    "HF_TOKEN": "hf_abc",
    "WANDB_API_KEY": "0af3",
    "DB_PASSWORD": "123456",
    "AWS_SECRET_ACCESS_KEY": "/abcDEF+ghi",
    "PRIVATE_KEY": "-----BEGIN",
    "SSH_KEY": "/x",
    "WANDB_KEY": "0123456789",
    "MY_PASS": "x y",
    "AUTH": "Bearer x",
    "BASIC_AUTH": "u:pw",
    "db_pwd": "x",
    "KEY_PASSPHRASE": "x",
    "HF_TOKEN_PATH": "hf_abc",  # not a path
    "DATABASE_URL": "postgres://u:pw@h/db",
    "HTTPS_PROXY": "http://me:p%40w@proxy:3128",
    "CACHE": "redis://:pw@h:6379",
}
HARMLESS = {
    "TOKENIZERS_PARALLELISM": "false",
    "TOKENIZER": "Qwen/Qwen3-8B",
    "TOKENIZER_THREADS": "4",
    "MAX_TOKENS": "4096",
    "VLLM_MAX_TOKENS_PER_STEP": "8192",
    "NUM_KEY_BLOCKS": "12",
    "MAX_TOKEN_LEN": "4096",
    "AUTH_PORT": "8080",
    "EOS_TOKEN_ID": "151643",
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "USE_AUTH": "off",
    "HF_TOKEN": "",
    "HF_TOKEN_PATH": "/x",
    "TOKEN_FILE": "/run/token",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
    "CREDENTIALS_DIR": "/run/credentials",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "GOOGLE_APPLICATION_CREDENTIALS": "/run/gcp.json",
    "RAY_TLS_SERVER_KEY": "/etc/ray/tls.key",
    "RAY_AUTH_MODE": "token",
    "KEYBOARD": "us",
    "MONKEY": "x",
    "AUTHOR": "x",
    "COMPASS": "x",
    "BYPASS": "x",
    "NCCL_DEBUG": "WARN",
    "PWD": "/work",
    "MASTER": "tcp://10.0.0.1:2000",
    "PAGE": "https://example.com:8080/@user",
    "IMAGE": "docker://registry:5000/image:tag@sha256:0",
    "NGINX": "docker://nginx:1.2@sha256:0",
    "REDIS": "redis://:$(REDIS_PASSWORD)@h",  # a variable of Kubernetes
}


@pytest.mark.parametrize(("name", "value"), SECRETS.items(), ids=SECRETS)
def test_what_looks_like_a_secret_is_refused_and_not_shown(name, value):
    with pytest.raises(UserError, match=f"env.{name} looks like a secret") as caught:
        read_settings(None, [f"env.{name}='{value}'"])
    assert value not in str(caught.value).split(" looks like ")[0].removeprefix(f"env.{name}")


@pytest.mark.parametrize(("name", "value"), HARMLESS.items(), ids=HARMLESS)
def test_what_is_none_is_taken(name, value):
    assert not looks_secret(name, value)
