"""Network labs without root: options, the throttle under a clock of the test's own, commands in software."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecomp.distributed.local_launcher import RankFailedError
from pipecomp.errors import ConfigError, LinkError
from pipecomp.netlab import Lab, NetlabError, missing
from pipecomp.netlab import command as command_module
from pipecomp.netlab import kernel as kernel_module
from pipecomp.netlab import namespaces as namespaces_module
from pipecomp.netlab.command import StopSignal, describe, stop_on_signals
from pipecomp.netlab.kernel import KernelNetwork
from pipecomp.netlab.namespaces import abandoned_lab, lab_folder, new_lab_name, processes_of_lab
from pipecomp.netlab.shape import burst_bytes, queue_bytes, read_shape
from pipecomp.netlab.software import VARIABLE, SharedState, Throttle, ThrottleSettings, throttle_to
from pipecomp.utils.units import wire_bytes
from tests.dist.netlab_work import fails_on_rank_1, place
from tests.limits import HANG_S

# -- options


def test_asymmetric_rates_are_down_then_up():
    shape = read_shape(nodes=2, asymmetric=["100mbit/10mbit"])
    assert shape.down == (100_000_000,) * 2
    assert shape.up == (10_000_000,) * 2
    shape = read_shape(nodes=2, asymmetric=["100mbit/10mbit", "4mbit/3mbit"])
    assert (shape.down, shape.up) == ((100_000_000, 4_000_000), (10_000_000, 3_000_000))


def test_cuts():
    shape = read_shape(nodes=3, cuts=["1@30s+500ms", "2@1s"])
    assert [(c.node, c.at_s, c.for_s) for c in shape.cuts] == [(1, 30.0, 0.5), (2, 1.0, None)]


def test_an_outage_cuts_all_nodes():
    shape = read_shape(nodes=2, outages=["60s@300s"], cuts=["1@1s"])
    assert [(c.node, c.at_s, c.for_s) for c in shape.cuts] == [(1, 1.0, None), (0, 300.0, 60.0), (1, 300.0, 60.0)]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"nodes": 1}, "nodes"),
        ({"nodes": 65}, "nodes"),
        ({"nodes": True}, "nodes"),
        ({"nodes": "2"}, "nodes"),
        ({"bandwidth": "1mbit", "asymmetric": ["1mbit/1mbit"]}, "asymmetric"),
        ({"asymmetric": ["1mbit"]}, "asymmetric"),
        ({"asymmetric": ["1mbit/1mbit"] * 3}, "asymmetric"),
        ({"asymmetric": "1mbit/1mbit"}, "asymmetric"),
        ({"asymmetric": ["1mbit/2"]}, "asymmetric"),
        ({"jitter": "1ms"}, "jitter"),
        ({"delay": "1ms", "jitter": "2ms"}, "jitter"),
        ({"cuts": ["2@1s"]}, "cut"),
        ({"cuts": ["1@"]}, "cut"),
        ({"cuts": ["1@1s+"]}, "cut"),
        ({"cuts": ["1s"]}, "cut"),
        ({"outages": ["60s"]}, "outage"),
        ({"outages": ["60s@"]}, "outage"),
        ({"outages": ["60@300s"]}, "outage"),
        ({"loss": "2"}, "loss"),
        ({"loss": "0%"}, "loss"),
        ({"loss": "51%"}, "loss"),
        ({"loss": "2%", "software": True}, "software"),
        ({"nat": True, "software": True}, "software"),
        ({"wireguard": True, "software": True}, "software"),
    ],
)
def test_impossible_options_are_refused(options, key):
    with pytest.raises(ConfigError) as error:
        Lab(**{"nodes": 2, **options})
    assert error.value.key == key


def test_links_are_described():
    text = describe(read_shape(nodes=2, asymmetric=["100mbit/10mbit"], delay="20ms", jitter="1ms"), "kernel")
    assert text == "2 nodes, 100 Mbit/s down, 10 Mbit/s up, 20 ms one way (± 1 ms), shaped by the kernel"
    text = describe(read_shape(nodes=3, loss="2.5%", nat=True, wireguard=True), "kernel")
    assert text == (
        "3 nodes, unlimited each way, 2.5 % lost, all but node 0 behind routers, through WireGuard, shaped by the "
        "kernel"
    )


# -- the throttle


class Clock:
    """Time that passes only where someone sleeps."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Links:
    """Throttles between the nodes of a shape, all on one clock."""

    def __init__(self, folder: Path, **options) -> None:
        shape = read_shape(**{"nodes": 2, **options})
        self.path, self.clock = folder / f"state-{time.monotonic_ns()}", Clock()
        self.state = SharedState.create(self.path, shape.nodes)
        self._options = {
            "state": str(self.path),
            "procs_per_node": 1,
            "up": list(shape.up),
            "down": list(shape.down),
            "delay_s": shape.delay_s,
            "jitter_s": shape.jitter_s,
        }

    def throttle(self, source: int, destination: int) -> Throttle:
        given = ThrottleSettings(node=source, **self._options)
        return Throttle(given, destination, now=self.clock.now, sleep=self.clock.sleep)


