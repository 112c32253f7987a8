"""Addresses that only this machine or its network can reach are not public."""

import pytest

from rosebatch.io.images.public_address import is_public

PRIVATE = """
0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 127.0.0.1 127.1.2.3 169.254.0.1 169.254.169.254
172.16.0.1 172.31.255.255 192.0.0.1 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1
239.255.255.255 240.0.0.1 255.255.255.255 168.63.129.16
:: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:8.8.8.8 ::ffff:0:8.8.8.8 64:ff9b::127.0.0.1
64:ff9b::8.8.8.8 64:ff9b:1::1 100::1 2001::1 2001:10::1 2001:20::1 2001:db8::1 2002:7f00:1::1 2002:808:808::1 3fff::1
5f00::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1 ff0e::1 2606:4700::1%eth0
localhost example.com 2130706433 0x7f000001 0x7f.1 127.1 0177.0.0.1 127.0.0.01 1.1.1 [::1] 8.8.8.8:80
"""
PUBLIC = "1.1.1.1 8.8.8.8 93.184.216.34 172.32.0.1 192.169.0.1 223.255.255.1 2606:4700:4700::1111 2a00:1450:4001::200e"


@pytest.mark.parametrize("address", ["", *PRIVATE.split()])
def test_private_addresses(address):
    """A mapped or translated address is the private one inside of it."""
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC.split())
def test_public_addresses(address):
    """A check that refuses all of them guards nothing that anyone uses."""
    assert is_public(address)
