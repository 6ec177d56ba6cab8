"""Links with several streams, between processes."""

from __future__ import annotations

import pytest

from pipecomp.distributed.local_launcher import run_ranks
from tests.dist import streams_work
from tests.limits import HANG_S
from tests.tls.meshes import keys_for


@pytest.mark.parametrize("streams", [1, 3, 8])
def test_packets_over_gloo_keep_their_order(streams):
    found = run_ranks(3, streams_work.sent_over_streams, streams, False, timeout_s=HANG_S)
    assert [found[rank][0] for rank in range(3)] == [
        {"to_next": streams},
        {"to_previous": streams, "to_next": streams},
        {"to_previous": streams},
    ]
    assert [found[rank][1] for rank in range(3)] == [streams, 2 * streams, streams], "each its own"
    assert all(threads == 1 and sockets <= 0 for _, _, threads, sockets, _ in found.values())
    assert not any(measured for *_, measured in found.values())


def test_auto_measures_a_long_line_only():
    for long in (False, True):
        found = run_ranks(2, streams_work.sent_over_streams, "auto", long, timeout_s=HANG_S)
        chosen = [count for rank in range(2) for count in found[rank][0].values()]
        assert chosen[0] == chosen[1]
        assert all(measured is long for *_, measured in found.values())
        assert long or chosen == [1, 1]
        assert [found[rank][1] for rank in range(2)] == chosen, "further groups are gone"
        assert all(threads == 1 and sockets <= 0 for _, _, threads, sockets, _ in found.values())


def test_another_number_than_the_neighbors_is_an_error_that_names_both():
    found = run_ranks(2, streams_work.differing_streams, timeout_s=HANG_S)
    assert "rank 1 uses 3 streams, this rank 2. Give all ranks the same transport.streams" in found[0]
    assert "rank 0 uses 2 streams, this rank 3. Give all ranks the same transport.streams" in found[1]


def test_a_neighbor_that_does_not_answer_counts_as_lost():
    found = run_ranks(2, streams_work.silent_neighbor, timeout_s=HANG_S)
    assert found[0] == ("rank 1 did not agree on streams. It sends nothing", 1)


@pytest.mark.parametrize("secured", [False, True], ids=["gloo", "tls"])
@pytest.mark.parametrize("phase", ["pings", "rates"])
def test_a_rank_that_fails_while_links_open_ends_all(tmp_path, phase, secured):
    """Also those whose own links are open already."""
    if secured:
        keys_for(tmp_path, 4)
    given = phase, str(tmp_path) if secured else None
    found = run_ranks(4, streams_work.opened_with_a_failure, *given, timeout_s=HANG_S)
    assert found[1][0] == "WireError: no packet"
    for rank in (0, 2, 3):
        assert found[rank][0] == "LinkError: rank 1 could not connect to its neighbors: WireError: no packet"


@pytest.mark.parametrize("secured", [False, True], ids=["gloo", "tls"])
def test_a_rank_that_dies_while_links_open_ends_all(tmp_path, secured):
    if secured:
        keys_for(tmp_path, 4)
    given = "killed", str(tmp_path) if secured else None
    found = run_ranks(4, streams_work.opened_with_a_failure, *given, timeout_s=HANG_S, may_die=[1])
    for rank in (0, 2, 3):
        assert found[rank][0].startswith("PeerLostError: ")
        assert "rank 1" in found[rank][0]
