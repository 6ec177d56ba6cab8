"""Machines that are left after a loss agree who takes part in the next start."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from pipecomp.errors import LinkTimeoutError
from pipecomp.tls import membership
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.key_folder import create_keys
from pipecomp.tls.listener import Address
from pipecomp.tls.membership import Membership, MembershipConfig, agree_on_members, is_enough
from tests.limits import HANG_S
from tests.tls.meshes import add_machine, free_address, together


@pytest.fixture(scope="module")
def credentials(tmp_path_factory) -> list[Credentials]:
    """Three machines of two ranks each."""
    path = tmp_path_factory.mktemp("keys")
    first = create_keys(path / "0", machine="machine-1", ranks="0-1")
    others = [add_machine(first, path / str(n), f"machine-{n + 1}", (2 * n, 2 * n + 1)) for n in (1, 2)]
    return [Credentials(folder) for folder in (first, *others)]


@pytest.fixture
def configs(monkeypatch) -> list[MembershipConfig]:
    monkeypatch.setattr(membership, "_LEAD_S", 1.0)
    monkeypatch.setattr(membership, "_GATHER_S", 2.0)
    monkeypatch.setattr(membership, "_RETRY_S", 0.1)
    addresses = {place: free_address() for place in range(3)}
    return [
        MembershipConfig(place=place, procs=2, addresses=addresses, before=(0, 1, 2), number=1, listen=addresses[place])
        for place in range(3)
    ]


def agree(configs, credentials, places, wait_s: float = HANG_S) -> list[Membership]:
    return together([lambda p=place: agree_on_members(configs[p], credentials[p], wait_s=wait_s) for place in places])


@pytest.mark.parametrize("places", [(0, 1, 2), (0, 1), (0, 2), (1, 2)])
def test_the_machines_that_are_left_agree(configs, credentials, places):
    found = agree(configs, credentials, places)
    assert found == [Membership(places, configs[places[0]].addresses[places[0]], 1)] * len(places)


def test_a_machine_that_does_not_listen_does_not_lead(configs, credentials):
    configs[1] = replace(configs[1], listen=None)
    addresses = {place: address for place, address in configs[2].addresses.items() if place != 1}
    configs = [replace(config, addresses=addresses) for config in configs]
    found = agree(configs, credentials, (1, 2))
    assert found == [Membership((2, 1), addresses[2], 1)] * 2


def test_one_that_was_away_takes_part_with_the_others_number(configs, credentials):
    configs[0] = replace(configs[0], number=3)
    configs[2] = replace(configs[2], number=5)
    assert {found.number for found in agree(configs, credentials, (0, 1, 2))} == {5}


def test_a_network_that_is_cut_makes_one_run(configs, credentials):
    """Of two machines the first goes on, and of three two."""
    assert [is_enough(left, (0, 1)) for left in [(0,), (1,), (0, 1)]] == [True, False, True]
    assert [is_enough(left, (2, 0, 1)) for left in [(0,), (1, 2), (2,)]] == [False, True, False]
    assert is_enough((2, 5), (2, 3)), "5 was not part of the last start"
    with pytest.raises(LinkTimeoutError, match=r"too few machines are left .* 1 of 3"):
        agree(configs, credentials, (0,), wait_s=4.0)
    with pytest.raises(LinkTimeoutError, match=r"no machine of the run was found .* machine 1 at"):
        agree([replace(config, listen=None) for config in configs], credentials, (1,), wait_s=1.0)


def test_a_stranger_and_a_wrong_place_take_no_part(configs, credentials, tmp_path):
    stranger = Credentials(create_keys(tmp_path / "other", machine="machine-2", ranks="2-3"))
    wrong = replace(configs[2], place=1)

    def strange(config: MembershipConfig, keys: Credentials) -> str:
        try:
            agree_on_members(replace(config, listen=None), keys, wait_s=2.0)
        except LinkTimeoutError as error:
            return str(error)
        return "took part"

    found = together(
        [
            lambda: agree_on_members(configs[0], credentials[0], wait_s=HANG_S),
            lambda: agree_on_members(configs[1], credentials[1], wait_s=HANG_S),
            lambda: strange(configs[1], stranger),
            lambda: strange(wrong, credentials[2]),
        ]
    )
    assert found[0] == found[1] == Membership((0, 1), configs[0].addresses[0], 1)
    assert "no machine of the run" in found[2]
    assert "no machine of the run" in found[3]


def test_what_is_no_tls_at_the_leader_s_address_is_passed_over(configs, credentials, monkeypatch):
    """A proxy, say."""
    monkeypatch.setattr(membership, "_LEAD_S", 5.0)  # more than an attempt that gets no answer
    with socket.create_server(configs[0].addresses[0]):
        found = agree(configs, credentials, (1, 2))
    assert found == [Membership((1, 2), configs[1].addresses[1], 1)] * 2
    assert isinstance(found[0].address, Address)