FRAME = 1448 * 100  # whole segments: exactly 151400 bytes on the wire


def test_a_saturated_link_has_its_rate(tmp_path):
    links = Links(tmp_path, bandwidth="10mbit")
    throttle = links.throttle(0, 1)
    for _ in range(50):
        throttle.hold(FRAME, 1000.0)
    assert links.clock.seconds - 1000 == pytest.approx((50 * 151400 - 5000) * 8 / 10e6, abs=1e-6)
    assert links.state.read(0).sent == links.state.read(1).received == 50 * 151400
    assert links.state.read(0).received == links.state.read(1).sent == 0


def test_a_delay_costs_no_rate(tmp_path):
    links = Links(tmp_path, bandwidth="10mbit", delay="300ms")
    throttle = links.throttle(0, 1)
    for _ in range(20):
        throttle.hold(FRAME, 1000.0)
    assert links.clock.seconds - 1000 == pytest.approx((20 * 151400 - 5000) * 8 / 10e6 + 0.3, abs=1e-6)


def test_a_delay_alone(tmp_path):
    links = Links(tmp_path, delay="20ms")
    throttle = links.throttle(0, 1)
    for queued in (1000.0, 1000.001, 1000.5):
        throttle.hold(FRAME, queued)
        assert links.clock.seconds == pytest.approx(queued + 0.02)


def test_a_pause_saves_up_one_burst_and_no_more(tmp_path):
    links = Links(tmp_path, bandwidth="10mbit")
    throttle = links.throttle(0, 1)
    for _ in range(3):
        start = links.clock.seconds = links.clock.seconds + 100.0
        throttle.hold(FRAME, start)
        throttle.hold(FRAME, start)
        assert links.clock.seconds - start == pytest.approx((2 * 151400 - 5000) * 8 / 10e6, abs=1e-6)


def test_a_sender_that_was_kept_elsewhere_cannot_use_the_past(tmp_path):
    links = Links(tmp_path, bandwidth="10mbit")
    throttle = links.throttle(0, 1)
    links.clock.seconds += 100.0
    for _ in range(20):
        throttle.hold(FRAME, 1000.0)
    assert links.clock.seconds - 1100.0 == pytest.approx((20 * 151400 - 5000) * 8 / 10e6 - 0.05, abs=1e-6)


def test_links_of_one_node_share_its_rate(tmp_path):
    links = Links(tmp_path, nodes=3, asymmetric=["40mbit/10mbit"])
    first, second = links.throttle(0, 1), links.throttle(0, 2)
    for _ in range(10):
        first.hold(FRAME, 1000.0)
        second.hold(FRAME, 1000.0)
    assert links.clock.seconds - 1000 == pytest.approx((20 * 151400 - 5000) * 8 / 10e6, abs=1e-6)


