"""Network labs of the kernel's own, beside those in software. Everything is sent between namespaces or on 127.0.0.1."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipecomp.distributed.local_launcher import RankFailedError
from pipecomp.errors import LinkTimeoutError, PeerLostError
from pipecomp.netlab import Lab, NetlabError, kernel, missing
from pipecomp.netlab.namespaces import has_netem, lab_folder, list_namespaces, processes_in, run_command
from tests.dist.lab_ranks import run_in_lab
from tests.dist.netlab_work import place, plain_tcp, reached, round_trips, trains, transfer, within_machines
from tests.limits import HANG_S
from tests.models import ds_config

WHY_NOT = missing()
needs_kernel = pytest.mark.skipif(WHY_NOT is not None, reason=f"no labs of the kernel here: {WHY_NOT}")
pytestmark = pytest.mark.ranks
FORMS = pytest.mark.parametrize("software", [pytest.param(False, marks=needs_kernel, id="kernel"), True])
HEADERS = 1514 / 1448  # of full frames


def left_over(name: str) -> list[str]:
    """Return a lab's remains on the machine."""
    found = [space for space in list_namespaces() if space.startswith(name)] if WHY_NOT is None else []
    return [*found, *Path("/etc/netns").glob(f"{name}*"), *([lab_folder(name)] if lab_folder(name).exists() else [])]


def quiet(label, stream, line):
    """Takes output."""


# -- bytes and rates


@needs_kernel
@pytest.mark.parametrize("bandwidth", [None, "100mbit"])
def test_every_byte_is_counted_in_its_direction(bandwidth):
    with Lab(nodes=3, bandwidth=bandwidth) as lab:
        time.sleep(1.0)
        assert [tuple(counted) for counted in lab.bytes()] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
        found = lab.run(plain_tcp, 3_000_000, lab.network.address(0), timeout_s=HANG_S, on_line=quiet)
        first, second, third = lab.bytes()
    assert found[1][0] == 3_000_000
    assert 3_000_000 * HEADERS <= second.sent < 3_000_000 * HEADERS * 1.03
    assert second.sent <= first.received <= second.sent + 200  # a frame to nobody in particular reaches all
    assert 0 < first.sent < 0.1 * second.sent
    assert third.sent < 200
    assert third.received < 400


@needs_kernel
def test_ranks_of_a_machine_do_not_use_its_line():
    """gloo connects them to the address of the machine's interface, to which the system leads over loopback."""
    with Lab(nodes=2, bandwidth="100mbit") as lab:
        lab.run(within_machines, 5_000_000, procs_per_node=2, timeout_s=HANG_S, on_line=quiet)
        assert max(max(counted.sent, counted.received) for counted in lab.bytes()) < 1_000_000


@needs_kernel
def test_queues_have_the_rates_of_their_directions():
    with Lab(nodes=2, asymmetric=["100mbit/10mbit", "30mbit/3mbit"]) as lab:
        rates = []
        for node in range(2):
            for space, device in ((f"{lab.name}-n{node}", "eth0"), (f"{lab.name}-hub", f"port{node}")):
                (queue,) = json.loads(run_command(f"tc -n {space} -j qdisc show dev {device}"))
                assert (queue["kind"], queue["root"]) == ("tbf", True)
                rates.append(queue["options"]["rate"] * 8)
    assert rates == [10_000_000, 100_000_000, 3_000_000, 30_000_000]


needs_filters = pytest.mark.skipif(
    (problem := WHY_NOT or kernel.missing_filters()) is not None, reason=f"no filters here: {problem}"
)
needs_wireguard = pytest.mark.skipif(
    (problem := WHY_NOT or kernel.missing_wireguard()) is not None, reason=f"no WireGuard here: {problem}"
)


@needs_filters
def test_lost_packets_are_sent_again():
    with Lab(nodes=2, loss="10%") as lab:
        found = lab.run(plain_tcp, 1_000_000, lab.network.address(0), timeout_s=HANG_S, on_line=quiet)
        sent = lab.bytes()[1].sent
    assert found[1][0] == 1_000_000
    assert sent > 1_000_000 * HEADERS * 1.05  # about a tenth twice


@needs_kernel
@pytest.mark.skipif(WHY_NOT is None and not has_netem(), reason="no netem here")
def test_a_delay_that_varies_is_every_packets():
    with Lab(nodes=2, delay="60ms", jitter="40ms") as lab:
        assert lab.network.delay_by == "netem"
        assert not lab.notes
        found = lab.run(round_trips, lab.network.address(0), timeout_s=HANG_S, on_line=quiet)
        moved = lab.run(plain_tcp, 500_000, lab.network.address(0), timeout_s=HANG_S, on_line=quiet)
        name = lab.name
    assert min(found[1]) >= 2 * 0.020
    assert max(found[1]) - min(found[1]) > 0.005
    assert moved[1][0] == 500_000
    assert not left_over(name)


