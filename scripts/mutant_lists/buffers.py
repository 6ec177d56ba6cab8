"""Defects in buffers/: message stores."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

STAGING = ("tests/stages/test_staging.py",)

MUTANTS = (
    # -- damage on the disk
    Mutant(
        "a stored value's checksum is not compared",
        "buffers/value.py",
        "if _checksum(value) != header.crc:",
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
    # -- steps
    Mutant(
        "what was loaded ahead of a forgotten sample is handed out",
        "buffers/core.py",
        "        self._invalidate([*evicted, *declined])\n",
        "",
        ("tests/buffers/test_conformance.py::test_what_is_forgotten_is_forgotten_ahead_too",),
        "a change of what the other end has forgotten: the run ends",
    ),
    Mutant(
        "values on disk stay in memory",
        "buffers/lmdb_steps.py",
        "entry.release()",
        "pass",
        ("tests/buffers/test_lmdb.py::TestSteps::test_what_is_on_disk_is_in_memory_no_more",),
        "memory grows by every sample of the data",
    ),
    Mutant(
        "a step that waits to be written is written into what was restored",
        "buffers/lmdb_store.py",
        "            self.writer.drain()\n            self.steps",
        "            self.steps",
        ("tests/buffers/test_disk.py::test_a_copy_has_every_committed_step_and_takes_the_place_of_later_ones",),
        "the file holds other activations than the checkpoint",
    ),
    # -- staging: the double of tests/lazy_staging.py has the poisoned buffer of a copy as `target`
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
)