def test_senders_that_send_at_once_take_turns(tmp_path):
    """One that begins while the other's long frame is on its way does not wait for all of it."""
    links = Links(tmp_path, nodes=3, bandwidth="10mbit")
    long, short = links.throttle(0, 1), links.throttle(0, 2)
    ended = []

    def sleep_while_another_sends(seconds):
        if ended:
            links.clock.sleep(seconds)
        else:
            ended.append(0.0)
            short.hold(1448, links.clock.seconds)
            ended[0] = links.clock.seconds

    long._sleep = sleep_while_another_sends
    long.hold(10 * FRAME, 1000.0)
    assert ended[0] - 1000 < 0.03
    assert links.clock.seconds - 1000 == pytest.approx((10 * 151400 + 1514 - 5000) * 8 / 10e6, abs=2e-3)


def test_links_to_one_node_share_what_it_can_receive(tmp_path):
    links = Links(tmp_path, nodes=3, asymmetric=["10mbit/40mbit"])
    first, second = links.throttle(1, 0), links.throttle(2, 0)
    for _ in range(10):
        first.hold(FRAME, 1000.0)
        second.hold(FRAME, 1000.0)
    assert links.clock.seconds - 1000 == pytest.approx((20 * 151400 - 5000) * 8 / 10e6, abs=1e-6)


def test_directions_do_not_share(tmp_path):
    links = Links(tmp_path, bandwidth="10mbit")
    for source in (0, 1):
        links.clock.seconds = 1000.0
        links.throttle(source, 1 - source).hold(FRAME, 1000.0)
        assert links.clock.seconds - 1000 == pytest.approx((151400 - 5000) * 8 / 10e6, abs=1e-6)


def test_the_slower_of_two_links_decides(tmp_path):
    for rates in (["40mbit/10mbit", "40mbit/10mbit"], ["10mbit/40mbit", "10mbit/40mbit"]):
        links = Links(tmp_path, asymmetric=rates)
        throttle = links.throttle(0, 1)
        for _ in range(10):
            throttle.hold(FRAME, 1000.0)
        seconds = links.clock.seconds - 1000
        assert (10 * 151400 - 2 * 20000) * 8 / 10e6 < seconds <= 10 * 151400 * 8 / 10e6


def test_jitter_varies_the_delay_and_keeps_the_order(tmp_path):
    links = Links(tmp_path, delay="50ms", jitter="20ms")
    throttle = links.throttle(0, 1)
    seen = []
    for i in range(400):
        links.clock.seconds = max(links.clock.seconds, 1000.0 + i)
        throttle.hold(100, 1000.0 + i)
        seen.append(links.clock.seconds - 1000.0 - i)
    assert 0.03 <= min(seen) < 0.034
    assert 0.066 < max(seen) <= 0.07
    assert sum(seen) / len(seen) == pytest.approx(0.05, abs=0.004)
    together = [throttle.hold(100, 2000.0) or links.clock.seconds for _ in range(50)]
    assert together == sorted(together)


def test_nothing_passes_a_cut(tmp_path):
    links = Links(tmp_path, delay="1ms")
    for end in (0, 1):
        throttle = links.throttle(0, 1)
        with links.state.change(end) as (state,):
            state.cut = True
        polls = []

        def sleep(seconds, end=end, polls=polls):
            polls.append(seconds)
            if len(polls) == 20:
                with links.state.change(end) as (state,):
                    state.cut = False
            Clock.sleep(links.clock, seconds)

        throttle._sleep = sleep
        throttle.hold(10, links.clock.seconds)
        assert len(polls) == 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(16, 200_000)), min_size=1, max_size=30), st.booleans())