@needs_filters
def test_nobody_comes_in_through_a_router(tmp_path):
    with Lab(nodes=3, nat=True) as lab:
        addresses = [lab.network.address(node) for node in range(3)]
        found = lab.run(reached, addresses, str(tmp_path), timeout_s=HANG_S, on_line=quiet)
        name = lab.name
    assert found == {0: [True, False, False], 1: [True, True, False], 2: [True, False, True]}
    assert not left_over(name)


@needs_wireguard
@pytest.mark.parametrize("nat", [False, pytest.param(True, marks=needs_filters)])
def test_nodes_talk_through_wireguard(tmp_path, nat):
    with Lab(nodes=3, wireguard=True, nat=nat) as lab:
        addresses = [lab.network.address(node) for node in range(3)]
        found = lab.run(reached, addresses, str(tmp_path), timeout_s=HANG_S, on_line=quiet)
        lab.run(plain_tcp, 100_000, addresses[0], timeout_s=HANG_S, on_line=quiet)  # a run does not end WireGuard
        name, serving = lab.name, lab.network._helpers.pids
    assert found == {rank: [True] * 3 for rank in range(3)}
    assert lab.shape.wireguard
    assert not left_over(name)
    assert not [pid for pid in serving if Path(f"/proc/{pid}").exists()]


