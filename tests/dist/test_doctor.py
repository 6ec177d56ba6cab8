"""The doctor between ranks: what they measure, what rank 0 reports for all, ranks that cannot connect or are gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.distributed.placement import free_port
from pipecomp.doctor import Finding
from tests.dist.lab_ranks import run_in_lab
from tests.limits import HANG_S
from tests.tls.meshes import keys_for

pytestmark = pytest.mark.ranks

LIMIT_S = 600.0  # guards against a hang


def examined(rank, world, note, verdicts):
    """Examine with a made-up machine on each rank; (what was reported here, whether there is a problem)."""
    from pipecomp.doctor import examination, measure

    measure._MOST_BYTES = 1 << 22
    examination.machine_findings = lambda launch, *more: [
        Finding("machine", verdicts[rank], f"of rank {rank}", "Mend it."),
        Finding("good", "ok", f"of rank {rank}"),
    ]
    os.environ["LOCAL_RANK"] = "0"  # as if each rank had a machine of its own
    told: list[Finding] = []
    problem = examination.examine(told.extend, store=Path("messages"), limit_s=LIMIT_S)
    return [tuple(f) for f in told], problem


def findings_of(results, rank=0):
    return [Finding(*values) for values in results[rank][0]]


def test_rank_0_reports_for_all():
    results = run_ranks(3, examined, ("ok", "warning", "problem"), timeout_s=HANG_S)
    assert [problem for _, problem in (results[r] for r in range(3))] == [True, True, True]
    assert results[1][0] == results[2][0] == []
    findings = findings_of(results)
    lines = {(f.check, f.verdict): f.found for f in findings}
    assert lines["machine", "ok"] == "of rank 0"
    assert lines["machine", "warning"].endswith(": of rank 1")
    assert lines["machine", "problem"].startswith("rank 2 on ")
    assert sum(f.check == "good" for f in findings) == 1  # of other machines only what is not well
    assert sum("1 of 2 checks of its machine are ok" in f.found for f in findings) == 2
    assert lines["gloo connections", "ok"] == "all 3 ranks are connected"
    pairs = [f for f in findings if f.check.startswith("ranks ")]
    assert [f.check for f in pairs] == ["ranks 0 and 1", "ranks 0 and 2", "ranks 1 and 2"]
    assert all("bit/s" in f.found and "there and back" in f.found for f in pairs)


def cannot_connect(rank, world, note):
    import torch.distributed as dist

    from pipecomp.doctor import ranks

    ranks._GLOO_S = 3.0

    def refuse(*arguments, **options):
        raise RuntimeError("Gloo connectFullMesh failed with a refused connection")

    if rank == 1:
        dist.init_process_group = refuse
    return examined(rank, world, note, ("ok", "ok"))


def test_ranks_that_gloo_cannot_connect():
    results = run_ranks(2, cannot_connect, timeout_s=HANG_S)
    connections = next(f for f in findings_of(results) if f.check == "gloo connections")
    assert connections.verdict == "problem"
    assert "cannot connect" in connections.found
    assert not any(f.check.startswith("ranks ") for f in findings_of(results))
    assert results[0][1] is results[1][1] is True


def dies_while_measured(rank, world, note):
    from pipecomp.doctor import ranks

    if rank == 1:
        ranks.follow = lambda peer: os._exit(7)
    ranks._SILENCE_S = ranks._PAIR_S = 5.0
    return examined(rank, world, note, ("ok", "ok", "ok"))


def test_a_rank_that_dies_while_it_is_measured(monkeypatch):
    results = run_ranks(3, dies_while_measured, timeout_s=HANG_S, may_die=(1,))
    assert sorted(results) == [0, 2]
    lines = {f.check: f for f in findings_of(results)}
    assert lines["ranks 0 and 1"].verdict == "problem"
    assert "no data came through" in lines["ranks 0 and 1"].found
    assert lines["ranks 0 and 2"].verdict != "problem"
    assert any(check.startswith("rank 1 on") and f.verdict == "problem" for check, f in lines.items())
    assert results[0][1] is True


def rank_0_dies(rank, world, note):
    from pipecomp.doctor import ranks

    if rank == 0:
        ranks.RankSession._coordinate = lambda self: os._exit(7)
    return examined(rank, world, note, ("ok", "ok"))


def test_rank_0_dies_after_the_meeting():
    results = run_ranks(2, rank_0_dies, timeout_s=HANG_S, may_die=(0,))
    assert results[1][1] is True
    machine, *_, last = findings_of(results, rank=1)
    assert machine.found == "of rank 1"
    assert (last.check, last.verdict) == ("rendezvous", "problem")


SCRIPT = textwrap.dedent(
    """
    import sys
    from pipecomp.cli import app
    from pipecomp.doctor import Finding, examination
    verdict = sys.argv.pop(1)
    examination.machine_findings = lambda launch, *more: [Finding("machine", verdict, str(launch), "Mend it.")]
    if __name__ == "__main__":
        app()
    """
)


@pytest.mark.soak
def test_under_torchrun(tmp_path):
    script = tmp_path / "doctor.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), "problem", "doctor"]
    path = os.pathsep.join(sys.path)
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=HANG_S, env=environ, cwd=tmp_path, check=False
    )
    assert done.returncode != 0
    findings = json.loads(done.stdout)  # one list: rank 1 prints nothing
    assert findings[0]["verdict"] == "problem"
    assert "local_world=2" in findings[0]["found"]
    assert findings[-1]["check"] == "ranks 0 and 1"


@pytest.mark.soak
def test_two_ranks_here_without_a_launcher(tmp_path):
    script = tmp_path / "doctor.py"
    script.write_text(SCRIPT)
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(script), "ok", "doctor", "--json", "--peers"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)
    assert findings[-1]["check"] == "ranks 0 and 1"
    assert "both on" in findings[-1]["found"]


def test_ranks_that_never_come(monkeypatch):
    from pipecomp.doctor import examination

    monkeypatch.setattr(examination, "machine_findings", lambda launch, *more: [])
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    told: list[Finding] = []
    assert examination.examine(told.extend, store=Path("messages"), limit_s=2.0)
    (finding,) = told
    assert (finding.check, finding.verdict) == ("rendezvous", "problem")
    assert os.environ["MASTER_PORT"] in finding.found


def on_a_node(rank, world, note, environ):
    from pipecomp.doctor import examination, ranks

    examination.machine_findings = lambda launch, *more: []
    ranks._GLOO_S = 3.0
    os.environ.update(environ)
    told: list[Finding] = []
    examination.examine(told.extend, store=Path("messages"), limit_s=LIMIT_S)
    return [finding._asdict() for finding in told]


def in_a_lab(environ, **shape) -> dict[str, dict[str, str]]:
    """Return rank 0's report for two nodes, by check."""
    from pipecomp.netlab import Lab, missing

    if problem := missing():
        pytest.skip(problem)
    with Lab(nodes=2, **shape) as lab:
        return {f["check"]: f for f in run_in_lab(lab, on_a_node, environ, timeout_s=HANG_S)[0]}