def test_no_window_carries_more_than_its_tokens(tmp_path_factory, frames, upward):
    links = Links(tmp_path_factory.getbasetemp(), asymmetric=["900mbit/3mbit" if upward else "3mbit/900mbit"])
    throttle = links.throttle(0, 1)
    arrived, ready = [], 1000.0
    for gap, size in frames:
        ready += gap
        links.clock.seconds = max(links.clock.seconds, ready)
        throttle.hold(size, ready)
        arrived.append((links.clock.seconds, wire_bytes(size)))
    saved = burst_bytes(3_000_000) + 0.05 * 3e6 / 8  # a full bucket, and what a sender may catch up
    for i in range(len(arrived)):
        began = arrived[i - 1][0] if i else 1000.0
        for j in range(i, len(arrived)):
            carried = sum(size for _, size in arrived[i : j + 1])
            assert carried <= (arrived[j][0] - began) * 3e6 / 8 + saved + 1


def test_processes_share_a_link(tmp_path):
    """Two processes that send at once get the rate of one."""
    state = tmp_path / "state"
    SharedState.create(state, 2)
    given = ThrottleSettings(
        state=str(state), node=0, procs_per_node=2, up=[80_000_000] * 2, down=[None] * 2, delay_s=0.0, jitter_s=0.0
    )
    script = (
        "import time; from pipecomp.netlab.software import throttle_to\n"
        "link, began = throttle_to(2), time.monotonic()\n"
        "for _ in range(40): link.hold(60000, began)\n"
    )
    environment = {VARIABLE: given.text()}
    worker = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **environment})
    own = throttle_to(3, environment)
    carried = 0
    while worker.poll() is None:
        own.hold(1000, time.monotonic())
        carried += wire_bytes(1000)
    assert worker.returncode == 0
    state = SharedState(state).read(0)
    assert state.sent == carried + 40 * wire_bytes(60000)
    assert state.up_free <= time.monotonic()


def test_what_a_process_is_told(tmp_path):
    told = ThrottleSettings(
        state=str(tmp_path / "none"), node=1, procs_per_node=2, up=[None, 5], down=[7, None], delay_s=0.5, jitter_s=0.25
    )
    assert ThrottleSettings.read(told.text()) == told
    environment = {VARIABLE: told.text()}
    assert throttle_to(3, environment) is None  # ranks 2 and 3 are this node's
    assert throttle_to(0, {}) is None
    throttle = throttle_to(1, environment)
    with pytest.raises(LinkError, match="network lab of this process has ended"):
        throttle.hold(10, 0.0)


@pytest.mark.parametrize("text", ["", "1", "{}", '{"state": "x"}', "rate=1"])
def test_a_foreign_variable_is_refused(text):
    with pytest.raises(ConfigError, match="PIPECOMP_NETLAB"):
        throttle_to(0, {VARIABLE: text})


# -- what the kernel is asked for