@pytest.mark.soak
@needs_kernel
def test_software_is_as_fast_as_the_kernel():
    """The one comparison of times, for a machine that does nothing else."""
    rate, size = 20_000_000, 4_000_000
    seconds = {}
    for software in (False, True):
        with Lab(nodes=2, bandwidth="20mbit", software=software) as lab:
            found = lab.run(transfer, [size // 4] * 4, timeout_s=HANG_S, on_line=quiet)
            seconds[software] = found[1][-1] - found[0][0]
            counted = lab.bytes()
        assert size * HEADERS * 0.99 < counted[0].sent < size * HEADERS * 1.03
        assert abs(counted[1].received - counted[0].sent) < 300
    assert 0.75 < seconds[True] / seconds[False] < 1.25
    assert min(seconds.values()) > 0.9 * size * HEADERS * 8 / rate


# -- delays and cuts


@FORMS
def test_a_message_takes_the_delay(software):
    with Lab(nodes=2, delay="150ms", software=software) as lab:
        assert lab.network.delay_by == ("netem" if not software and has_netem() else "software")
        assert len(lab.notes) == (0 if lab.network.delay_by == "netem" else 1)
        found = run_in_lab(lab, transfer, [1000] * 5, 0.05, timeout_s=HANG_S)
    (began, _), arrivals = found[0], found[1]
    for i, arrival in enumerate(arrivals):
        assert arrival - began >= 0.15 + 0.05 * i
    # Five messages one behind the other in their delay: if each waited for the one before, all would be that far apart.
    assert min(b - a for a, b in itertools.pairwise(arrivals)) < 0.1


@FORMS
def test_a_cut_ends(software):
    with Lab(nodes=2, bandwidth="8mbit", software=software) as lab:

        def on_note(rank, value):
            lab.cut(1)
            time.sleep(1.0)
            lab.join(1)

        found = run_in_lab(lab, transfer, [300_000] * 4, 0.0, True, timeout_s=HANG_S, on_note=on_note)
    assert found[1][-1] - found[0][0] > 1.0


@pytest.mark.soak
@FORMS
def test_a_cut_for_good_shows_as_silence(software):
    notes = []
    sizes = [300_000] * (4 if software else 1000)  # so many that the cut, which a note asks for, comes before the last
    with Lab(nodes=2, software=software, cuts=["1@0s"] if software else ()) as lab:

        def on_note(rank, value):
            notes.append((rank, value))
            if not software and value == "sending":
                lab.cut(1)

        # gloo closes the connection of a receive that ran out of time: without a kernel's link the other end sees that
        words = LinkTimeoutError.__name__ + (f"|{PeerLostError.__name__}" if software else "")
        with pytest.raises(RankFailedError, match=words):
            lab.run(transfer, sizes, 0.1, True, 3.0, timeout_s=HANG_S, on_line=quiet, on_note=on_note)
    assert (1, "silence") in notes


# -- training


def test_training_in_software():
    """The engine's own links are throttled and counted."""
    config = ds_config({"activations": {"method": "direct", "forward_bits": 4, "backward_bits": 8}})
    with Lab(nodes=2, bandwidth="20mbit", delay="2ms", software=True) as lab:
        stats = run_in_lab(lab, trains, config, 2, timeout_s=HANG_S)
        counted = lab.bytes()
    for node, direction in ((0, "forward"), (1, "backward")):
        sent = stats[node][direction]["bytes_sent"]
        assert sent > 2 * 3 * 2 * 24 * 32 / 2  # steps, micro-batches, samples, tokens, values of half a byte
        assert sent < counted[node].sent < 1.15 * sent + 20_000


@pytest.mark.soak
@needs_kernel
def test_deepspeeds_launcher(tmp_path):
    script = tmp_path / "show.py"
    script.write_text(
        "import glob, os, socket, time\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'NODE_RANK', 'GLOO_SOCKET_IFNAME')\n"
        "line = ' '.join(['ranks', *[os.environ[name] for name in names], socket.gethostbyname('node1')])\n"
        "os.write(1, f'{line}\\n'.encode())\n"  # at once: both ranks of a node write to one pipe
        "open(os.path.join(os.path.dirname(__file__), os.environ['RANK'] + '.done'), 'w')\n"
        "while len(glob.glob(os.path.join(os.path.dirname(__file__), '*.done'))) < 4: time.sleep(0.05)\n"
        "raise SystemExit(4 if os.environ['RANK'] == '2' else 0)\n"
    )
    lines = []
    with Lab(nodes=2) as lab:
        done = lab.run(
            [str(script)],
            launcher="deepspeed",
            procs_per_node=2,
            timeout_s=HANG_S,
            grace_s=30,
            environment={"DS_ACCELERATOR": "cpu"},
            on_line=lambda label, stream, line: lines.append((label, line)),
        )
    shown = sorted((label, line.split()[1:]) for label, line in lines if line.startswith("ranks"))
    assert shown == [
        (f"node{rank // 2}", [*f"{rank} {rank % 2} 4 198.18.0.1 {rank // 2} eth0 198.18.0.2".split()])
        for rank in range(4)
    ]
    assert (done.failed, done.status) == ("node1", 4)


@needs_kernel
def test_a_rate_that_changes():
    def rates(lab):
        queues = [run_command(f"tc -n {lab.name}-n{node} -j qdisc show dev eth0") for node in range(2)]
        queues += [run_command(f"tc -n {lab.name}-hub -j qdisc show dev port{node}") for node in range(2)]
        return [8 * json.loads(found)[0]["options"]["rate"] for found in queues]

    with Lab(nodes=2, bandwidth="100mbit") as lab:
        assert rates(lab) == [100_000_000] * 4
        lab.run(plain_tcp, 100_000, lab.network.address(0), timeout_s=HANG_S, on_line=quiet)
        sent = lab.bytes()[1].sent
        lab.set_bandwidth("3mbit")
        assert rates(lab) == [3_000_000] * 4
        assert lab.bytes()[1].sent >= sent > 100_000, "counters go on"
    with Lab(nodes=2) as lab, pytest.raises(NetlabError, match="unlimited node"):
        lab.set_bandwidth("3mbit")
    with Lab(nodes=2, bandwidth="3mbit", software=True) as lab, pytest.raises(NetlabError, match="software lab"):
        lab.set_bandwidth("4mbit")


# -- nothing is left


@needs_kernel
def test_errors_take_the_lab_down():
    lab = Lab(nodes=2, bandwidth="1mbit")

    def fail():
        with lab:
            assert len(left_over(lab.name)) == 3 + 2 + 1  # namespaces, names of nodes, folder
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert left_over(lab.name) == []


def running_now(pids) -> list[int]:
    """Return those of these processes that live; what has ended may wait for its parent to notice."""
    found = []
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] != "Z":
            found.append(pid)
    return found


def start_command() -> tuple[subprocess.Popen, str]:
    """A lab with daemons on its nodes, made by the command in another process; its name."""
    words = [sys.executable, "-m", "pipecomp.cli", "netlab", "--", "sh", "-c", "env -i setsid sleep 300 & sleep 300"]
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + HANG_S
    while True:
        names = [name for name in list_namespaces() if name.startswith(f"pclab-{running.pid}-")]
        nodes = [name for name in names if "-n" in name]
        if len(nodes) == 2 and len(processes_in(nodes)) == 6:
            return running, nodes[0].rpartition("-")[0]
        assert time.monotonic() < deadline, f"the lab has not begun: {names}"
        assert running.poll() is None
        time.sleep(0.05)


@needs_kernel
def test_ctrl_c_takes_the_lab_down():
    running, name = start_command()
    daemons = processes_in([f"{name}-n0", f"{name}-n1"])
    running.send_signal(signal.SIGINT)
    assert running.wait(HANG_S) == 128 + signal.SIGINT
    assert left_over(name) == []
    assert running_now(daemons) == []


@needs_kernel
def test_the_next_lab_removes_what_a_killed_one_left(monkeypatch):
    running, name = start_command()
    daemons = processes_in([f"{name}-n0", f"{name}-n1"])
    monkeypatch.setenv("PIPECOMP_NETLAB", "an outer lab's")
    with Lab(nodes=2) as other:
        assert left_over(name)  # its process lives
        running.kill()
        running.wait(HANG_S)
        assert left_over(name)
        with Lab(nodes=2) as third:
            assert left_over(name) == []
            assert running_now(daemons) == []
            found = third.run(place, 2, timeout_s=HANG_S, on_line=quiet)
            assert found == {0: (0, 2, "198.18.0.1", False), 1: (2, 2, "198.18.0.1", False)}
        assert other.run(["true"], timeout_s=HANG_S).status == 0
    assert left_over(other.name) == left_over(third.name) == []
    assert os.getpid() == int(other.name.split("-")[1])
