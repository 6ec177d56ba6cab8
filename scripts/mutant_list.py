"""Small defects that a test must notice: each an edit of the product, the tests closest to it, and why it matters.

`old` stands exactly once in its file; a unit test checks that, so that the list follows the code.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One edit. tests: files or nodes, as pytest takes them. why: what users would get."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str


EXACT = ("tests/allreduce/test_exact.py",)
LINK = ("tests/stages/test_link_exact.py",)
CONSTANT_ERROR = (
    "tests/stages/test_constant_error.py::test_changes_have_the_fewest_bits_that_keep_the_error_of_the_values",
)
OUTER, ROWS = ("tests/local_steps/test_outer_steps.py",), ("tests/local_steps/test_row_rates.py",)
STAGING = ("tests/stages/test_staging.py",)
GRADIENT_STAGING = ("tests/allreduce/test_staging.py",)
WIRE = ("tests/messages/test_wire.py",)
CODEC_LENGTHS = ("tests/messages/test_codecs.py::test_a_payload_of_another_length_is_refused",)
LENGTHS = ("tests/stages/test_link.py::test_a_payload_of_another_length_is_refused",)
LIMITS = ("tests/mesh/test_mesh.py::TestLimits",)
GLOO = ("tests/stages/test_gloo.py",)
TRUST_2 = ("tests/trust/test_trust.py::test_pipelines_train_as_the_unsplit_model[2]",)
TRUST_4 = ("tests/trust/test_trust.py::test_pipelines_train_as_the_unsplit_model[4]",)

_DRAW = "ops.mix_seed(self._config.seed, self._replica, self.index, direction, at.step, at.micro_batch, part)"
_ENDPOINT = "stages/link/endpoint.py"
_INBOX = "pipecomp/mesh/inbox.py"
_GLOO = "stages/link/gloo.py"
_DITHERING = "pipecomp/allreduce/dithering.py"
_GATHER = "pipecomp/allreduce/all_gather.py"
_CASQ = "pipecomp/allreduce/methods/casq.py"
_RESIDUALS = "pipecomp/allreduce/error_feedback.py"


def _draws_without(what: str, argument: str, replacement: str = "0") -> Mutant:
    """A link's rounding seed that leaves one thing out."""
    new = _DRAW.replace(argument, replacement)
    assert new != _DRAW
    why = f"the same rounding noise for every {what}: errors that should average out add up"
    return Mutant(f"a link's rounding without the {what}", _ENDPOINT, _DRAW, new, LINK, why)


def _draws_every_call_alike(what: str, file: str, before: str, old: str, new: str) -> Mutant:
    """Random numbers of a gradient method without the number of the call."""
    why = "the same rounding noise in every step: an unbiased method becomes biased"
    return Mutant(f"{what}: the same draws in every call", file, before + old, before + new, EXACT, why)