def test_the_rates_of_a_slow_link():
    found = in_a_lab({}, asymmetric=["1000mbit/4mbit", "1000mbit/40mbit"])
    words = found["ranks 0 and 1"]["found"].replace(",", "").split()
    units = {"kbit/s": 1e-3, "Mbit/s": 1.0, "Gbit/s": 1e3}
    up, down = (float(words[i - 1]) * units[word] for i, word in enumerate(words) if word in units)
    assert 0 < up < 4.4  # a busy machine measures less, and nothing can measure more
    assert 0 < down < 44.0
    assert " lost there and back, jitter " in found["packets 0–1"]["found"]
    assert found["MTU 0–1"]["found"] == "1500 bytes come through whole, the interface takes 1500"


def test_a_way_on_which_large_packets_vanish():
    """The bridge's port to node 1 takes 1400 bytes and tells nobody, as a tunnel behind a filter of ICMP."""
    from pipecomp.netlab import Lab, missing

    if problem := missing():
        pytest.skip(problem)
    with Lab(nodes=2) as lab:
        port = ["ip", "-n", f"{lab.name}-hub", "link", "set", "port1", "mtu", "1400"]
        subprocess.run(port, check=True, timeout=HANG_S)
        for node in range(2):  # else the kernel passes several of TCP's packets on as one, which no port measures
            whole = ["ip", "-n", f"{lab.name}-n{node}", "link", "set", "eth0", "gso_max_segs", "1"]
            subprocess.run(whole, check=True, timeout=HANG_S)
        found = {f["check"]: f for f in run_in_lab(lab, on_a_node, {}, timeout_s=HANG_S)[0]}
    line = found["MTU 0–1"]
    assert line["verdict"] == "warning", found
    assert "1400 bytes come through whole, the interface takes 1500: larger ones vanish" in line["found"]
    assert found["ranks 0 and 1"]["verdict"] == "problem", "TCP's packets are as large"


