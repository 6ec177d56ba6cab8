"""A new gradient method is its options, a file and a line: followed in a copy of the package, over real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.package_copy import PackageCopy, named_files

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

OPTIONS = """class EveryNthOptions(MethodOptions):
    stride: int = Field(default=2, ge=1)


"""
FILE = '''
import torch

from pipecomp.allreduce.method import ExchangePlan, GradientMethod, scattered
from pipecomp.allreduce.methods.baselines import FloatCode
from pipecomp.allreduce.reduce_scatter import reduce_bucket


class EveryNth(GradientMethod):
    """Average each nth value; the others are zero."""

    def average(self, residuals):
        return EveryNthAverage(self.options.stride)

    def plan(self, d, n, shapes=None):
        return ExchangePlan((), (scattered(-(-d // self.options.stride), n, lambda count: 4 * count),))


class EveryNthAverage:
    def __init__(self, stride):
        self.stride = stride

    def mean(self, x_d, out_d, call):
        chosen = x_d[:: self.stride].contiguous()
        mean = torch.empty(chosen.numel())
        reduce_bucket(chosen, mean, FloatCode(chosen.dtype, call), call)
        out_d.zero_()
        out_d[:: self.stride] = mean
'''
IMPORT = "from pipecomp.allreduce.methods.every_nth import EveryNth\n"
LINE = '    "every_nth": EveryNth,\n'

USE = """
import json, os, sys
import torch, torch.distributed as dist, torch.multiprocessing
import pipecomp.allreduce
from pipecomp.allreduce import State, allreduce_mean, predict
from pipecomp.config import Config
from pipecomp.errors import ConfigError

def rank(number, n, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{n}", rank=number, world_size=n)
    state = State(method="every_nth", stride=3)
    mean = allreduce_mean(state, torch.arange(100.0) + number)
    assert torch.equal(mean[::3], torch.arange(0.0, 100, 3) + (n - 1) / 2), mean
    assert float(mean.sum()) == float(mean[::3].sum())
    wanted = predict("every_nth", 100, n, bandwidth_bit_per_s=1e9, stride=3)
    assert wanted.exact and wanted.bytes_sent_by_rank[number] == state.stats()["bytes_sent"] > 0
    assert state.state_dict()["options"]["stride"] == 3
    state.close()
    dist.destroy_process_group()

if __name__ == "__main__":
    assert pipecomp.allreduce.__file__.startswith(sys.argv[1])
    assert Config.from_dict({"gradients": {"method": "every_nth"}}).gradients.stride == 2
    said = {}
    for section in ({"method": "every_nth", "stride": 0}, {"method": "qsgd", "stride": 2}):
        try:
            Config.from_dict({"gradients": section})
        except ConfigError as error:
            said[section["method"]] = str(error)
    for n in (2, 3):
        torch.multiprocessing.start_processes(rank, (n, sys.argv[1]), nprocs=n, start_method="fork")
    print(json.dumps(said))
"""


def test_a_file_and_a_line_make_a_method(tmp_path: Path) -> None:
    copy = PackageCopy(tmp_path)
    copy.edit(
        "pipecomp/config/gradients.py",
        ("METHODS: dict", f"{OPTIONS}METHODS: dict"),
        ('    "qsgd": LinearOptions,\n', '    "qsgd": LinearOptions,\n    "every_nth": EveryNthOptions,\n'),
    )
    copy.add("pipecomp/allreduce/methods/every_nth.py", FILE)
    copy.edit(
        "pipecomp/allreduce/methods/__init__.py",
        ("\nMETHODS", f"{IMPORT}\nMETHODS"),
        ('    "qsgd": Qsgd,\n', f'    "qsgd": Qsgd,\n{LINE}'),
    )
    options, folder, methods = named_files("a gradient method")
    assert copy.edited == [options, f"{folder}every_nth.py", methods]
    said = json.loads(copy.run(USE).splitlines()[-1])
    assert said["every_nth"] == "gradients.stride: got 0, allowed: a whole number of at least 1"
    assert said["qsgd"] == "gradients.stride: got 2, allowed: only with 'every_nth', not 'qsgd'"