MUTANTS = (
    # -- gradients: sums and means
    Mutant(
        "tied gradients as a mean over stages",
        "pipecomp/engine/gradient_exchange.py",
        "g.mul_(stages)",
        "pass",
        ("tests/engine/test_gradient_exchange.py",),
        "with two stages a tied embedding learns at half its rate",
    ),
    Mutant(
        "tied gradients are not summed",
        "pipecomp/engine/reduction.py",
        "dist.all_reduce(grad, group=self._tied_groups[name])",
        "pass",
        TRUST_2,
        "copies of a tied weight drift apart",
    ),
    Mutant(
        "a mean over replicas without its division",
        "pipecomp/allreduce/methods/uncompressed.py",
        "total.div_(self._n).to(self._dtype)",
        "total.to(self._dtype)",
        EXACT,
        "gradients grow with the number of replicas",
    ),
    Mutant(
        "a mean of local norms without its division",
        _GATHER,
        "        out.div_(divisor(len(rows), out))\n",
        "",
        EXACT,
        "gradients grow with the number of replicas",
    ),
    Mutant(
        "micro-batches are averaged twice",
        "pipecomp/engine/stage_work.py",
        'engine.loss = engine.module.loss_fn(outputs, engine.pipe_buffers["labels"][buffer_id])',
        'engine.loss = engine.module.loss_fn(outputs, engine.pipe_buffers["labels"][buffer_id]) / engine.micro_batches',
        TRUST_2,
        "gradients become smaller with more micro-batches",
    ),
    Mutant(
        "the first micro-batch's loss as the step's",
        "pipecomp/engine/stage_work.py",
        "loss.clone() if engine.total_loss is None else engine.total_loss + loss",
        "loss.clone() if engine.total_loss is None else engine.total_loss",
        TRUST_2,
        "the reported loss is not the mean over micro-batches and replicas",
    ),
    Mutant(
        "the norm counts tied weights twice",
        "pipecomp/engine/reduction.py",
        'if not getattr(p, "ds_pipe_replicated", False)]',
        "]",
        TRUST_2,
        "clipped gradients are too small",
    ),
    Mutant(
        "the norm of each stage by itself",
        "pipecomp/engine/reduction.py",
        "        dist.all_reduce(square, group=self._engine.grid.get_pipe_parallel_group())\n",
        "",
        TRUST_2,
        "stages clip by different factors, so that the gradient's direction changes",
    ),
    Mutant(
        "the learning rate's schedule is dropped",
        "pipecomp/engine/initialize.py",
        "        lr_scheduler=lr_scheduler,\n",
        "        lr_scheduler=None,\n",
        TRUST_2,
        "the rate stays constant although a schedule was given",
    ),
    Mutant(
        "activation checkpointing is ignored",
        "pipecomp/engine/initialize.py",
        "if agreed.recomputes:",
        "if False:",
        ("tests/dist/test_recomputing.py::test_the_same_training_bit_for_bit",),
        "memory runs out where the setting should have saved it",
    ),
    # -- gradients: norms
    Mutant(
        "QSGD-MN relative to the largest value",
        "pipecomp/allreduce/methods/qsgd_mn.py",
        "MAX_OF_L2 = (2.0, math.inf)",
        "MAX_OF_L2 = (math.inf, math.inf)",
        EXACT,
        "another algorithm than the paper's, with another variance",
    ),
    Mutant(
        "QSGD relative to the largest value",
        "pipecomp/allreduce/methods/local_norm.py",
        "GatheredAverage(self.bits, 2.0)",
        "GatheredAverage(self.bits, math.inf)",
        EXACT,
        "another algorithm than the paper's, with another variance",
    ),
    Mutant(
        "NUQSGD relative to the largest value",
        "pipecomp/allreduce/methods/local_norm.py",
        "GatheredAverage(self.bits, 2.0, exponential=True)",
        "GatheredAverage(self.bits, math.inf, exponential=True)",
        EXACT,
        "another algorithm than the paper's, with another variance",
    ),
    Mutant(
        "[q, p] of a norm swapped",
        "pipecomp/allreduce/methods/global_qsgd.py",
        "return float(q), float(p)",
        "return float(p), float(q)",
        EXACT,
        "a norm over workers where one inside a worker was asked for",
    ),
    # -- gradients: draws
    _draws_every_call_alike(
        "linear levels",
        _DITHERING,
        "self._sum_bits = ops.linear_bits(self._least, self._n)\n",
        "        self._seed = call.draw(_ENCODE, call.group.rank)",
        "        self._seed = ops.mix_seed(call.seed, _ENCODE, call.group.rank)",
    ),
    _draws_every_call_alike(
        "exponential levels",
        _DITHERING,
        "self._n = call.group.size\n",
        "        self._seed = call.draw(_ENCODE, call.group.rank)",
        "        self._seed = ops.mix_seed(call.seed, _ENCODE, call.group.rank)",
    ),
    _draws_every_call_alike(
        "the sum of exponential levels",
        _DITHERING,
        "",
        "self._call.draw(_REDUCE, start, level, i)",
        "ops.mix_seed(self._call.seed, _REDUCE, start, level, i)",
    ),
    _draws_every_call_alike(
        "QSGD and TernGrad",
        _GATHER,
        "self._norm, self._bits, self._levels = norm, bits, levels_of(bits)\n",
        "        self._seed = call.draw(call.group.rank)",
        "        self._seed = ops.mix_seed(call.seed, call.group.rank)",
    ),
    _draws_every_call_alike(
        "NUQSGD",
        _GATHER,
        "self._norm, self._bits = norm, bits\n",
        "        self._seed = call.draw(call.group.rank)",
        "        self._seed = ops.mix_seed(call.seed, call.group.rank)",
    ),
    _draws_every_call_alike(
        "GRandK's coordinates",
        "pipecomp/allreduce/methods/grandk.py",
        "",
        "call.draw(_COORDINATES)",
        "_COORDINATES",
    ),
    Mutant(
        "ranks round with the same noise",
        _GATHER,
        "self._norm, self._bits, self._levels = norm, bits, levels_of(bits)\n"
        "        self._seed = call.draw(call.group.rank)",
        "self._norm, self._bits, self._levels = norm, bits, levels_of(bits)\n        self._seed = call.draw(0)",
        EXACT,
        "the variance does not fall with the number of replicas",
    ),
    # -- gradients: error feedback
    Mutant(
        "CASQ's residual without its old value",
        _CASQ,
        "ops.sketch_encode_(sum_d, e_d, centers, how)",
        "ops.sketch_encode_(x_d, e_d, centers, how)",
        EXACT,
        "what was left out twice is lost",
    ),
    Mutant(
        "one CASQ plan for all tensors",
        _CASQ,
        "self._plans.get(call.key, (0, torch.empty(0), torch.empty(0), None))",
        "next(iter(self._plans.values()), (0, torch.empty(0), torch.empty(0), None))",
        EXACT,
        "a tensor is clustered around the values of another",
    ),
    Mutant(
        "CASQ's buckets shared by number alone",
        _CASQ,
        "float(-(share * share.log2()).sum()) * values.numel()",
        "1.0 * values.numel()",
        EXACT,
        "another algorithm than the paper's: clusters that spread get too few means",
    ),
    Mutant(
        "residuals start anew when buckets change",
        _RESIDUALS,
        "target.copy_(_used_here(piece))",
        "target.zero_()",
        EXACT,
        "what was left out before DDP made its buckets anew is lost",
    ),
    Mutant(
        "owners' residuals by key alone",
        _RESIDUALS,
        "*self._ranks)))\n        return self._owned[key, slices]",
        "*self._ranks)))\n        return next(e for (k, _), e in self._owned.items() if k == key)",
        EXACT,
        "what was left out of one parameter is added to another",
    ),
    Mutant(
        "owners' residuals start anew when buckets change",
        _RESIDUALS,
        "self._make_up(*place, left)",
        "pass",
        EXACT,
        "what owners left out before DDP made its buckets anew is lost",
    ),
    # -- links: draws
    _draws_without("seed", "self._config.seed"),
    _draws_without("replica", "self._replica"),
    _draws_without("link", "self.index"),
    _draws_without("direction", "direction"),
    _draws_without("step", "at.step"),
    _draws_without("micro-batch", "at.micro_batch"),
    _draws_without("sample", "part"),
    # -- links: deltas and packets
    Mutant(
        "a delta is set, not added",
        "pipecomp/messages/link_codecs.py",
        "codec.options(), delta, dtype",
        "codec.options(), False, dtype",
        ("tests/stages/test_link.py::test_algorithm_1",),
        "the next stage trains on the last change alone",
    ),
    Mutant(
        "the delta's sign",
        "kernels/reference.py",
        "quantize(a.to(torch.float32) - m, options, name)",
        "quantize(m - a.to(torch.float32), options, name)",
        ("tests/kernels/test_quantize.py",),
        "cached activations run away from the true ones",
    ),
    Mutant(
        "codes of half the range",
        "kernels/reference.py",
        "u_RGn * float(1 << options.bits - 1)",
        "u_RGn * float(1 << options.bits)",
        ("tests/kernels/test_quantize.py",),
        "a scale that is off by one bit: large values are clipped",
    ),
    Mutant(
        "constant error: always the most bits",
        "pipecomp/messages/codecs.py",
        "return self.bits if e is None else ops.fewest_bits(visits, e.error, e.min, e.max)",
        "return self.bits",
        CONSTANT_ERROR,
        "packets are as long as if no error had been set",
    ),
    Mutant(
        "constant error: relative to the change",
        "kernels/distortion.py",
        "power_R = halved_sum(x_RH * x_RH)",
        "power_R = halved_sum(v_RH * v_RH)",
        ("tests/kernels/test_distortion.py::test_of_a_change_the_error_is_relative_to_the_value_itself",),
        "small changes get as many bits as the values themselves",
    ),
    Mutant(
        "constant error: any bits are taken",
        "pipecomp/messages/codecs.py",
        "if self.error is None else self.error.min <= bits <= self.error.max",
        "if self.error is None else True",
        ("tests/stages/test_constant_error.py::test_bits_out_of_range_are_refused",),
        "a packet that was not made by this configuration is taken for one",
    ),
    Mutant(
        "bits at the start: a rate is not looked at",
        "pipecomp/plan/auto.py",
        "line if rate is None else",
        "line if True else",
        ("tests/plan/test_measure.py::TestDecision::test_given_rates_count_as_measured_ones",),
        "packets have more bits than their link hides",
    ),
    Mutant(
        "bits at the start: a checkpoint's are not taken",
        "pipecomp/engine/checkpointing.py",
        "if saved is None or saved[0] !=",
        "if saved is not None or saved[0] !=",
        ("tests/dist/test_auto_bits.py::test_a_run_that_goes_on_takes_the_bits_of_its_checkpoint",),
        "a run that goes on trains with other bits, and ends with another loss",
    ),
    Mutant(
        "a delta on any version",
        "stages/link/visits.py",
        "if cached is None or cached.version != sample.base:",
        "if cached is None:",
        ("tests/stages/test_link.py::test_a_delta_on_another_version_is_refused",),
        "training on wrong numbers, without an error",
    ),
    Mutant(
        "versions that were there before",
        "stages/link/handshake.py",
        "end.next_version = max(mine[1], theirs[1]) + 1",
        "end.next_version = 1",
        ("tests/stages/test_link.py::TestAgreement::test_what_differs_is_sent_whole_once",),
        "after a resume two different activations have one version",
    ),
    Mutant(
        "drift is not looked at",
        "stages/link/drift.py",
        "if theirs == mine:",
        "if True:",
        LINK,
        "ends that hold different activations are noticed by the loss alone",
    ),
    Mutant(
        "no limit for a packet's tensor",
        _ENDPOINT,
        "> MAX_TENSOR_BYTES:",
        "> MAX_TENSOR_BYTES << 40:",
        LINK,
        "a hostile or damaged packet makes a rank allocate terabytes",
    ),
    Mutant(
        "a packet is not held to the agreed model and batch",
        _ENDPOINT,
        "self.bounds.check(header, rows)",
        "pass",
        ("tests/mesh/test_tls_transport.py::TestBounds",),
        "a few bytes that announce padding make a rank fill gigabytes",
    ),
    Mutant(
        "no limit for a packet over TLS",
        _INBOX,
        "if total > sink.most_bytes:",
        "if False:",
        LIMITS,
        "a rank takes memory for whatever another one announces",
    ),
    Mutant(
        "no limit for a packet over gloo",
        _GLOO,
        "if total > self.most_bytes:",
        "if False:",
        GLOO,
        "a rank takes memory for whatever another one announces",
    ),
    Mutant(
        "a message shorter than its receive",
        _INBOX,
        "if size != total:",
        "if size < total:",
        LIMITS,
        "a collective goes on with a buffer's old bytes behind the message",
    ),
    Mutant(
        "an early message shorter than its receive",
        _INBOX,
        "if len(transfer.view) != data.size:",
        "if len(transfer.view) < data.size:",
        LIMITS,
        "a collective goes on with a buffer's old bytes behind the message",
    ),
    Mutant(
        "a message that becomes shorter on the way",
        _INBOX,
        "if len(arriving.view) != header.total or",
        "if len(arriving.view) < header.total or",
        LIMITS,
        "a message ends before all of its bytes are there",
    ),
    Mutant(
        "a receive longer than the message for it",
        "pipecomp/mesh/outbox.py",
        "if lane.asked[0] != size:",
        "if lane.asked[0] < size:",
        LIMITS,
        "ranks that disagree on a message's length are not told which",
    ),
    Mutant(
        "a packet over gloo that becomes shorter on the way",
        _GLOO,
        "if total != packet.size or",
        "if total > packet.size or",
        GLOO,
        "a packet ends before all of its bytes are there, or never",
    ),
    Mutant(
        "a payload shorter than its samples need",
        "stages/link/visits.py",
        "if ends[-1] != payload.numel():",
        "if ends[-1] < payload.numel():",
        LENGTHS,
        "a packet that was not made by this code is taken for one",
    ),
    Mutant(
        "a payload longer than its values need",
        "pipecomp/messages/codecs.py",
        "if payload.numel() != expected:",
        "if payload.numel() < expected:",
        CODEC_LENGTHS,
        "a packet that was not made by this code is taken for one",
    ),
    Mutant(
        "bytes behind a packet",
        "pipecomp/messages/wire.py",
        "if packet.size != expected:",
        "if packet.size < expected:",
        WIRE,
        "a packet that was not made by this code is taken for one",
    ),
    Mutant(
        "a packet's checksum is not compared",
        "pipecomp/messages/wire.py",
        "if check != sent_check:",
        "if False:",
        WIRE,
        "a flipped bit becomes part of training",
    ),
    Mutant(
        "a stored value's checksum is not compared",
        "buffers/value.py",
        "if checksum and _checksum(value) != header.crc:",
        "if False:",
        ("tests/buffers/test_value.py",),
        "a flipped bit on the disk becomes part of training",
    ),
    Mutant(
        "a stored setting's checksum is not compared",
        "buffers/lmdb_file.py",
        "if crc is not None and (value is None or crc != _crc(value)):",
        "if False:",
        ("tests/buffers/test_mending.py",),
        "a flipped bit on the disk makes a store one of other settings, which no restart can open",
    ),
    Mutant(
        "a checkpoint's copy of a damaged store takes its place",
        "buffers/lmdb_store.py",
        "if (problem := unsound(saved.parent)) is not None:",
        "if (problem := None) is not None:",
        ("tests/buffers/test_mending.py",),
        "every restart loads the damage again",
    ),
    # -- data and resuming
    Mutant(
        "replicas have each other's samples",
        "pipecomp/data.py",
        "torch.arange(samples)[replica::replicas]",
        "torch.arange(samples)[replicas - 1 - replica :: replicas]",
        ("tests/test_data.py",),
        "every cached activation is at the wrong replica after an update",
    ),
    Mutant(
        "links do not compare their stores after a resume",
        "pipecomp/engine/checkpointing.py",
        "dropped = engine.links.agree()",
        "dropped = 0",
        ("tests/dist/test_resume_agreement.py",),
        "the first step after a resume ends with an error, or trains on wrong numbers",
    ),
    Mutant(
        "a checkpoint that one machine lacks",
        "pipecomp/recipes/resume.py",
        "everywhere = set.intersection(",
        "everywhere = set.union(",
        ("tests/recipes/test_resume.py",),
        "machines go on from different steps, or not at all",
    ),
    # -- staging: the double of tests/lazy_staging.py has the poisoned buffer of a copy as `target`
    Mutant(
        "no wait for a chunk's codes before they are sent",
        "pipecomp/allreduce/reduce_scatter.py",
        "[copy.wait() for copy in encoded]",
        "[copy.target for copy in encoded]",
        GRADIENT_STAGING,
        "ranks average whatever was in a buffer",
    ),
    Mutant(
        "no wait for reduced codes before they are decoded",
        "pipecomp/allreduce/reduce_scatter.py",
        "code.decode(copy.wait(),",
        "code.decode(copy.target,",
        GRADIENT_STAGING,
        "the optimizer steps by whatever was in a buffer",
    ),
    Mutant(
        "no wait for a gathered piece's codes before they are sent",
        "pipecomp/allreduce/all_gather.py",
        "codes = encoded.wait()",
        "codes = encoded.target",
        GRADIENT_STAGING,
        "ranks average whatever was in a buffer",
    ),
    Mutant(
        "no wait for other ranks' codes before they are decoded",
        "pipecomp/allreduce/all_gather.py",
        "code.add(copy.wait(),",
        "code.add(copy.target,",
        GRADIENT_STAGING,
        "the optimizer steps by whatever was in a buffer",
    ),
    Mutant(
        "no wait for CASQ's codes before they are sent",
        "pipecomp/allreduce/methods/casq.py",
        "codes])).wait()",
        "codes])).target",
        GRADIENT_STAGING,
        "ranks average whatever was in a buffer",
    ),
    Mutant(
        "no wait for CASQ's codes before they are decoded",
        "pipecomp/allreduce/methods/casq.py",
        "copy.wait().split(",
        "copy.target.split(",
        GRADIENT_STAGING,
        "the optimizer steps by whatever was in a buffer",
    ),
    Mutant(
        "no wait for a payload before it is sent",
        "stages/link/endpoint.py",
        "        self._payload.wait()\n",
        "",
        STAGING,
        "the other stage computes with whatever was in a buffer",
    ),
    Mutant(
        "no wait for the flag of finite values",
        "stages/link/endpoint.py",
        "verdict.check(flag.wait())",
        "verdict.check(flag.target)",
        STAGING,
        "steps end with errors that there are not, or with none where there is one",
    ),
    Mutant(
        "a store writes without asking whether values were finite",
        "buffers/entry.py",
        "                self._settled()\n",
        "                pass\n",
        STAGING,
        "NaN is stored, and comes back with every later visit",
    ),
    Mutant(
        "no wait for m before it is stored",
        "buffers/entry.py",
        "m_nH = self._m.wait()",
        "m_nH = self._m.target",
        STAGING,
        "what is stored is not what the other end holds",
    ),
    Mutant(
        "no wait for a loaded m",
        "buffers/core.py",
        "loaded.m.wait()",
        "loaded.m.target",
        STAGING,
        "deltas of a buffer's old bytes",
    ),
    Mutant(
        "no wait before m is rounded",
        "buffers/core.py",
        "m_nH = self._staging.to_host(m_nH).wait()",
        "m_nH = self._staging.to_host(m_nH).target",
        STAGING,
        "a sample that comes twice in a micro-batch is wrong",
    ),
    Mutant(
        "no wait for a rounded m",
        "buffers/core.py",
        "self._staging.to_device(again_nH).wait()",
        "self._staging.to_device(again_nH).target",
        STAGING,
        "a sample that comes twice in a micro-batch is wrong",
    ),
    Mutant(
        "no wait for what was received",
        "stages/link/arrivals.py",
        "copy.wait()[start",
        "copy.target[start",
        STAGING,
        "a stage computes with a buffer's old bytes",
    ),
    Mutant(
        "no wait for the norms of sampled activations",
        "stages/link/sender.py",
        "popleft().wait().tolist()",
        "popleft().target.tolist()",
        STAGING,
        "reports tell a wrong error of compression",
    ),
    Mutant(
        "a packet on its way from a device is sent as it is",
        "stages/link/transport.py",
        "else packet.finish()",
        "else packet.buffer",
        STAGING,
        "the other stage gets an unsealed packet",
    ),
    Mutant(
        "rates of rows count the noise of quantized averages",
        "pipecomp/local_steps/row_rates.py",
        "there = lengths * share",
        "there = lengths * 1.0",
        ROWS,
        "with few bits replicas take outer steps that are too short",
    ),
    Mutant(
        "an outer step forgets the steps that were taken while it was on its way",
        "pipecomp/local_steps/common.py",
        "self._common[name] + (own - then)",
        "self._common[name] + 0 * (own - then)",
        OUTER,
        "a part of the training is done for nothing",
    ),
)
