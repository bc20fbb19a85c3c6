"""The address and the interface by which other machines reach this one."""

import os
import re
import socket

import psutil
import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.workers.network import address_towards, check_interfaces, set_gloo_interface


def interfaces() -> list[tuple[str, str]]:
    """Return (name, IPv4 address) of the interfaces."""
    cards = psutil.net_if_addrs().items()
    return [(name, one.address) for name, card in cards for one in card if one.family == socket.AF_INET]


def test_the_way_to_itself_begins_at_the_address_itself():
    for _, address in interfaces():
        assert address_towards(address) == address


def test_where_there_is_no_way_it_is_an_error():
    with pytest.raises(OSError):
        address_towards("no.such.host.invalid")


@pytest.fixture(autouse=True)
def unset(monkeypatch) -> None:
    """No interface is set, and what a test sets ends with the test."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_gloo_has_the_interface_of_the_address():
    for name, address in interfaces():
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        set_gloo_interface(address)
        assert os.environ["GLOO_SOCKET_IFNAME"] == name


def test_an_interface_that_the_user_chose_stays():
    os.environ["GLOO_SOCKET_IFNAME"] = "chosen"
    set_gloo_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"


def test_an_address_of_another_machine_chooses_none():
    set_gloo_interface("203.0.113.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GLOO_SOCKET_IFNAME", "ib7"),
        ("GLOO_SOCKET_IFNAME", "lo,ib7"),
        ("GLOO_SOCKET_IFNAME", "^lo,docker"),  # NCCL's grammar
        ("NCCL_SOCKET_IFNAME", "ib"),
        ("NCCL_SOCKET_IFNAME", "=l"),
        ("VLLM_HOST_IP", "203.0.113.1"),
    ],
)
def test_an_interface_or_address_that_is_not_there_is_named_with_its_variable(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=re.escape(f"{variable}={value}")):
        check_interfaces()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("GLOO_SOCKET_IFNAME", value) for value in ("", "lo", "lo,lo")),
        *(("NCCL_SOCKET_IFNAME", value) for value in ("l", "=lo", "^docker", "ib,lo", "lo:7")),
        ("VLLM_HOST_IP", "127.0.0.1"),
    ],
)
def test_interfaces_that_are_there_are_taken(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    check_interfaces()
