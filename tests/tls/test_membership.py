"""Machines that are left after a loss agree who takes part in the next start."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest

from pipecomp.errors import LinkTimeoutError, WireError
from pipecomp.tls import membership
from pipecomp.tls import mesh as mesh_module
from pipecomp.tls.handshake import Credentials
from pipecomp.tls.key_folder import create_keys, revoke_machine
from pipecomp.tls.listener import Address, Listener
from pipecomp.tls.membership import (
    Membership,
    MembershipConfig,
    NoRunError,
    RunEndedError,
    agree_on_members,
    is_enough,
)
from pipecomp.tls.mesh import JoinConfig, Mesh
from tests.limits import HANG_S, until
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


def visitor(config: MembershipConfig) -> MembershipConfig:
    """A machine that did not take part in the last start."""
    return replace(config, before=(), number=0, listen=None)


def test_a_machine_that_waits_takes_the_place_of_a_lost_one(configs, credentials):
    for place in (0, 1):
        configs[place] = replace(configs[place], before=(0, 1), number=4)
    configs[2] = visitor(configs[2])
    assert agree(configs, credentials, (0, 2)) == [Membership((0, 2), configs[0].addresses[0], 4)] * 2


def test_a_new_place_is_for_a_machine_that_waits_only_if_the_ranks_ask_for_it(configs, credentials):
    for place in (0, 1):
        configs[place] = replace(configs[place], before=(1, 0), wanted=3)
    configs[2] = visitor(configs[2])
    found = agree(configs, credentials, (0, 1, 2))
    assert found == [Membership((0, 1, 2), configs[0].addresses[0], 1)] * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "_VISIT_S", 0.1)
        for place in (0, 1):
            configs[place] = replace(configs[place], wanted=0)
        waits = replace(configs[2], addresses={0: configs[0].addresses[0]})
        with pytest.raises(LinkTimeoutError):
            together(
                [
                    lambda: agree_on_members(configs[0], credentials[0], wait_s=HANG_S),
                    lambda: agree_on_members(configs[1], credentials[1], wait_s=HANG_S),
                    lambda: agree_on_members(waits, credentials[2], wait_s=2.0, first_s=2.0),
                ]
            )


class TestVisits:
    """A machine that comes while training goes on."""

    @pytest.fixture
    def run(self, credentials):
        """Two machines of two ranks, of which the first answers at its address."""
        at = free_address()
        own = Credentials(credentials[0].folder, (0, 1, 2, 3))
        mesh = Mesh(JoinConfig(0, 4, at), own)
        mesh.book = {"0": str(at), "1": "127.0.0.1:9"}
        mesh._listener = Listener(at, mesh._authenticate)
        mesh._complete = True
        yield mesh, at
        mesh.close()

    def config(self, at: Address, place: int) -> MembershipConfig:
        return MembershipConfig(place=place, procs=2, addresses={0: at}, before=(), number=0, listen=None)

    def test_rank_0_knows_who_waits(self, run, credentials, monkeypatch):
        mesh, at = run
        monkeypatch.setattr(membership, "_VISIT_S", 0.05)
        said = []
        threading.Timer(1.0, lambda: mesh.book.update({"0": "127.0.0.1:9"})).start()
        with pytest.raises(LinkTimeoutError, match="no machine of the run") as caught:
            agree_on_members(self.config(at, 2), credentials[2], wait_s=1.0, first_s=5.0, say=said.append)
        assert not isinstance(caught.value, NoRunError)
        assert mesh.visitors() == [4]
        assert said == ["the run goes on; this machine waits until it is taken in"]
        monkeypatch.setattr(mesh_module, "_VISIT_S", 0.0)
        assert mesh.visitors() == []

    def test_one_that_is_not_needed_until_the_end_ends_too(self, run, credentials, monkeypatch):
        mesh, at = run
        mesh.book = {}
        monkeypatch.setattr(membership, "_VISIT_S", 0.05)
        monkeypatch.setattr(membership, "_ENDED_S", 0.3)

        def end() -> None:
            """As a run ends: for a moment connections are accepted and closed."""
            until(mesh.visitors)
            mesh._listener.close()
            with socket.create_server(at) as closing:
                closing.accept()[0].close()

        ending = threading.Thread(target=end)
        ending.start()
        with pytest.raises(RunEndedError, match="the run has ended"):
            agree_on_members(self.config(at, 2), credentials[2], wait_s=HANG_S, first_s=HANG_S)
        ending.join()

    def test_one_that_was_left_out_ends_with_the_run(self, run, credentials, monkeypatch):
        """Its line was cut, and the run ends soon after the others have answered that they go on without it."""
        mesh, at = run
        monkeypatch.setattr(membership, "_VISIT_S", 0.05)
        monkeypatch.setattr(membership, "_RETRY_S", 0.05)
        monkeypatch.setattr(membership, "_GATHER_S", 0.1)
        monkeypatch.setattr(membership, "_ENDED_S", 1.0)
        config = replace(self.config(at, 2), before=(0, 1, 2), number=1, listen=free_address())
        ending = threading.Thread(target=lambda: until(mesh.visitors) and mesh._listener.close())
        ending.start()
        with pytest.raises(RunEndedError, match="the run has ended"):
            agree_on_members(config, credentials[2], wait_s=5.0)
        ending.join()

    def test_one_whose_loss_the_others_have_not_noticed_takes_part_in_the_next_start(self, run, credentials):
        mesh, at = run
        mesh._own = mesh._own._replace(credentials=credentials[0])
        mesh.book = {}
        with pytest.raises(membership.RunningError) as caught:
            membership._follow(self.config(at, 1), credentials[1], at, 0, 5.0)
        assert not caught.value.left_out
        with pytest.raises(membership.RunningError) as caught:
            membership._follow(self.config(at, 2), credentials[2], at, 0, 5.0)
        assert caught.value.left_out

    def test_one_of_this_start_is_no_visitor(self, run, credentials):
        mesh, at = run
        with pytest.raises(membership.RunningError) as caught:
            membership._follow(self.config(at, 1), credentials[1], at, 0, 5.0)
        assert caught.value.book == {0: at, 1: Address("127.0.0.1", 9)}
        assert mesh.visitors() == []

    def test_a_first_start_that_waits_for_its_machines_is_joined_as_usual(self, run, credentials):
        mesh, at = run
        mesh._complete = False
        mesh._own = mesh._own._replace(credentials=credentials[0])
        with pytest.raises(NoRunError, match="waits for its machines"):
            agree_on_members(self.config(at, 1), credentials[1], wait_s=HANG_S, first_s=0.0)

    def test_a_machine_of_another_run_learns_why_it_is_refused(self, run, tmp_path):
        _, at = run
        stranger = Credentials(create_keys(tmp_path / "other", machine="machine-3", ranks="4-5"))
        began = time.monotonic()
        with pytest.raises(NoRunError, match="another run"):
            agree_on_members(self.config(at, 2), stranger, wait_s=HANG_S, first_s=1.0)
        assert time.monotonic() - began < HANG_S

    def test_a_revoked_machine_is_refused(self, run, credentials, tmp_path):
        mesh, at = run
        folder = create_keys(tmp_path / "first", machine="machine-1", ranks="0-1")
        revoked = Credentials(add_machine(folder, tmp_path / "third", "machine-3", (4, 5)))
        revoke_machine(folder.path, "machine-3")
        mesh._own = mesh._own._replace(credentials=Credentials(folder, (0, 1, 2, 3)))
        with pytest.raises(NoRunError, match="revoked"):
            agree_on_members(self.config(at, 2), revoked, wait_s=HANG_S, first_s=1.0)
        assert mesh.visitors() == []


@pytest.mark.parametrize(
    "book", [None, [], {"a": "127.0.0.1:1"}, {"0": "nowhere"}, {str(n): "h:1" for n in range(2000)}]
)
def test_addresses_that_are_none_are_refused(book):
    with pytest.raises(WireError):
        membership._read_book(book)