class Fake:
    """Takes ip and tc commands; knows which namespaces exist; fails at one command."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.commands: list[str] = []
        self.namespaces: set[str] = set()
        self._fail_at = fail_at

    def __call__(self, text: str) -> str:
        if text == "ip netns list":
            return "".join(f"{name} (id: 3)\n" for name in sorted(self.namespaces))
        self.commands.append(text)
        words = text.split()
        if words[:3] == ["ip", "netns", "add"]:
            self.namespaces.add(words[3])
        if words[:3] == ["ip", "netns", "delete"]:
            self.namespaces.remove(words[3])
        if len(self.commands) == self._fail_at:
            raise NetlabError("as asked")
        return ""


@pytest.fixture(autouse=True)
def _no_files_in_etc(tmp_path, monkeypatch):
    for module in (kernel_module, namespaces_module):
        monkeypatch.setattr(module, "CONFIGURATION", tmp_path / "netns")


def queues(fake: Fake, device: str) -> list[str]:
    found = (text.partition(f"qdisc add dev {device} ")[2] for text in fake.commands)
    return [text for text in found if text]


def test_each_direction_has_its_queue(tmp_path):
    fake = Fake()
    KernelNetwork(read_shape(nodes=2, asymmetric=["100mbit/10mbit"]), tmp_path, "lab", run=fake)
    assert fake.namespaces == {"lab-hub", "lab-n0", "lab-n1"}
    up, down = 10_000_000, 100_000_000
    assert queues(fake, "eth0") == [f"root tbf rate {up}bit burst 5000 limit {5000 + 131072}"] * 2
    assert queues(fake, "port1") == [f"root tbf rate {down}bit burst 50000 limit {50000 + 1250000}"]
    for name in ("lab-n0", "lab-n1"):
        assert any(text.startswith(f"tc -n {name} qdisc") for text in fake.commands)
    hosts = (tmp_path / "netns" / "lab-n1" / "hosts").read_text().splitlines()
    assert hosts[-2:] == ["198.18.0.2 node1", "::ffff:198.18.0.2 node1"]
    assert any("localhost" in line for line in hosts[:-4])


def test_the_kernel_delays_what_nodes_send_where_it_can(tmp_path):
    fake = Fake()
    shape = read_shape(nodes=2, bandwidth="10mbit", delay="20ms", jitter="5ms")
    network = KernelNetwork(shape, tmp_path, "lab", run=fake, netem=True)
    assert network.delay_by == "netem"
    assert network.settings(0, 1) is None
    netem, tbf = queues(fake, "eth0")[:2]
    assert netem == "root handle 1: netem limit 1000000 delay 20000us 5000us rate 100gbit"
    assert tbf.startswith("parent 1: handle 10: tbf rate 10000000bit ")
    assert "netem" not in "".join(queues(fake, "port0"))


def test_pipecomp_delays_where_the_kernel_cannot(tmp_path):
    fake = Fake()
    shape = read_shape(nodes=2, bandwidth="1mbit", delay="20ms", jitter="5ms")
    network = KernelNetwork(shape, tmp_path, "lab", run=fake, netem=False)
    assert network.delay_by == "software"
    told = ThrottleSettings.read(network.settings(1, 1))
    assert (told.node, told.delay_s, told.jitter_s, told.up, told.down) == (1, 0.02, 0.005, [None] * 2, [None] * 2)
    assert not any("netem" in text for text in fake.commands)
    SharedState(told.state).read(1)


def test_routers_and_losses_are_asked_for(tmp_path):
    fake = Fake()
    network = KernelNetwork(read_shape(nodes=3, nat=True, loss="2%"), tmp_path, "lab", run=fake)
    assert fake.namespaces == {"lab-hub", "lab-n0", "lab-n1", "lab-n2", "lab-r1", "lab-r2"}
    assert [network.address(node) for node in range(3)] == ["198.18.0.1", "198.19.1.2", "198.19.2.2"]
    assert "ip netns exec lab-r2 nft add rule ip pipecomp out oifname wan masquerade" in fake.commands
    lost = "nft add rule inet pipecomp loss iifname eth0 numgen random mod 1000000 < 20000 counter drop"
    assert [f"ip netns exec lab-n{node} {lost}" in fake.commands for node in range(3)] == [True] * 3
    network.close()
    assert not fake.namespaces


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "2%"}, "no packet filter here: install nftables and procps"),
        ({"nat": True}, "no packet filter here: install nftables and procps"),
        ({"wireguard": True}, "no WireGuard here: install wireguard-go and wireguard-tools"),
    ],
)
def test_what_a_shape_needs_is_named(monkeypatch, options, message):
    monkeypatch.setattr(namespaces_module, "missing", lambda: None)
    monkeypatch.setattr("shutil.which", lambda program: None)
    with pytest.raises(NetlabError, match=message), Lab(nodes=2, **options):
        pytest.fail("the lab is open")


def test_bursts_and_queues_grow_with_the_rate():
    assert burst_bytes(10_000) == 2 * 1514
    assert burst_bytes(10**9) == 500_000
    assert queue_bytes(10**6, 0.0) == 2 * 1514 + (1 << 17)
    assert queue_bytes(10**9, 0.2) == 500_000 + 62_500_000


@pytest.mark.parametrize("fail_at", range(1, 24))
def test_nothing_is_left_when_the_kernel_refuses(tmp_path, fail_at):
    fake = Fake(fail_at)
    with pytest.raises(NetlabError, match="as asked"):
        KernelNetwork(read_shape(nodes=2, bandwidth="1mbit"), tmp_path, "lab", run=fake)
    assert fake.namespaces == set()
    assert not any((tmp_path / "netns").glob("*"))


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == "network namespaces need root"
    with pytest.raises(NetlabError, match="need root; --software"), Lab():
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing() == "no ip and no tc here: install iproute2"


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("tbf", "this kernel lacks the rate-limiting queue tbf (module sch_tbf): Error: qdisc kind is unknown."),
        ("type bridge", "this kernel lacks bridges (module bridge): Error: qdisc kind is unknown."),
        ("netns add", "no network namespaces here: Error: qdisc kind is unknown."),
    ],
)
def test_what_the_kernel_lacks_is_named(monkeypatch, refused, message):
    def command(text: str) -> str:
        if refused in text:
            raise NetlabError(f"{text}: Error: qdisc kind is unknown.")
        return ""

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces_module.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(namespaces_module, "run_command", command)
    assert missing() == message


# -- what a killed lab leaves behind


def test_labs_of_living_processes_are_not_leftovers():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(HANG_S)
    name = new_lab_name()
    assert abandoned_lab(f"{name}-n0") is None
    assert abandoned_lab(f"pclab-{ended.pid}-123-0-hub") == f"pclab-{ended.pid}-123-0"
    assert (
        abandoned_lab(f"pclab-{os.getpid()}-123-7-n1") == f"pclab-{os.getpid()}-123-7"
    )  # an earlier process of this id
    for other in ("pclab-x", "other-1-2-3", "xpclab-1-2-3", "pclab-1-2"):
        assert abandoned_lab(other) is None


def test_namespaces_that_another_process_deletes_meanwhile_are_no_error():
    """Two labs that begin may find the same leftovers."""
    there = {"lab-n0", "lab-n1"}

    def run(text: str) -> str:
        if text == "ip netns list":
            return "\n".join(sorted(there))
        if text.endswith("n1"):
            there.discard("lab-n1")
        raise NetlabError(text)

    with pytest.raises(NetlabError, match=r"^ip netns delete lab-n0$"):
        namespaces_module.delete_namespaces(["lab-n0", "lab-n1"], run)


# -- commands and functions on nodes, in software


class Lines(list):
    def __call__(self, label, stream, line):
        self.append((label, stream, line))


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


SHOW = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $NODE_RANK $MASTER_ADDR $GLOO_SOCKET_IFNAME"


def test_a_command_finds_its_rank(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    lines = Lines()
    with Lab(nodes=2, software=True) as lab:
        done = lab.run(shell(f"{SHOW}; echo to stderr >&2"), procs_per_node=2, on_line=lines, timeout_s=HANG_S)
    assert (done.status, done.failed) == (0, None)
    assert done.statuses == {"node0.0": 0, "node0.1": 0, "node1.0": 0, "node1.1": 0}
    assert sorted(text for _, stream, text in lines if stream == "stdout") == [
        "0 0 4 2 0 127.0.0.1 lo",
        "1 1 4 2 0 127.0.0.1 lo",
        "2 0 4 2 1 127.0.0.1 lo",
        "3 1 4 2 1 127.0.0.1 lo",
    ]
    assert sorted(label for label, stream, _ in lines if stream == "stderr") == sorted(done.statuses)


def test_the_first_failing_node_decides(tmp_path):
    """The others have the grace to end by themselves, and are ended after it."""
    with Lab(nodes=3, software=True) as lab:
        first = f"[ $RANK = 2 ] && {{ echo $$ > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/first; exit 7; }}"
        # A process is there until the lab has taken its status.
        seen = f"until [ -f {tmp_path}/first ] && ! kill -0 $(cat {tmp_path}/first) 2> /dev/null; do sleep 0.02; done"
        done = lab.run(shell(f"{first}; {seen}; exit $((RANK * 5))"), grace_s=HANG_S, on_line=Lines())
        assert (done.status, done.failed) == (7, "node2")
        assert done.statuses == {"node0": 0, "node1": 5, "node2": 7}
        killed = lab.run(shell("[ $RANK = 1 ] && kill -9 $$; exec sleep 300"), grace_s=0.1, on_line=Lines())
        assert (killed.status, killed.failed) == (128 + 9, "node1")
        assert killed.statuses["node0"] == killed.statuses["node2"] == 128 + signal.SIGTERM


def test_nothing_outlives_a_run():
    lines = Lines()
    with Lab(nodes=2, software=True) as lab:
        # A session of its own, and pipes that stay open: neither may keep the run from ending.
        done = lab.run(shell("setsid sleep 300 & trap '' TERM; echo started"), on_line=lines, timeout_s=HANG_S)
        assert done.status == 0
        assert processes_of_lab(lab.name) == set()
        with pytest.raises(NetlabError, match="the run took more than 1 s"):
            lab.run(shell("setsid sleep 300 & trap '' TERM; sleep 300"), on_line=lines, timeout_s=1)
        assert processes_of_lab(lab.name) == set()
        folder = lab_folder(lab.name)
        assert folder.exists()
    assert not folder.exists()
    assert [line for _, _, line in lines] == ["started"] * 2


def test_an_error_takes_the_lab_down():
    lab = Lab(nodes=2, software=True)
    with pytest.raises(ZeroDivisionError), lab:
        raise ZeroDivisionError
    folder = lab_folder(lab.name)
    assert not folder.exists()
    with pytest.raises(NetlabError, match="the lab is not open"):
        lab.bytes()
    with pytest.raises(NetlabError, match="the lab is not open"):
        lab.run(["true"])


def test_a_broken_listener_ends_the_run():
    def listen(label, stream, line):
        raise BrokenPipeError("nobody reads this")

    with Lab(nodes=2, software=True) as lab, pytest.raises(BrokenPipeError):
        lab.run(shell("while true; do echo line; done"), on_line=listen, timeout_s=HANG_S)


@pytest.mark.parametrize(
    ("arguments", "options", "key"),
    [
        (["no-such-program-here"], {}, "COMMAND"),
        ([], {}, "COMMAND"),
        ("true", {}, "COMMAND"),
        (["true"], {"launcher": "slurm"}, "launcher"),
        (["true"], {"procs_per_node": 0}, "procs_per_node"),
    ],
)
def test_impossible_runs_are_refused(arguments, options, key):
    with Lab(nodes=2, software=True) as lab, pytest.raises(ConfigError) as error:
        lab.run(arguments, **options)
    assert error.value.key == key


def test_a_function_on_every_rank():
    notes = []
    with Lab(nodes=2, software=True) as lab:
        found = lab.run(place, 3, procs_per_node=2, timeout_s=HANG_S, on_note=lambda r, v: notes.append((r, v)))
    assert found == {rank: (3 * rank, 4, "127.0.0.1", True) for rank in range(4)}
    assert sorted(notes, key=lambda n: n[0]) == [(rank, {"rank": rank}) for rank in range(4)]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 failed:\n(.|\n)*ValueError: as the test wants"),
        ("leave", "rank 1 ended with exit status 0"),
    ],
)
def test_a_failing_rank_is_an_error(how, message):
    with Lab(nodes=2, software=True) as lab:
        with pytest.raises(RankFailedError, match=message):
            lab.run(fails_on_rank_1, how, timeout_s=HANG_S, on_line=Lines())
        assert processes_of_lab(lab.name) == set()


# -- the command


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipecomp.cli", "netlab", "--software", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, what: str, timeout_s: float = HANG_S):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def lab_of(pid: int) -> str | None:
    names = [path.name for path in lab_folder("x").parent.glob(f"pclab-{pid}-*")]
    return names[0] if names else None


def test_the_command_reports(tmp_path):
    report = tmp_path / "report.json"
    done = start(
        "--asymmetric",
        "100mbit/10mbit",
        "--delay",
        "5ms",
        "--json",
        str(report),
        "--",
        "sh",
        "-c",
        "echo out $RANK; exit $((3 * RANK))",
    )
    out, errors = done.communicate(timeout=HANG_S)
    assert done.returncode == 3
    assert {"node0 | out 0", "node1 | out 1"} <= set(out.splitlines())
    assert "only pipecomp's own links between stages are throttled" in errors.lower()
    assert "node1 failed with exit status 3." in errors
    found = json.loads(report.read_text())
    assert (found["status"], found["failed"], found["form"], found["delay_by"]) == (3, "node1", "software", "software")
    rates = [(node["up_bits_per_s"], node["down_bits_per_s"], node["bytes_sent"]) for node in found["nodes"]]
    assert rates == [(10**7, 10**8, 0)] * 2


def test_errors_are_one_line():
    done = start("--bandwidth", "fast", "--", "true")
    _, errors = done.communicate(timeout=HANG_S)
    assert done.returncode == 1
    assert errors.startswith("pipecomp: bandwidth: got 'fast', allowed: a number and bit, kbit")
    assert "Traceback" not in errors


def test_a_signal_takes_the_lab_down():
    running = start("--", "sh", "-c", "setsid sleep 300 & sleep 300")
    name = wait_for(lambda: lab_of(running.pid), "the lab has begun")
    wait_for(lambda: len(processes_of_lab(name)) >= 6, "the nodes have begun")
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=HANG_S)
    assert running.returncode == 128 + signal.SIGTERM
    assert "Stopped by" in errors
    assert processes_of_lab(name) == set()
    assert not lab_folder(name).exists()


def test_a_run_that_was_stopped_says_how_long_it_took(monkeypatch):
    def stop(*given, **options):
        raise StopSignal(signal.SIGINT)

    lab, said = Lab(nodes=2, software=True), []
    monkeypatch.setattr(lab, "run", stop)
    monkeypatch.setattr(command_module, "time", SimpleNamespace(monotonic=iter([5.0, 12.5]).__next__))
    found = command_module.run_in_lab(lab, ["true"], procs_per_node=1, launcher="none", say=said.append)
    assert (found["status"], found["seconds"]) == (128 + signal.SIGINT, 7.5)
    assert said[-1] == "Stopped by SIGINT."
    assert command_module.bytes_table(found).title == "Links between stages, 7.5 s"


def test_the_table_has_each_nodes_own_numbers():
    node = {"address": "198.18.0.1", "up_bits_per_s": 10**7, "down_bits_per_s": None}
    nodes = [{"node": n, **node, "bytes_sent": 1_234_567, "bytes_received": 8_000} for n in (0, 1)]
    shown = command_module.bytes_table({"form": "kernel", "seconds": 2.04, "nodes": nodes})
    assert shown.title == "On the wire, 2.0 s"
    rows = list(zip(*(column.cells for column in shown.columns), strict=True))
    assert rows[1] == ("node1", "198.18.0.1", "10 Mbit/s", "unlimited", "1.235 MB", "0.008 MB")
    assert [column.header for column in shown.columns] == ["node", "address", "up", "down", "sent", "received"]


def test_the_next_lab_removes_what_a_killed_one_left():
    running = start("--", "sh", "-c", "setsid sleep 300 & exec sleep 300")
    name = wait_for(lambda: lab_of(running.pid), "the lab has begun")
    wait_for(lambda: len(processes_of_lab(name)) >= 4, "the nodes have begun")
    running.kill()
    running.communicate(timeout=HANG_S)
    assert processes_of_lab(name)
    with Lab(nodes=2, software=True):
        assert processes_of_lab(name) == set()
        assert not lab_folder(name).exists()


def test_a_second_signal_does_not_interrupt_the_end():
    before = signal.getsignal(signal.SIGTERM)

    ended = []

    def stopped_twice():
        with stop_on_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
                ended.append("in order")

    with pytest.raises(StopSignal) as stopped:
        stopped_twice()
    assert stopped.value.number == signal.SIGTERM
    assert ended == ["in order"]
    assert signal.getsignal(signal.SIGTERM) is before