def test_loopback_between_two_machines():
    found = in_a_lab({"GLOO_SOCKET_IFNAME": "lo"})
    line = found["gloo connections"]
    assert line["verdict"] == "problem"
    assert "GLOO_SOCKET_IFNAME" in line["advice"]


def on_a_node_with_keys(rank, world, note, keys):
    return on_a_node(rank, world, note, {"PIPECOMP_KEYS": f"{keys}/rank-{rank}", "GLOO_SOCKET_IFNAME": "nowhere"})


def test_with_keys_packets_take_the_way_of_the_connections_and_not_gloos(tmp_path):
    from pipecomp.netlab import Lab, missing

    if problem := missing():
        pytest.skip(problem)
    keys_for(tmp_path, 2)
    with Lab(nodes=2) as lab:
        ranks = run_in_lab(lab, on_a_node_with_keys, str(tmp_path), timeout_s=HANG_S)
    found = {f["check"]: f for f in ranks[0]}
    assert found["MTU 0–1"]["found"] == "1500 bytes come through whole, the interface takes 1500"


def examined_with_keys(rank, world, note, keys):
    os.environ["PIPECOMP_KEYS"] = f"{keys}/rank-{rank}"
    return examined(rank, world, note, ("ok",) * world)


def test_with_keys_all_goes_over_tls(tmp_path):
    keys_for(tmp_path, 2)
    results = run_ranks(2, examined_with_keys, str(tmp_path), timeout_s=HANG_S)
    lines = {(f.check, f.verdict): f.found for f in findings_of(results)}
    assert lines["routes", "ok"] == "under TLS with this run's keys, to rank 1 direct"
    assert lines["TLS connections", "ok"] == "all 2 ranks are connected"
    assert "bit/s" in next(found for (check, _), found in lines.items() if check == "ranks 0 and 1")


def dies_in_its_own_checks(rank, world, note, keys):
    from pipecomp.doctor import examination

    examination._MACHINE_LIMIT_S = 10 * HANG_S
    os.environ |= {"PIPECOMP_KEYS": f"{keys}/rank-{rank}", "LOCAL_RANK": "0"}
    examination.machine_findings = lambda launch, *more: [] if rank == 0 else os.kill(os.getpid(), signal.SIGKILL)
    told: list[Finding] = []
    examination.examine(told.extend, store=Path("messages"), limit_s=LIMIT_S)
    return [tuple(f) for f in told], True


def test_with_keys_a_rank_that_dies_in_its_own_checks_is_not_waited_for(tmp_path):
    keys_for(tmp_path, 2)
    results = run_ranks(2, dies_in_its_own_checks, str(tmp_path), timeout_s=HANG_S, may_die=(1,))
    (lost,) = [f for f in findings_of(results) if f.verdict == "problem"]
    assert lost.check.startswith("rank 1 on ")
    assert lost.found == "it no longer answers"


def test_keys_of_another_run_do_not_meet(tmp_path):
    keys_for(tmp_path / "ours", 1)
    keys_for(tmp_path, 2)
    (tmp_path / "rank-0").rename(tmp_path / "gone")
    (tmp_path / "ours" / "rank-0").rename(tmp_path / "rank-0")
    (rank_1,) = [findings_of(run_ranks(2, meets, str(tmp_path), timeout_s=HANG_S), rank=1)]
    ranks = next(f for f in rank_1 if f.check == "rendezvous")
    assert ranks.verdict == "problem"
    assert "is not rank 0 of this run" in ranks.found


def meets(rank, world, note, keys):
    global LIMIT_S
    LIMIT_S = 20.0  # rank 0 waits that long for one that may come
    return examined_with_keys(rank, world, note, keys)
