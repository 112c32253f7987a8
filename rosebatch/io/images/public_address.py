"""Which addresses are of the public internet: a row must not reach what only this machine or its network can reach."""

from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address

# An allow list: mapped, translated (NAT64) and local addresses are outside of it.
_UNICAST = IPv6Network("2000::/3")
# Of these, some hold an IPv4 address (Teredo, 6to4), and the others are for documents.
_SPECIAL = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
# Relays of 6to4, and a host that only machines of Azure reach, with their settings.
_SPECIAL_IPV4 = tuple(map(IPv4Network, ("192.88.99.0/24", "168.63.129.16/32")))


def is_public(address: str) -> bool:
    """Whether an address is one host of the public internet. What is no address is not."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if isinstance(found, IPv4Address):
        special = found.is_multicast or found.is_reserved or any(found in each for each in _SPECIAL_IPV4)
        return found.is_global and not special
    return found.scope_id is None and found in _UNICAST and not any(found in each for each in _SPECIAL)
